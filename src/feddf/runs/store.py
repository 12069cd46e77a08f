"""A run's folder: what was asked for, what happened, and the state to go on from. Nothing in it is ever half-written.

::

    config.toml, .sha256, origin   the complete configuration, and the versions that it ran with; whose it is
    metrics.jsonl                  one JSON object a round
    partition.json                 how many examples of each class every simulated client has
    checkpoints/round-0003.safetensors, .sha256
    models/NAME.safetensors        the fused weights of each prototype, once the run has ended
    config.json, README.md         how these are built and fed (feddf.load_model reads it), and a model card
    tested.json                    how these answer the test inputs of each class
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import tomli_w
import torch
from pydantic import NonNegativeInt
from torch import Tensor

from feddf.config import ConfigError, Experiment, Record, Settings, differences, parse
from feddf.config.errors import FeddfError, one_line, shown
from feddf.config.experiment import S
from feddf.config.foreign import parse_json, parse_toml, validated
from feddf.config.records import is_record
from feddf.runtime import atomic
from feddf.runtime.device import described
from feddf.runtime.execution import can_compile, device_for
from feddf.types import ServerState, State


class StoreError(FeddfError):
    """A run folder cannot be used as asked; the message says why and what would be right."""


def versions(settings: Settings) -> dict[str, str]:
    """Return what a model's bytes may depend on besides the configuration."""
    packages = {name: version(name) for name in ("feddf", "torch", "numpy")}
    found = {"python": platform.python_version(), **packages, "cpu": torch.backends.cpu.get_cpu_capability()}
    device = device_for(settings.run)
    compiled = settings.run.compile and can_compile(device)
    return {**found, "steps": "compiled" if compiled else "eager", "device": described(torch.device(device))}


