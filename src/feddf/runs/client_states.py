"""What clients keep between rounds, on disk: a file for each version, the last two of each client.

A client cannot know whether its update was fused. So a job names the last round that counted, the client goes on from
the version of that round, and keeps it until the next one counts. In a simulation the files lie in the run's folder and
an engine around the others reads and writes them; a real client has them at its own place.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
from torch import Tensor

from feddf.runs.spool import safe_name
from feddf.runtime.atomic import read_checked, real_folder, write_checked
from feddf.types import Engine, Failure, Job, Payload, Reply

LOST = "lost_state"
"""The metric of a client that began anew because the state that it had kept is lost."""


class ClientStates:
    """The states that clients keep, in a folder; ``lost`` says what happens to a client whose state is not there."""

    def __init__(self, folder: Path, lost: Literal["anew", "refuse"] = "refuse") -> None:
        self.folder, self._lost = folder, lost

    def engine(self, engine: Engine) -> Engine:
        """Return the clients' engine, with what each has kept given to it, and what it keeps written down."""

        def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any | Failure]:
            asked: dict[str, Job] = {}
            anew: set[str] = set()
            for job in jobs:
                kept = self.read(job)
                if kept is None and self._lost == "refuse":
                    yield Failure(job.id, self.complaint(job))
                    continue
                if kept is None:
                    anew.add(job.id)
                asked[job.id] = replace(job, kept=kept or {})
            for outcome in engine(function, list(asked.values())):
                if isinstance(outcome, Reply) and outcome.client_id in asked:
                    self.write(asked[outcome.client_id], outcome.kept)
                    metrics = {**outcome.metrics, **({LOST: 1.0} if outcome.client_id in anew else {})}
                    outcome = replace(outcome, kept={}, metrics=metrics)
                yield outcome

        return run

    def complaint(self, job: Job) -> str:
        """Return what is said of a client whose state is lost."""
        return f"the state that it kept in round {job.counted} is lost; clients.lost_state = 'anew' lets it begin anew"

    def read(self, job: Job) -> Payload | None:
        """Return what the client kept in the last round that counted: nothing before there is one, ``None`` if lost."""
        if not job.counted:
            return {}
        try:
            content = safetensors.torch.load(read_checked(self._path(job, job.counted)))
            found: dict[str, dict[str, Tensor]] = {}
            for place, tensor in content.items():
                name, key = json.loads(place)
                found.setdefault(name, {})[key] = tensor
            return found
        except (OSError, ValueError, safetensors.SafetensorError):
            return None

    def write(self, job: Job, kept: Payload) -> None:
        """Keep a version, and the one that counts now; older ones go."""
        path = self._path(job, job.round)
        real_folder(self.folder)
        real_folder(path.parent)
        tensors = {json.dumps([name, key]): one for name, state in kept.items() for key, one in state.items()}
        write_checked(path, safetensors.torch.save(tensors))
        needed = {path.stem, self._path(job, job.counted).stem}
        for old in path.parent.glob("round-*"):
            if old.name.partition(".")[0] not in needed:
                old.unlink(missing_ok=True)

    def forget_others(self, clients: Collection[str]) -> None:
        """Remove the states of clients that are no members any more."""
        members = {_folder(client) for client in clients}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in members:
                shutil.rmtree(path, ignore_errors=True)

    def size(self) -> int:
        """Return the bytes that all states take on disk."""
        return sum(path.stat().st_size for path in self.folder.glob("*/round-*")) if self.folder.is_dir() else 0

    def _path(self, job: Job, number: int) -> Path:
        return self.folder / _folder(job.id) / f"round-{number:04d}.safetensors"


def _folder(client: str) -> str:
    """Return the name of a client's folder: readable, and of no other client."""
    return f"{safe_name(client)[:60]}-{hashlib.sha256(client.encode()).hexdigest()[:8]}"
