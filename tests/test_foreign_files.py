"""Crafted files of every kind that feddf reads: one line and an exit code, within time and memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from conftest import SHAPE
from feddf import cli
from feddf.data.text import tokenizer
from feddf.fusing import onnx_files
from feddf.models.small import CNN
from feddf.runs.spool import ClientStates, DiskSpool
from feddf.runs.store import RunFolder, pack
from feddf.runtime.packages import transformers
from feddf.saved.model import Images, ModelError, ModelSpec
from feddf.saved.model_folder import load_model
from feddf.types import Client, Job

CONFIG = """
name = "small"
rounds = 2
prototypes = ["mlp"]
data = {name = "toy"}
pool = {sources = ["plane"]}
clients = {total = 4, fraction = 1.0}
local = {epochs = 1}
distill = {steps = 20}
run = {engine = "in-process"}
"""
DIGITS, DEEP = "9" * 5000, 100_000
CLASSES = ("top", "middle", "bottom")


def feddf(*words: str, cwd: Path) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        code = cli.guarded(lambda: cli.app(list(words), standalone_mode=False))
    return code, out.getvalue(), err.getvalue()


def refused(*words: str, cwd: Path) -> str:
    """Run a command that must fail with one line, which it returns; anything else raises here."""
    code, _, err = feddf(*words, cwd=cwd)
    lines = [line for line in err.splitlines() if not line.startswith("warning:")]
    assert code in (1, 2, 3), (code, err)
    assert len(lines) == 1, err
    assert lines[0].startswith("error:"), err
    assert "\x1b" not in err
    return lines[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, a model, and images."""
    root = tmp_path_factory.mktemp("foreign")
    (root / "small.toml").write_text(CONFIG)
    assert feddf("run", "small.toml", "--out", "run", cwd=root)[0] == 0
    (root / "model").mkdir()
    torch.manual_seed(0)
    safetensors.torch.save_file(CNN(SHAPE, 3, width=4).state_dict(), root / "model" / "model.safetensors")
    spec = ModelSpec("cnn", SHAPE, CLASSES, Images(SHAPE, (0.4,), (0.3,)), {"width": 4})  # type: ignore[arg-type]
    (root / "model" / "config.json").write_text(json.dumps({"feddf": spec.describe()}))
    (root / "pictures").mkdir()
    for number in range(6):
        Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(root / "pictures" / f"{number}.png")
    return root


@pytest.fixture
def run(place: Path, tmp_path: Path) -> Path:
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run" / "config.sha256").unlink()  # else every change is noticed before it is read
    return tmp_path / "run"


@pytest.fixture
def model(place: Path, tmp_path: Path) -> Path:
    shutil.copytree(place / "model", tmp_path / "model")
    shutil.copytree(place / "pictures", tmp_path / "pictures")
    return tmp_path / "model"


TOML = {
    "nested lists": f"x = {'[' * 5000}{']' * 5000}",
    "nested tables": f"x = {'{a=' * 500}1{'}' * 500}",
    "dotted keys": f"{'.'.join('a' * 3000)} = 1",
    "many digits": f"x = {DIGITS}",
    "a large number": f"seed = 0x{'f' * 5000}",
}


@pytest.mark.parametrize("text", TOML.values(), ids=TOML)
def test_a_configuration(text: str, run: Path) -> None:
    (run.parent / "x.toml").write_text(text + CONFIG)
    for command in ("run", "compare", "fuse"):
        said = refused(command, "x.toml", "--out", "o", cwd=run.parent)
        assert "cannot read the configuration" in said
        assert ("nested more than 64 deep" in said) != ("a number in it has more than 64 bits" in said)
    rest = (run / "config.toml").read_text().replace("\nseed = 0\n", "\n")
    (run / "config.toml").write_text(f"{text}\n{rest}")
    for words in (("report", "run"), ("report", "run", "--json"), ("resume", "run")):
        assert "cannot read" in refused(*words, cwd=run.parent)


