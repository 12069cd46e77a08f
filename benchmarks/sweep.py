"""A sweep: crafted and changed files, each given to the commands that read it, with tracebacks counted.

``fuzz.py`` tries parsers one by one; this tries whole commands, in this process, so that thousands take minutes. A
command must end with its result or with one line: ``python benchmarks/sweep.py [INPUTS]`` prints, for each kind of file
and command, how many inputs there were, how many of them were refused, and how many ended in any other way.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from fuzz import changed
from PIL import Image

from feddf import cli
from feddf.models.small import CNN, MLP
from feddf.runtime.packages import transformers
from feddf.saved.model import Features, Images, ModelSpec

SECONDS, MEMORY = 4.0, 8 << 30
"""After so long a command is interrupted, as by Ctrl-C: a changed configuration can ask for any amount of work."""

CONFIG = """
name = "small"
rounds = 1
prototypes = ["mlp"]
data = {name = "toy"}
pool = {sources = ["plane"]}
clients = {total = 2, fraction = 1.0}
local = {epochs = 1}
distill = {steps = 2}
run = {engine = "in-process"}
"""
FUSE = """
teachers = ["model"]
student = {model = "cnn", options = {width = 2}}
pool = {sources = ["images:pictures"]}
cache = "cache"
distill = {steps = 2}
"""
SHAPE, CLASSES = (1, 8, 8), ("top", "middle", "bottom")
DEEP, DIGITS, ESCAPES = 100_000, "9" * 5000, "\x1b]0;owned\x07\x9b31m\u202e"
_STUDENT = "{model = 'cnn', options = {width = 2}}"
_FUSE = ("--student", _STUDENT, "--unlabeled", "pictures", "--out", "out", "--cache", "cache", "steps=2")
_TEXTS = (
    "fuse", "--teacher", "{path = 'texts', max_tokens = 8}", "--unlabeled", "lines.txt", "--out", "out", "--cache",
    "cache", "steps=2", "--student", "{model = 'transformer', options = {path = 'texts'}, tokenizer = 'texts'}",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A file that is valid, the commands that read it, and crafted contents besides changes of the valid one."""

    file: str
    commands: Sequence[Sequence[str]]
    crafted: Sequence[bytes] = ()
    checked: bool = False  # has its SHA-256 beside it


