"""Fuzzers: each parser of files and messages from elsewhere is given valid inputs that were changed.

Whatever it is given, a parser returns, refuses in its own way, writes nothing, and keeps no memory. How much of its
code the inputs reach is counted line by line for the first few thousand of them.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import resource
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import StringIO
from itertools import count
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import safetensors
import safetensors.torch
import tomli_w
import torch
from rich.console import Console

from feddf import admit
from feddf.config import foreign, keys, parse, records
from feddf.config.errors import FeddfError, reason
from feddf.models.small import CNN
from feddf.report import read as report
from feddf.report import tables
from feddf.runs import spool, store
from feddf.runs.store import RunFolder
from feddf.runtime import atomic
from feddf.saved import model, model_folder
from feddf.types import Client, Failure, Job, Reply, ServerState
from feddf.watch import page, snapshot

TRACED = 3000
"""Inputs of each parser whose lines are counted: to count takes ten times as long as to parse."""


class Lost(Exception):
    """Something that must never happen."""


@dataclass(frozen=True)
class Parser:
    """Valid inputs by name; ``read`` says whether one is taken for sound; and the functions that make the parser up."""

    seeds: Mapping[str, bytes]
    read: Callable[[str, bytes], bool]
    code: Sequence[Any]


@dataclass(frozen=True)
class Found:
    """What a fuzzer found: inputs, those that were refused or repaired, and the lines that were reached of all."""

    name: str
    inputs: int
    refused: int
    reached: int
    lines: int
    megabytes: float

    def __str__(self) -> str:
        share = 100 * self.reached / max(1, self.lines)
        return f"{self.name} {self.refused:,} of {self.inputs:,} refused, {share:.0f} % of {self.lines} lines reached"


def fuzz(name: str, inputs: int, seed: int = 0) -> Found:
    """Give a parser so many changed inputs; raise :class:`Lost` for a crash, a write, or memory that grows."""
    chance, refused, lines = random.Random(f"{name} {seed}"), 0, set[tuple[str, int]]()
    with tempfile.TemporaryDirectory(prefix="feddf-fuzz-", dir=_memory_disk()) as folder, chdir(folder):
        (Path(folder) / "inside").mkdir()
        parser = PARSERS[name](Path(folder) / "inside")
        for which, content in parser.seeds.items():
            if not parser.read(which, content):
                raise Lost(f"{name}: a valid {which} is refused")
        names, codes, early, there = list(parser.seeds), _codes(parser.code), 0.0, _tree(Path(folder))
        for number in range(inputs):
            which = chance.choice(names)
            content = changed(parser.seeds[which], chance)
            try:
                with _traced(codes, lines) if number < TRACED else nullcontext():
                    refused += not parser.read(which, content)
            except Exception as error:
                raise Lost(f"{name}: {reason(error)} for the {which} {content[:2000]!r}") from error
            if number == inputs // 3:
                early = memory()
        if (now := _tree(Path(folder))) != there:
            raise Lost(f"{name}: files were written: {sorted(now ^ there)[:5]}")
        late = memory()
        if late > early * 1.2 + 50:
            raise Lost(f"{name}: memory grew from {early:.0f} to {late:.0f} MB")
    known = {place for code in codes for place in _lines(code)}
    return Found(name, inputs, refused, len(lines & known), len(known), late)


def _memory_disk() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def memory() -> float:
    """Return the megabytes that this process has in memory now."""
    for line in Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []:
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# Lines


def _codes(functions: Sequence[Any]) -> set[CodeType]:
    found, waiting = set[CodeType](), [inspect.unwrap(one).__code__ for one in functions]
    while waiting:
        code = waiting.pop()
        found.add(code)
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found


def _lines(code: CodeType) -> Iterator[tuple[str, int]]:
    for _, _, line in code.co_lines():
        if line is not None and (line != code.co_firstlineno or code.co_name.startswith("<")):
            yield code.co_filename, line


@contextmanager
def _traced(codes: set[CodeType], lines: set[tuple[str, int]]) -> Iterator[None]:
    def inside(frame: FrameType, event: str, argument: object) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return inside

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        return inside(frame, event, argument) if frame.f_code in codes else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


# Changes


DEEP: Any = []
for _ in range(80):
    DEEP = [DEEP]
ODD: list[Any] = [
    None, True, -1, 0, 7, 0.5, 1e308, math.nan, math.inf, 2**63, 10**30, "", "x", "x" * 1000, "\x1b[31m", "\ud800",
    "../../x", "a\0b", [], {}, [1], {"a": 1}, [[1]], DEEP,
]  # fmt: skip


def changed(content: bytes, chance: random.Random) -> bytes:
    """Return a valid input with some bytes changed, or (JSON, TOML, safetensors) with a value of another kind."""
    if chance.random() < 0.5:
        with suppress(ValueError, TypeError, IndexError, AttributeError, UnicodeError):
            return _odd(content, chance)
    return flipped(content, chance)


def flipped(content: bytes, chance: random.Random) -> bytes:
    """Return the bytes with some of them changed, cut off, doubled or left out."""
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found)) if found else 0
        kind = chance.randrange(5)
        if kind < 3 and found:
            found[at] ^= 1 << chance.randrange(8)
        elif kind == 3:
            del found[at : at + chance.randint(1, 8)]
        else:
            found[at:at] = found[at : at + chance.randint(1, 8)]
    return bytes(found)


def _odd(content: bytes, chance: random.Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    if 0 < size <= len(content) - 8 and content[8:9] == b"{":  # safetensors: its header
        header = json.dumps(_replaced(json.loads(content[8 : 8 + size]), chance)).encode()
        return len(header).to_bytes(8, "little") + header + content[8 + size :]
    if content[:1] in (b"{", b"["):
        lines = content.split(b"\n")
        at = chance.randrange(len([line for line in lines if line]))
        lines[at] = json.dumps(_replaced(json.loads(lines[at]), chance)).encode()
        return b"\n".join(lines)
    return tomli_w.dumps(_replaced(tomllib.loads(content.decode()), chance)).encode()


def _replaced(value: Any, chance: random.Random) -> Any:
    """Return nested tables with one value in them replaced, left out, or under another name."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        if isinstance(value, str) and value[:1] in "{[" and chance.random() < 0.7:  # JSON within JSON
            return json.dumps(_replaced(json.loads(value), chance))
        return chance.choice(ODD)
    place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    found = value.copy()
    action = chance.random()
    if action < 0.1:
        del found[place]
    elif action < 0.2 and isinstance(found, dict):
        found[chance.choice(["", "x", "../x", "\x1b", "[" * 100, '["a"]'])] = found.pop(place)
    else:
        found[place] = _replaced(value[place], chance)
    return found


# Parsers


REAL = {
    "name": "fuzzed", "rounds": 6, "prototypes": ["mlp", {"model": "mlp", "name": "wide", "width": 200}],
    "data": {"name": "toy"}, "pool": {"sources": ["plane"]}, "clients": {"total": 8, "fraction": 0.5},
    "local": {"epochs": 40}, "distill": {"steps": 60, "eval_every": 20}, "run": {"workers": 2},
    "fusion": {"method": "feddf+prox+swag"},
}  # fmt: skip
BELIEVED = (FeddfError, ValueError, OSError, safetensors.SafetensorError)
"""How a parser says no; anything else is a crash."""


def _record(number: int) -> dict[str, Any]:
    return {
        "round": number, "clients": ["a", "b"], "ensemble": 0.6, "avg_logits": 0.5, "attempts": 1,
        "models": {name: {"averaged": 0.4, "fused": 0.5, "validation": 0.4} for name in ("mlp", "wide")},
        "metrics_of_clients": {"loss": 0.1}, "accuracy_of_clients": {"a": 0.5, "b": None}, "bytes_down": {"mlp": 3},
        "bytes_up": {"mlp": 3}, "dropped": [{"client": "c", "reason": "late"}], "dropped_worst": {"clients": {"b": 1}},
        "seconds": {"train": 2.0, "fuse": 1.0, "ask": 0.5, "distill": 0.4, "evaluate": 0.5}, "kept_by_clients": 700,
        "distillation": {"mlp": {"steps": 3, "best_step": 2, "score_before": 0.1, "score_after": None}},
    }  # fmt: skip


def _run(folder: Path) -> tuple[RunFolder, dict[str, bytes]]:
    run = RunFolder.create(folder / "run", parse(REAL))
    (run.path / "config.sha256").unlink()  # what it guards is guarded in the parser of checkpoints
    for number in range(1, 6):
        run.append(_record(number))  # type: ignore[arg-type]
    (run.path / "partition.json").write_text(json.dumps({"classes": ["a", "b"], "counts": [[3, 0], [1, 2]]}))
    return run, {name: (run.path / name).read_bytes() for name in ("config.toml", "metrics.jsonl", "partition.json")}


@contextmanager
def _instead(path: Path, content: bytes) -> Iterator[None]:
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def updates(folder: Path) -> Parser:
    """Uploads as safetensors bytes, at the gate."""
    state = {"layer.weight": torch.randn(4, 3), "layer.bias": torch.zeros(4), "n": torch.tensor(3)}
    jobs, counts = {"c": Job(Client("c", "m"), 1, state, 0)}, iter(lambda: 10, None)

    def read(which: str, content: bytes) -> bool:
        try:
            found = safetensors.torch.load(content)
        except (*BELIEVED, KeyError, TypeError, RuntimeError, OverflowError):  # the library's own
            return False
        return not isinstance(admit.admit(Reply("c", "m", 1, found, next(counts)), jobs), Failure)

    return Parser({"upload": safetensors.torch.save(state)}, read, _of(admit))


def wire(folder: Path) -> Parser:
    """Flower's records, as they arrive: arrays in .npy format under names, and metrics."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    from feddf.flower import wire as flower
    from feddf.models.binary import BinaryState, Bits

    state = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(4)}
    signs = Bits(torch.zeros(1, dtype=torch.uint8), torch.ones(2), torch.Size((2, 3)))
    binary = BinaryState({"n": state["n"]}, {"w": signs}, list(state))
    job = Job(Client("c", "m"), 1, state, 0)
    kinds = {"plain": flower.to_arrays(state), "binary": flower.to_arrays(binary)}
    seeds = {f"{kind} {key}": array.data for kind, record in kinds.items() for key, array in record.items()}
    seeds["metrics"] = json.dumps({"num-examples": 5, "loss": 0.5, "stype": "numpy.ndarray", "key": "n"}).encode()

    def read(which: str, content: bytes) -> bool:
        kind, _, key = which.partition(" ")
        arrays, metrics = dict(kinds.get(kind, kinds["plain"])), {"num-examples": 5}
        if key:
            arrays[key] = Array(arrays[key].dtype, arrays[key].shape, "numpy.ndarray", content)
        else:
            try:  # what Flower's own records refuse never gets here
                said = json.loads(content)
                arrays[said.pop("key")] = Array("float32", (1,), said.pop("stype"), arrays.pop("n").data)
                metrics = dict(MetricRecord(said))
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                return False
        try:
            body = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)})
        except (TypeError, ValueError):
            return False
        reply = flower.reply_from(SimpleNamespace(content=body, has_error=lambda: False), job)  # type: ignore[arg-type]
        return isinstance(reply, Reply) and not isinstance(admit.admit(reply, {"c": job}), Failure)

    return Parser(seeds, read, _of(flower, "from_", "_read", "reply_", "_counted", "_only", "printable"))


def registry(folder: Path) -> Parser:
    """The list of clients of a server over Flower."""
    import logging

    from feddf.flower import transport

    logging.getLogger("flwr").setLevel(logging.ERROR)
    path, seeds = folder / "registry.json", {"registry": json.dumps({"a": "mlp", "b": "wide"}).encode()}

    def read(which: str, content: bytes) -> bool:
        path.write_bytes(content)
        found = transport._read(path)
        with suppress(FileNotFoundError):
            (folder / "registry.json.damaged").unlink()
            path.write_bytes(b"{}")
        return bool(found)

    return Parser(seeds, read, [transport._read, foreign._bounded, foreign.validated])


def configurations(folder: Path) -> Parser:
    """A TOML file of an experiment."""

    def read(which: str, content: bytes) -> bool:
        try:
            parse(foreign.parse_toml(content.decode("utf-8")))
        except BELIEVED:
            return False
        return True

    code = [*_of(foreign), keys.flat, keys.nested, keys.changes_of]
    return Parser({"file": tomli_w.dumps(REAL).encode()}, read, code)


def checkpoints(folder: Path) -> Parser:
    """A checkpoint beside its checksum: a damaged one is never believed."""
    run = RunFolder.create(folder / "run", parse(REAL))
    states = [ServerState(number, {"m": {"w": torch.full((20,), float(number))}}) for number in (1, 2)]
    for state in states:
        run.save(state, keep=2)
    allowed = {store.pack(state) for state in states}

    def read(which: str, content: bytes) -> bool:
        with _instead(run.checkpoints / which, content):
            found, complaints = run.latest()
        if found is None or store.pack(found) not in allowed:
            raise Lost("a damaged checkpoint was believed")
        return not complaints

    seeds = {name: (run.checkpoints / name).read_bytes() for name in ("round-0002.safetensors", "round-0002.sha256")}
    return Parser(seeds, read, [RunFolder.latest, atomic.read_checked, atomic.read_regular, atomic._opened])


def states(folder: Path) -> Parser:
    """A checkpoint that somebody wrote whole, with a checksum that fits: its form, and what the spool has."""
    trained, own = {"m": {"w": torch.ones(2), "b": torch.zeros(1)}}, {"c": {"b": torch.ones(1)}}
    server = ServerState(3, trained, own, {"momentum": {"m": {"w": torch.ones(2)}}}, {"c": 2})
    job, kept = Job(Client("c", "m"), 2, {"w": torch.ones(2)}, 7), spool.DiskSpool(folder)
    update = admit.admit(Reply("c", "m", 2, {"w": torch.zeros(2)}, 5, {"loss": 0.5}), {"c": job})
    assert not isinstance(update, Failure)
    kept.keep(job, update)
    seeds = {"checkpoint": store.pack(server), "spool": kept._path(job).read_bytes()}

    def read(which: str, content: bytes) -> bool:
        if which == "spool":
            with _instead(kept._path(job), content):
                return kept.recall(job) is not None
        try:
            found = store.unpack(content)
        except BELIEVED:
            return False
        store.pack(found)  # it is whole: it can be written again
        return True

    code = [store.unpack, store.nested, store.by_path, spool.DiskSpool.recall, spool._on_disk, *_of(spool.StateOnDisk)]
    return Parser(seeds, read, [*code, foreign._bounded, foreign.validated])


def logs(folder: Path) -> Parser:
    """A run's log: a damaged line costs that line only."""
    run, seeds = _run(folder)
    lines = seeds["metrics.jsonl"].splitlines()

    def read(which: str, content: bytes) -> bool:
        with _instead(run.metrics, content):
            found, damage = {record["round"] for record in run.records()}, run.damage()
        there = set(content.split(b"\n"))
        whole = {number for number, line in enumerate(lines, 1) if line in there}
        if not whole <= found:
            raise Lost(f"a damaged line cost others: rounds {sorted(whole)} are whole, {sorted(found)} were read")
        return not damage

    code = [RunFolder.records, RunFolder.damage, atomic.read_json_lines, records.is_record]
    return Parser({"metrics.jsonl": seeds["metrics.jsonl"]}, read, [*code, foreign._bounded, foreign.validated])


def run_folders(folder: Path) -> Parser:
    """A run folder, as ``report`` reads it, up to the table and the JSON."""
    (run, seeds), turn = _run(folder), count()

    def read(which: str, content: bytes) -> bool:
        with _instead(run.path / which, content):
            try:
                runs, _ = report.collect([run.path])
            except FeddfError:
                return False
        json.dumps(tables.results(runs))
        shown = [tables.runs_table(runs), *([tables.seconds_table(runs)] if runs[0].records else [])]
        if next(turn) % 20 == 0:  # to draw a table takes ten times as long as to make it
            Console(file=StringIO(), markup=False).print(*shown)
        return True

    code = [*_of(report), *_of(report.Run), tables.results, tables.runs_table, tables.seconds_table]
    return Parser({name: seeds[name] for name in ("config.toml", "metrics.jsonl")}, read, code)


def pages(folder: Path) -> Parser:
    """A run folder, as the page reads it: the state as JSON that a browser takes, inside a script element too."""
    run, seeds = _run(folder)

    def read(which: str, content: bytes) -> bool:
        with _instead(run.path / which, content):
            found = snapshot.Snapshots([run.path]).take()
        text = page.embedded(found).encode("utf-8", "replace").decode()
        if "<" in text or json.loads(text, parse_constant=_no_number).keys() != found.keys():
            raise Lost("the page's state is not JSON, or could end its script element")
        return not found["problems"]

    code = [*_of(snapshot), *_of(snapshot.Snapshots), page.embedded]
    return Parser(seeds, read, code)


def _no_number(text: str) -> None:
    raise Lost(f"the page's state has {text}, which is no JSON")


def models(folder: Path) -> Parser:
    """A model folder: its description and the header of its weights, up to the network that comes of them."""
    place, network = folder / "model", CNN((1, 8, 8), 3, width=2)
    place.mkdir()
    fed = model.Images((1, 8, 8), (0.4,), (0.3,))
    described = model.ModelSpec("cnn", (1, 8, 8), ("a", "b", "c"), fed, {"width": 2, "depth": 2}).describe()
    files = {
        "config.json": json.dumps({"feddf": described}).encode(),
        "model.safetensors": safetensors.torch.save(network.state_dict()),
    }
    listed = {"feddf": {"prototypes": {"small": described}}}
    seeds = {**files, "config.json of a run": json.dumps(listed).encode()}
    (place / "models").mkdir()
    for name, content in (*files.items(), ("models/small.safetensors", files["model.safetensors"])):
        (place / name).write_bytes(content)

    def read(which: str, content: bytes) -> bool:
        with _instead(place / which.partition(" ")[0], content):
            try:
                found = model_folder.load_model(place)
            except FeddfError:
                return False
        return len(found.classes) > 0

    code = [model_folder.load_model, model_folder.specs, model_folder.description, model_folder.read_state]
    code += [model.ModelSpec.read, model.from_description, model.loaded, model._check_size, foreign._bounded]
    return Parser(seeds, read, [*code, foreign.validated])


def _of(place: Any, *prefixes: str) -> list[Any]:
    """Return the functions of a module or a class (properties included), or those whose names begin so."""
    own = place.__name__ if inspect.ismodule(place) else place.__module__
    found = [getattr(one, "fget", None) or getattr(one, "__func__", one) for one in vars(place).values()]
    functions = [one for one in found if inspect.isfunction(inspect.unwrap(one)) and one.__module__ == own]
    return [one for one in functions if not prefixes or one.__name__.startswith(prefixes)]


PARSERS: dict[str, Callable[[Path], Parser]] = {
    "updates": updates, "wire": wire, "registry": registry, "configurations": configurations,
    "checkpoints": checkpoints, "states": states, "logs": logs, "run folders": run_folders, "pages": pages,
    "model folders": models,
}  # fmt: skip