WORDS = {"digits": f"rounds={DIGITS}", "bits": f"seed=0x{'f' * 5000}", "lists": f"prototypes={'[' * 3000}{']' * 3000}"}


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_a_word_of_the_command(word: str, tmp_path: Path) -> None:
    refused("run", "demo", word, cwd=tmp_path)


RECORDS: list[Callable[[dict[str, Any]], Any]] = [
    lambda record: record | {"ensemble": "\x1b[31m"},
    lambda record: record | {"ensemble": [1]},
    lambda record: record | {"ensemble": 10**400},
    lambda record: record | {"clients": ["\ud800"]},
    lambda record: record | {"models": {"mlp": {"averaged": "x", "fused": {}}}},
    lambda record: record | {"seconds": {"train": "x"}},
    lambda record: record | {"dropped": [{"client": {"a": 1}}]},
    lambda record: record | {"kept_by_clients": "x"},
    lambda record: record | {"seconds": {"train": math.nan, "fuse": 1e308, "evaluate": 1e308}},
    lambda record: record | {"models": {"mlp": {"averaged": None, "fused": math.inf}}},
    lambda record: {key: record[key] for key in ("round", "models")},
]


@pytest.mark.parametrize("change", RECORDS, ids=range(len(RECORDS)))
def test_a_log(change: Callable[[dict[str, Any]], Any], run: Path) -> None:
    first, second = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(f"{first}\n{json.dumps(change(json.loads(second)))}\n")
    shutil.copytree(run, run.parent / "other")
    for words in ((), ("--json",), ("--out", "c.png"), ("--html", "c.html")):
        code, out, err = feddf("report", "run", "other", *words, cwd=run.parent)
        assert code == 0, err
        assert "\x1b" not in out + err
        (out + err).encode()  # what no terminal could show would fail here
    assert feddf("resume", "run", cwd=run.parent)[0] == 0


def checkpoint(run: Path, content: bytes) -> None:
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    path = run / "checkpoints" / "round-0002.safetensors"
    path.write_bytes(content)
    path.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest())