@dataclass
class Found:
    """How often a command was run with a kind of file, was refused or interrupted, and what went wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


# What is valid


def furnish(place: Path) -> None:
    """Write one valid file, or folder, of each kind."""
    (place / "small.toml").write_text(CONFIG)
    (place / "fuse.toml").write_text(FUSE)
    torch.manual_seed(0)
    _model(place / "model", CNN(SHAPE, 3, width=2), ModelSpec("cnn", SHAPE, CLASSES, IMAGES, {"width": 2}))
    _model(place / "rows", MLP((2,), 3, width=4), ModelSpec("mlp", (2,), CLASSES, COLUMNS, {"width": 4}))
    (place / "pictures").mkdir()
    for number in range(6):
        Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(place / "pictures" / f"{number}.png")
    (place / "x.csv").write_text("a,b,label\n" + "".join(f"{i / 7},{i % 5},{CLASSES[i % 3]}\n" for i in range(60)))
    (place / "lines.txt").write_text("good\nbad\n" * 5)
    (place / "data" / "mnist").mkdir(parents=True)
    for part in ("train", "t10k"):
        images = b"\0\0\x08\x03" + struct.pack(">III", 30, 28, 28) + bytes(30 * 28 * 28)
        (place / f"data/mnist/{part}-images-idx3-ubyte").write_bytes(images)
        labels = b"\0\0\x08\x01" + struct.pack(">I", 30) + bytes(i % 10 for i in range(30))
        (place / f"data/mnist/{part}-labels-idx1-ubyte").write_bytes(labels)
    (place / "t.onnx").write_bytes(_onnx())
    _classifier(place / "texts")
    code, *_, said = command(("run", "small.toml", "--out", "run"), place, seconds=120)
    if code:
        raise SystemExit(f"a valid run failed: {said}")
    (place / "run" / "config.sha256").unlink()  # else every change is noticed before it is read


IMAGES, COLUMNS = Images(SHAPE, (0.4,), (0.3,)), Features((2,), (0.0, 0.0), (1.0, 1.0), ("a", "b"))


def _model(folder: Path, network: torch.nn.Module, spec: ModelSpec) -> None:
    folder.mkdir()
    safetensors.torch.save_file(network.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"feddf": spec.describe()}))


def _onnx() -> bytes:
    from onnx import TensorProto, helper

    shapes = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, *SHAPE]), [None, 64]
    nodes = [helper.make_node("Flatten", ["x"], ["y"])]
    graph = helper.make_graph(
        nodes, "g", shapes[:1], [helper.make_tensor_value_info("y", TensorProto.FLOAT, shapes[1])]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(made.SerializeToString())


def _classifier(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    library, words = transformers(), {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = library.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    sizes = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 32}
    config = library.DistilBertConfig(vocab_size=4, pad_token_id=0, id2label={0: "a", 1: "b"}, **sizes)
    library.DistilBertForSequenceClassification(config).save_pretrained(folder)


# What is crafted


def _header(value: object) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


def _tensor(**values: object) -> bytes:
    return _header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | values}) + bytes(4)


def _bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")


def _expression(pattern: str) -> Callable[[Path], bytes]:
    def make(place: Path) -> bytes:
        values = json.loads((place / "texts" / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        return json.dumps({**values, "pre_tokenizer": split}).encode()

    return make


NOTHING = (b"", b"\0" * 1000, b"\xff\xfe" * 100, b"[" * DEEP, b'{"a":' * DEEP, b'"' + b"x" * 200_000)
TOML = (
    *NOTHING, f"x = {'[' * 5000}{']' * 5000}".encode(), f"x = {'{a=' * 500}1{'}' * 500}".encode(),
    f"{'.'.join('a' * 3000)} = 1".encode(), f"seed = {DIGITS}".encode(), f"seed = 0x{'f' * 5000}".encode(),
    f'name = {json.dumps(ESCAPES)}'.encode() + CONFIG.replace('name = "small"', "", 1).encode(),
)  # fmt: skip
JSON = (
    *NOTHING, DIGITS.encode(), b"null", b"[]", b"3", b'{"feddf": 3}', b'{"feddf": {"prototypes": [1]}}', b"1e999",
    b'{"feddf": {"prototypes": {"../../x": {}}}}', b'{"feddf": {"prototypes": {"a": {"model": "os:system"}}}}',
)  # fmt: skip
WEIGHTS = (
    *NOTHING, _header(b"[" * DEEP), _header([]), struct.pack("<Q", 2**62), _header({"__metadata__": {"feddf": 3}}),
    _tensor(), _tensor(shape=[2**62, 4]), _tensor(shape=[-1]), _tensor(dtype="F4096"), _tensor(data_offsets=[4, 0]),
    _tensor(data_offsets=[0, 2**63]), _tensor(shape="x"), _header({'["models"]': None}),
)  # fmt: skip
TABLES = (
    *NOTHING, b"a,b,label\n1,2,x\n" * 2, b"a,a,label\n1,2,x\n", b'a,b,label\n1,"2,x\n' + b"1,2,x\n" * 50_000,
    f"a,b,label\n{DIGITS},1,x\n1,1,{DIGITS}\n".encode(), f"a,b,label\n1,2,{ESCAPES}\n3,4,²\n".encode(),
    b"a,b,label\n1e400,1,x\n", b"a,b,label\nnan,inf,x\n", b"," * 500_000, b"label\nx\n", b"a,b,label\n1\n",
)  # fmt: skip
PICTURES = (*NOTHING, _bomb(12_800, 12_800), _bomb(2**31 - 1, 2**31 - 1), _bomb(0, 0), _bomb(1, 1), b"GIF89a\0\0\0\0")
EXPRESSIONS = ("(", "(a+)+$", "(" * 5000 + ")" * 5000, "[[", r"\p{Nope}", "(?<=a+)b", "x{1000000}")


def kinds(place: Path) -> list[Kind]:
    """Return the kinds of files, with the commands that read each."""
    reports = (("report", "run"), ("report", "run", "--json"), ("resume", "run"), ("resume", "run", "rounds=2"))
    models = (
        ("predict", "model", "pictures/0.png"), ("inspect", "model"), ("fuse", "--teacher", "model", *_FUSE),
        ("fuse", "--check", "--teacher", "model", *_FUSE),
    )  # fmt: skip
    rows = (
        ("predict", "rows", "x.csv"), ("inspect", "rows", "--labeled", "table:x.csv"),
        ("partition", "small.toml", "data.name=table:x.csv", "--json"), ("run", "small.toml", "data.name=table:x.csv"),
        ("fuse", "--teacher", "rows", "--student", "mlp", "--unlabeled", "x.csv", "--out", "out", "steps=2"),
    )  # fmt: skip
    digits = (("data", "check", "mnist"), ("partition", "small.toml", "data.name=mnist", "--json"))
    expressions = [_expression(pattern)(place) for pattern in EXPRESSIONS]
    onnx = (("inspect", "t.onnx"), ("fuse", "--teacher", "{path = 't.onnx', size = 8, channels = 1}", *_FUSE))
    checkpoint = next((place / "run" / "checkpoints").glob("*.safetensors")).relative_to(place)
    return [
        Kind("small.toml", [("partition", "small.toml", "--json"), ("run", "small.toml"),
                            ("compare", "small.toml", "--methods", "fedavg")], TOML),
        Kind("fuse.toml", [("fuse", "fuse.toml", "out"), ("fuse", "--check", "fuse.toml")], TOML),
        Kind("run/config.toml", reports, TOML),
        Kind("run/metrics.jsonl", reports, JSON),
        Kind("run/config.json", [("predict", "run", "x.csv"), ("inspect", "run")], JSON),
        Kind(str(checkpoint), reports[2:], WEIGHTS, checked=True),
        Kind("run/models/mlp.safetensors", [("predict", "run", "x.csv"), ("inspect", "run")], WEIGHTS),
        Kind("model/config.json", models, JSON),
        Kind("model/model.safetensors", models, WEIGHTS),
        Kind("pictures/0.png", models[:1] + models[2:3], PICTURES),
        Kind("x.csv", rows, TABLES),
        Kind("data/mnist/train-images-idx3-ubyte", digits, NOTHING),
        Kind("data/mnist/train-labels-idx1-ubyte", digits, NOTHING),
        Kind("t.onnx", onnx, NOTHING),
        Kind("texts/config.json", [("inspect", "texts"), _TEXTS], JSON),
        Kind("texts/tokenizer.json", [_TEXTS], [*JSON, *expressions]),
        Kind("texts/tokenizer_config.json", [_TEXTS], JSON),
        Kind("texts/model.safetensors", [("inspect", "texts"), _TEXTS], WEIGHTS),
        Kind("lines.txt", [_TEXTS], NOTHING),
    ]  # fmt: skip


# The sweep


def command(words: Sequence[str], place: Path, seconds: float = SECONDS) -> tuple[int, str, str]:
    """Run a command here; return its exit code (-1: a traceback), what it printed, and what it complained about."""
    out, err, interrupted = StringIO(), StringIO(), signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with chdir(place), redirect_stdout(out), redirect_stderr(err):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            code = cli.guarded(lambda: cli.app(list(words), standalone_mode=False))
    except KeyboardInterrupt:  # it came while the command was ending
        code = 130
    except BaseException:
        return -1, out.getvalue(), traceback.format_exc(limit=-3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, interrupted)
    return code, out.getvalue(), err.getvalue()


def fault(code: int, out: str, err: str) -> str | None:
    """Return what is wrong with the way in which a command ended, or ``None``."""
    lines = [line for line in err.splitlines() if not line.startswith("warning:")]
    if code == -1 or "Traceback" in err:
        return f"a traceback: {err[-600:]}"
    if odd := [one for one in out + err if not one.isprintable() and one not in "\n\t"]:
        return f"{odd[0]!r} reaches the terminal"
    if code in (1, 2, 3) and (len(lines) != 1 or not lines[0].startswith("error:")):
        return f"not one line: {err[-600:]}"
    return None


def sweep(which: int, inputs: int) -> dict[str, Found]:
    """Give so many inputs of one kind to its commands; return by command what was found."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix="feddf-sweep-"))
    os.environ["FEDDF_DATA"] = str(place / "valid" / "data")
    try:
        (place / "valid").mkdir()
        furnish(place / "valid")
        return _swept(place / "valid", kinds(place / "valid")[which], inputs)
    finally:
        shutil.rmtree(place)