class RunFolder:
    """A run folder on disk. Make one with :meth:`create`, or open an existing one by its path."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.metrics, self.checkpoints = self.path / "metrics.jsonl", self.path / "checkpoints"
        self.spool = self.path / "spool"

    @classmethod
    def create(cls, path: Path | str, experiment: Settings) -> RunFolder:
        """Make the folder and write its configuration; an existing run is never written over."""
        folder = cls(path)
        if (folder.path / "config.toml").exists():
            raise StoreError(f"{path} already holds a run; continue it with: feddf resume {path}")
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            atomic.refuse_links(folder.path)
            atomic.real_folder(folder.checkpoints)
            folder._write_config({**experiment.model_dump(exclude_none=True), "versions": versions(experiment)})
        except OSError as error:
            raise StoreError(f"cannot write to the run folder {path}: {error.strerror or error}") from error
        return folder

    def _write_config(self, values: Mapping[str, Any]) -> None:
        content = tomli_w.dumps(values).encode()
        atomic.write_atomically(self.path / "origin", atomic.signed(content).encode())
        atomic.write_checked(self.path / "config.toml", content)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Return an existing run folder."""
        folder = cls(path)
        if not (folder.path / "config.toml").is_file():
            raise StoreError(f"{path} is not a run folder: it has no config.toml")
        return folder

    def settings(self, kind: type[S]) -> S:
        """Return the configuration that the run was started with, of a kind."""
        with one_line(StoreError, str(self.path / "config.toml"), ConfigError):
            return parse(self._config(), kind)

    def experiment(self) -> Experiment:
        """Return the configuration that the run was started with."""
        if "flower" in self._config():
            raise StoreError(f"{self.path} is a run over Flower; start its server app again and it goes on")
        return self.settings(Experiment)

    def continue_as(self, experiment: Experiment) -> list[str]:
        """Take more rounds than the run was started with; refuse any other change that would change its result.

        No choice of a round depends on how many are planned, so the models are those of a run that had been given as
        many rounds from the start. Only a fusion of the user's own may look at them: return a warning for it.
        """
        asked = self.experiment()
        if changed := differences(asked, experiment, also_free=["rounds", "privacy.epsilon", "privacy.noise"]):
            raise StoreError(f"{self.path} was started with another configuration: {'; '.join(changed)}")
        done = max((record["round"] for record in self.records()), default=0)
        if experiment.rounds < max(done, 1):
            raise StoreError(f"{self.path}: rounds = {experiment.rounds}: {done} rounds are done already")
        if experiment.rounds == asked.rounds:
            return []
        with self.locked():
            more: dict[str, Any] = {"rounds": experiment.rounds}
            if experiment.privacy.level != "none":  # its ε goes with the rounds
                more["privacy"] = experiment.privacy.model_dump(exclude_none=True)
            self._write_config({**self._config(), **more})
        own = experiment.fusion.method
        warning = f"bytes may differ from a run of {experiment.rounds} rounds if {own} looks at rounds"
        return [warning] if ":" in own else []

    def versions(self) -> dict[str, str]:
        """Return the versions that the run was started with."""
        return dict(self._config().get("versions", {}))

    def _config(self) -> dict[str, Any]:
        path = self.path / "config.toml"
        checked = path.with_suffix(".sha256").exists()
        try:
            content = atomic.read_checked(path, atomic.MOST_TEXT) if checked else atomic.read_regular(path)
            return parse_toml(content.decode("utf-8"))
        except (OSError, ValueError) as error:  # a TOMLDecodeError is a ValueError
            changed = ": it was changed after the run began (remove config.sha256 to take it so)"
            hint = changed if checked and isinstance(error, ValueError) else ""
            raise StoreError(f"cannot read {path}: {error}{hint}") from error

    def check_trust(self, trust: bool = False) -> None:
        """Raise where this folder was made elsewhere and its configuration names code that would be run."""
        content, origin = atomic.read_regular(self.path / "config.toml"), self.path / "origin"
        mine = origin.is_file() and atomic.is_mine(content, atomic.read_regular(origin).decode(errors="replace"))
        if not mine and not trust and (named := code_named_in(self.experiment())):
            run = f"its config.toml has code run: {', '.join(named[:5])}; look at that code, then say --trust"
            raise StoreError(f"{self.path} was made elsewhere, and {run}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one server: a second one is refused. The lock ends with the process.

        A folder that holds links is refused: it was made elsewhere, and what is written here could end up there.
        """
        atomic.refuse_links(self.path)
        with atomic.held(self.path / "lock", StoreError(f"another process is running in {self.path}")):
            for folder in (self.path, self.checkpoints, self.path / "models"):
                atomic.remove_leftovers(folder)
            yield

    def append(self, record: Record) -> None:
        """Add a round's record to the log, on disk when this returns."""
        atomic.append_line(self.metrics, json.dumps(record))

    def records(self) -> list[Record]:
        """Return the rounds logged so far; a line cut off by a crash ends the list."""
        return cast(list[Record], atomic.read_json_lines(self.metrics, is_record)[0])

    def forget_after(self, last: int) -> list[str]:
        """Drop log lines of rounds later than ``last``: they have no checkpoint. Return what was damaged."""
        complaint = atomic.keep_lines(self.metrics, lambda record: record["round"] <= last, is_record)
        return [complaint] if complaint else []

    def damage(self) -> list[str]:
        """Return what is wrong with the log, without changing it."""
        _, lines = atomic.read_json_lines(self.metrics, is_record)
        return [f"{self.metrics} is damaged in line {', '.join(map(str, lines[:5]))}"] if lines else []

    def save(self, server: ServerState, keep: int) -> None:
        """Write a checkpoint, then remove all but the newest ``keep``."""
        path = self.checkpoints / f"round-{server.round:04d}.safetensors"
        atomic.write_checked(path, pack(server))
        for old in self._checkpoint_files()[keep:]:
            old.unlink()
            old.with_suffix(".sha256").unlink(missing_ok=True)

    def latest(self, like: Mapping[str, State] | None = None) -> tuple[ServerState | None, list[str]]:
        """Return the newest whole checkpoint of such models (``None`` if there is none), and why no newer one is."""
        complaints: list[str] = []
        for path in self._checkpoint_files():
            try:
                server = unpack(atomic.read_checked(path))
                if like is not None and by_path(server.models).keys() != by_path(like).keys():
                    raise ValueError("it holds other models than this run has")
                return server, complaints
            except (OSError, ValueError, safetensors.SafetensorError) as error:
                complaints.append(f"{path.name} is damaged ({error}); going back to an earlier round")
        return None, complaints

    def _checkpoint_files(self) -> list[Path]:
        found = [one for one in self.checkpoints.glob("*") if re.fullmatch(r"round-[0-9]{4,}\.safetensors", one.name)]
        return sorted(found, key=lambda path: int(path.stem.removeprefix("round-")), reverse=True)

    def finish(self, models: Mapping[str, State]) -> None:
        """Write the fused weights of each prototype as a plain state dict."""
        models_folder = atomic.real_folder(self.path / "models")
        for name, state in models.items():
            atomic.write_atomically(models_folder / f"{name}.safetensors", safetensors.torch.save(dict(state)))


def code_named_in(experiment: Experiment) -> list[str]:
    """Return what a configuration names that runs when it is used: modules of one's own, and generators' programs.

    A text with a colon counts wherever it stands, since a module's file may have any name. A Ray cluster's address
    does too: its answers are unpickled. Folders of images do not.
    """
    no_code: Any = {"description": True, "data": {"name", "folder"}, "pool": {"sources"}, "run": {"device"}}
    named = list(_texts(experiment.model_dump(exclude=no_code)))
    if not experiment.data.name.startswith("folder:"):
        named.append(experiment.data.name)
    named += [one.name for one in experiment.pool.sources if not one.name.startswith(("folder:", "images:"))]
    return sorted({name for name in named if atomic.names_code(name)})


def _texts(value: object) -> Iterator[str]:
    """Yield every text in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def by_path(states: Mapping[str, Any], *above: str) -> dict[str, Tensor]:
    """Return the tensors of nested states, each under the JSON of all names that lead to it.

    >>> by_path({"models": {"cnn": {"w": torch.zeros(1)}}})
    {'["models", "cnn", "w"]': tensor([0.])}
    """
    found: dict[str, Tensor] = {}
    for name, value in states.items():
        place = (*above, name)
        found |= by_path(value, *place) if isinstance(value, Mapping) else {json.dumps(place): value.contiguous()}
    return found


def nested(tensors: State, depths: Mapping[str, int] = {}) -> dict[str, Any]:
    """Return the nested states whose tensors :func:`by_path` has listed; ``depths`` are the names that lead to each."""
    found: dict[str, Any] = {}
    for path, tensor in tensors.items():
        place = validated(list[str], parse_json(path))
        table: Any = found if place and (not depths or depths.get(place[0]) == len(place)) else None
        for name in place[:-1]:
            table = table.setdefault(name, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict) or place[-1] in table:
            raise ValueError(f"the tensor {shown(path)} has no place in it")
        table[place[-1]] = tensor
    return found


def pack(server: ServerState) -> bytes:
    """Return a server state as safetensors bytes; equal states give equal bytes."""
    tensors = by_path({"models": server.models, "own": server.own, "memory": server.memory})
    counted = {"counted": dict(sorted(server.counted.items()))} if server.counted else {}
    # one metadata entry only: safetensors does not keep the order of several
    return safetensors.torch.save(tensors, {"feddf": json.dumps({"round": server.round, **counted})})


def unpack(content: bytes) -> ServerState:
    """Return the server state in safetensors bytes; ``ValueError`` or a ``SafetensorError`` where they hold none."""
    tensors = safetensors.torch.load(content)  # first: then the header is known to be one
    header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = validated(dict[str, Any], parse_json((header.get("__metadata__") or {}).get("feddf", "null")))
    number = validated(NonNegativeInt, about.get("round"))
    counted = validated(dict[str, NonNegativeInt], about.get("counted", {}))
    states = nested(tensors, {"models": 3, "own": 3, "memory": 4})
    models, own, memory = (states.get(name, {}) for name in ("models", "own", "memory"))
    return ServerState(number, models, own, memory, counted)