def raw(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def stored(place: Path, about: object = {"round": 2}, **more: torch.Tensor) -> bytes:
    server = RunFolder(place / "run").latest()[0]
    assert server is not None
    tensors = more or safetensors.torch.load(pack(server))
    return safetensors.torch.save(tensors, None if about is None else {"feddf": json.dumps(about)})


ONE = torch.zeros(1)
CHECKPOINTS: dict[str, Callable[[Path], bytes]] = {
    "no metadata": lambda place: stored(place, None),
    "metadata that are a list": lambda place: stored(place, []),
    "no round": lambda place: stored(place, {}),
    "a round of text": lambda place: stored(place, {"round": "x"}),
    "half a round": lambda place: stored(place, {"round": 1.5}),
    "a round before the first": lambda place: stored(place, {"round": -5}),
    "counts in a list": lambda place: stored(place, {"round": 1, "counted": [1]}),
    "counts of text": lambda place: stored(place, {"round": 1, "counted": {"c": "x"}}),
    "names that are no JSON": lambda place: stored(place, x=ONE),
    "names without end": lambda place: stored(place, **{"[" * 3000: ONE}),
    "a number for names": lambda place: stored(place, **{"3": ONE}),
    "no names": lambda place: stored(place, **{"[]": ONE}),
    "one name": lambda place: stored(place, **{'["models"]': ONE}),
    "numbers for names": lambda place: stored(place, **{"[1, 2, 3]": ONE}),
    "names inside of names": lambda place: stored(place, **{'["models", ["a"], "b"]': ONE}),
    "a table that is a tensor": lambda p: stored(p, **{'["models", "mlp"]': ONE, '["models", "mlp", "a"]': ONE + 1}),
    "another model": lambda place: stored(place, **{'["models", "cnn", "a"]': ONE}),
    "other weights": lambda place: stored(place, **{'["models", "mlp", "a"]': ONE}),
    "nothing": lambda place: b"",
    "a header without end": lambda place: raw(b"[" * DEEP),
    "a header that is a list": lambda place: raw([]),
    "a header of 2**62 bytes": lambda place: struct.pack("<Q", 2**62),
    "metadata of numbers": lambda place: raw({"__metadata__": {"feddf": 3}}),
}


@pytest.mark.parametrize("make", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_that_fits_its_checksum_and_not_its_form(
    make: Callable[[Path], bytes], place: Path, run: Path
) -> None:
    checkpoint(run, make(place))
    code, out, err = feddf("resume", "run", cwd=run.parent)
    assert code == 0, err
    assert "round-0002.safetensors is damaged" in err
    assert "0 of 2 rounds are done" in out


def test_what_the_spool_and_the_clients_hold_is_checked_too(tmp_path: Path) -> None:
    job = Job(Client("c", "mlp"), 2, {"w": ONE}, 7, {}, 1)
    spool, kept = DiskSpool(tmp_path / "spool"), ClientStates(tmp_path / "kept")
    (tmp_path / "spool").mkdir()
    kept.write(Job(Client("c", "mlp"), 1, {"w": ONE}, 7), {})
    path = kept._path(job, 1)
    for names in ("[" * DEEP, "3", "[]", "[1]", '["a", ["b"]]'):
        deep = {"feddf": f'{{"x": {names}}}'}
        spool._path(job).write_bytes(safetensors.torch.save({names[:900]: ONE}, deep))
        assert spool.recall(job) is None
        content = safetensors.torch.save({names: ONE})
        path.write_bytes(content)
        path.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest())
        assert kept.read(job) is None


BAD = [None, "x", "\x1b[31m", "\ud800", -1, 0, True, 10**300, [1], {"a": 1}, math.nan, 1e308, [[[[]]]]]
KEYS = ("model", "options", "shape", "classes", "preprocessing", "fits")


@pytest.mark.parametrize("key", [*KEYS, *(f"preprocessing.{one}" for one in ("kind", "shape", "mean", "std", "order"))])
def test_a_description_of_a_model(key: str, model: Path) -> None:
    """Each value of a description is replaced by one of another form: it is said, or the model still predicts."""
    whole = json.loads((model / "config.json").read_text())
    outer, _, inner = key.partition(".")
    listed = whole["feddf"][outer][inner] if inner else whole["feddf"][outer]
    for bad in [*BAD, *([[bad, *listed[1:]] for bad in BAD] if isinstance(listed, list) else [])]:
        values = json.loads(json.dumps(whole))
        (values["feddf"][outer] if inner else values["feddf"])[inner or outer] = bad
        (model / "config.json").write_text(json.dumps(values))
        for words in (("predict", "model", "pictures/0.png"), FUSE):
            code, out, err = feddf(*words, cwd=model.parent)
            shutil.rmtree(model.parent / "out", ignore_errors=True)
            assert "\x1b" not in out + err
            (out + err).encode()
            assert code in (0, 2), err
            assert code == 0 or len([line for line in err.splitlines() if not line.startswith("warning: ")]) == 1, err


FUSE = (
    "fuse", "--teacher", "model", "--student", "{model = 'cnn', options = {width = 4}}", "--unlabeled", "pictures",
    "--out", "out", "--cache", "cache", "steps=2", "run.threads=1",
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["[" * DEEP, DIGITS, '{"feddf": {"prototypes": [1]}}', '{"feddf": {"prototypes": {}}}',
     '{"feddf": {"prototypes": {"a": [1]}}}', '{"feddf": {"prototypes": {"../../secret": {}}}}',
     '{"feddf": {"prototypes": {"a\\u0000b": {}}}}'],
    ids=["brackets", "digits", "list", "none", "no table", "a path", "a zero byte"],
)  # fmt: skip
def test_a_list_of_models(text: str, model: Path) -> None:
    (model / "config.json").write_text(text)
    assert "config.json" in refused("predict", "model", "pictures/0.png", cwd=model.parent)
    assert "config.json" in refused(*FUSE, cwd=model.parent)


def test_a_name_in_a_description_does_not_lead_out_of_its_folder(model: Path) -> None:
    described = json.loads((model / "config.json").read_text())["feddf"]
    (model / "models").mkdir()
    (model / "model.safetensors").rename(model.parent / "outside.safetensors")
    (model / "config.json").write_text(json.dumps({"feddf": {"prototypes": {"../../outside": described}}}))
    with pytest.raises(ModelError, match=r"does not describe models: \.\./\.\./outside"):
        load_model(model)


@pytest.mark.parametrize("option", [{"width": 30_000_000}, {"depth": 10**9}, {"width": 4, "fits": True, "depth": 30}])
def test_a_network_that_is_larger_than_its_weights_is_not_built(option: dict[str, Any], model: Path) -> None:
    values = json.loads((model / "config.json").read_text())
    values["feddf"]["fits"] = option.pop("fits", False)
    values["feddf"]["options"] = option
    (model / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"does not fit the model 'cnn': (its network would have|depth = )"):
        load_model(model)


def png(width: int, height: int) -> bytes:
    """A picture of nothing: a hundred million pixels in a few kB."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    squeeze, row = zlib.compressobj(9), b"\0" * (width // 8 + 1)
    body = b"".join(squeeze.compress(row) for _ in range(height)) + squeeze.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_the_pixels_of_an_image_are_counted_before_it_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(png(12_800, 12_800))
    assert (tmp_path / "large.png").stat().st_size < 25_000
    code = """
import resource
from pathlib import Path
from feddf.data.files import read_image
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_image(Path("large.png"), 32)
except ValueError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    said, more = done.stdout.splitlines()
    assert "has 12800×12800 pixels, and at most 33554432 are decoded" in said
    assert float(more) < 100


# ONNX


def onnx_model(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: Sequence[Any] = ()) -> bytes:
    helper = pytest.importorskip("onnx").helper
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(constants))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(made.SerializeToString())