def _swept(place: Path, kind: Kind, inputs: int) -> dict[str, Found]:
    chance, path, found = random.Random(kind.file), place / kind.file, dict[str, Found]()
    valid, kept = path.read_bytes(), place.with_name("kept")
    shutil.copytree(place, kept)
    crafted = (valid, *kind.crafted)
    for number in range(inputs):
        content = crafted[number] if number < len(crafted) else changed(valid, chance)
        for words in kind.commands:
            path.write_bytes(content)
            if kind.checked:
                path.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest())
            ended = command(words, place)
            one = found.setdefault(f"{words[0]} {kind.file}", Found())
            end = {0: "done", 130: "interrupted"}.get(ended[0], "refused")
            refused = f"a valid file is refused: {ended[2]}" if not number and end != "done" else None
            if wrong := fault(*ended) or refused:
                end = "faults"
                one.faults.append(f"{' '.join(words)} with {content[:200]!r}: {wrong}")
            one.ends[end] += 1
            _tidy(place, kept, kind.file.partition("/")[0])
    return found


def _tidy(place: Path, kept: Path, given: str) -> None:
    """Remove what a command wrote, and put back the valid file, or the folder that it lies in."""
    for entry in place.iterdir():
        if entry.name == given or not (kept / entry.name).exists():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    put = shutil.copytree if (kept / given).is_dir() else shutil.copy
    put(kept / given, place / given)


def main(inputs: int = 3000) -> int:
    """Run the sweep on all cores and print its table."""
    with tempfile.TemporaryDirectory() as folder:
        furnish(Path(folder))
        count = len(kinds(Path(folder)))
    total, faults = Counter[str](), list[str]()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for found in pool.map(partial(sweep, inputs=max(40, inputs // count)), range(count)):
            for name, one in found.items():
                print(f"{name}: {one.ends.total()} inputs, " + ", ".join(f"{n} {end}" for end, n in one.ends.items()))
                total.update({name.split()[0]: one.ends.total()})
                faults += one.faults
    for line in faults:
        print(line)
    by_command = ", ".join(f"{name} {n:,}" for name, n in total.most_common())
    print(f"{total.total():,} inputs ({by_command}): {len(faults)} tracebacks or other faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