def without_inputs() -> bytes:
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor("v", onnx.TensorProto.FLOAT, [1, 3], [1, 2, 3])
    node = onnx.helper.make_node("Constant", [], ["y"], value=value)
    return onnx_model([node], [], [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 3])])


def endless() -> bytes:
    """A loop of 2**62 steps beside what is asked for."""
    onnx = pytest.importorskip("onnx")
    kinds, node, tensor = onnx.TensorProto, onnx.helper.make_node, onnx.helper.make_tensor
    value = onnx.helper.make_tensor_value_info
    body = onnx.helper.make_graph(
        [node("Identity", ["c"], ["d"]), node("Add", ["a", "one"], ["b"])], "body",
        [value("i", kinds.INT64, []), value("c", kinds.BOOL, []), value("a", kinds.FLOAT, [])],
        [value("d", kinds.BOOL, []), value("b", kinds.FLOAT, [])], [tensor("one", kinds.FLOAT, [], [1.0])],
    )  # fmt: skip
    nodes = [
        node("Loop", ["n", "t", "z"], ["s"], body=body),
        node("Flatten", ["x"], ["f"]),
        node("Add", ["f", "s"], ["y"]),
    ]
    constants = [
        tensor("n", kinds.INT64, [], [2**62]),
        tensor("t", kinds.BOOL, [], [True]),
        tensor("z", kinds.FLOAT, [], [0]),
    ]
    return onnx_model(
        nodes, [value("x", kinds.FLOAT, [None, 1, 8, 8])], [value("y", kinds.FLOAT, [None, 64])], constants
    )


def test_an_onnx_file_without_inputs(model: Path) -> None:
    (model.parent / "t.onnx").write_bytes(without_inputs())
    words = ["t.onnx" if word == "model" else word for word in FUSE]
    assert "it takes no input" in refused(*words, cwd=model.parent)


def test_an_onnx_file_that_never_ends_is_ended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "LONGEST", 0.3)
    (model.parent / "t.onnx").write_bytes(endless())
    words = ["{path = 't.onnx', size = 8, channels = 1}" if word == "model" else word for word in FUSE]
    assert "terminate flag" in refused(*words, cwd=model.parent)


# Hugging Face


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A tiny text classifier with a tokenizer, as transformers write it."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as token_models

    library, words = transformers(), {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3}
    backend = Tokenizer(token_models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = library.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "texts")
    sizes = {"dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 32}
    config = library.DistilBertConfig(vocab_size=4, pad_token_id=0, id2label={0: "a", 1: "b"}, **sizes)
    library.DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "texts")
    (tmp_path / "lines.txt").write_text(f"good\nbad\n{'a' * 40}b\n")
    return tmp_path / "texts"


def of_texts(path: Path) -> str:
    student = "{model = 'transformer', options = {path = 'texts'}, tokenizer = 'texts', max_tokens = 8}"
    words = ["fuse", "--teacher", "{path = 'texts', max_tokens = 8}", "--student", student, "--out", "out"]
    return refused(*words, "--unlabeled", "lines.txt", "--cache", "cache", "steps=2", cwd=path.parent)


@pytest.mark.parametrize("pattern", ["(", "(a+)+$", f"{'(' * 5000}{')' * 5000}"], ids=["invalid", "slow", "nested"])
def test_a_tokenizers_regular_expression(pattern: str, classifier: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values = json.loads((classifier / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    (classifier / "tokenizer.json").write_text(json.dumps({**values, "pre_tokenizer": split}))
    assert "tokenizer" in of_texts(classifier)
    assert "panicked" not in capfd.readouterr().err


def test_what_a_tokenizer_has_too_much_does_not_reach_the_terminal(
    classifier: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((classifier / "tokenizer_config.json").read_text())
    odd = {"0": {"content": "[PAD]", "\x1b]0;owned\x07": 1, "__type": "AddedToken"}}
    (classifier / "tokenizer_config.json").write_text(json.dumps({**values, "added_tokens_decoder": odd}))
    tokenizer(str(classifier), 8)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("key", "bad"),
    [("architectures", 3), ("architectures", [3]), ("architectures", [None]), ("n_layers", 10**9),
     ("id2label", {"0": "\ud800", "1": "b"}), ("id2label", {"0": "a", "7": "b"})],
)  # fmt: skip
def test_a_transformers_configuration(key: str, bad: object, classifier: Path) -> None:
    values = json.loads((classifier / "config.json").read_text())
    (classifier / "config.json").write_text(json.dumps({**values, key: bad}))
    assert "is no model of transformers" in of_texts(classifier)


# What reaches the terminal, and folders that cannot be written


def test_escape_sequences_in_class_names_do_not_reach_the_terminal(model: Path) -> None:
    values = json.loads((model / "config.json").read_text())
    values["feddf"]["classes"] = ["\x1b]0;owned\x07", "\x9b31m", "plain"]
    (model / "config.json").write_text(json.dumps(values))
    code, out, err = feddf("predict", "model", "pictures", cwd=model.parent)
    assert code == 0, err
    assert not {"\x1b", "\x07", "\x9b"} & set(out + err)
    name = os.fsdecode(b"pictures/\xff.png")
    (model.parent / "pictures" / "0.png").rename(model.parent / name)
    code, out, err = feddf("predict", "model", name, "--out", "p.csv", cwd=model.parent)
    assert code == 0, err
    assert "pictures/?.png" in (model.parent / "p.csv").read_text()


def test_the_table_is_shown_where_nothing_can_be_written(run: Path) -> None:
    for words in (("--html", "run/config.toml/page.html"), ("--out", "run/config.toml/curves.png")):
        code, out, err = feddf("report", "run", *words, cwd=run.parent)
        assert code == 1
        assert "Test accuracy at the last round" in out
        assert len(err.splitlines()) == 1, err
