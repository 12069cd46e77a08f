"""Releases are written down before they are used: one noisy version of each, however often a run is interrupted.

``releases.jsonl`` begins with the plan and has one line for each release: its round, what it is, and the SHA-256 of its
bytes. Each line carries a hash over all before it, so that a line that is changed or taken out is noticed. The order
is: noise is drawn; the release is stored; its line is appended, on disk; only then is it used. So after a crash a
release without a line was never used, and may be; one with a line is used again, from the store; and a release that is
lost is not made again, because a second noisy version would spend a second time.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch

from feddf.privacy.accountant import PrivacyError
from feddf.privacy.plan import Plan
from feddf.runtime import atomic
from feddf.states import digest
from feddf.types import Engine, Failure, Job, State, Update

T = TypeVar("T")
LEDGER = "releases.jsonl"
LOST = "its release of this round is written down and lost; a second noisy version would spend twice"


class Releases:
    """The ledger of a run and the store beside it. In memory until :meth:`open` gives them a folder."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self._chain = plan, ""
        self._folder: Path | None = None
        self._known: dict[tuple[int, str], str] = {}

    def open(self, folder: Path, told: int = 0) -> None:
        """Go on with the ledger in a run's folder, or begin one; ``told`` is how many lines its records speak of."""
        lines = read_ledger(folder)
        privacy = self.plan.privacy
        plan = {**asdict(self.plan.a_round), "level": privacy.level, "on": privacy.chosen, "delta": privacy.delta}
        self._folder, self._chain = folder, lines[-1]["chain"] if lines else ""
        self._known = {(line["round"], line["what"]): line["sha256"] for line in lines[1:]}
        if not lines:
            if left := [*folder.glob("releases/*"), *folder.glob("spool/*"), *folder.glob("checkpoints/*")]:
                raise PrivacyError(f"{folder / LEDGER} is gone, and {left[0].name} is here: what is spent is unknown")
            self._append({"plan": plan})
        elif lines[0].get("plan") != plan:
            raise PrivacyError(f"{folder / LEDGER} was begun with another plan: {lines[0].get('plan')}, now {plan}")
        if len(self) < told:
            raise PrivacyError(f"{folder / LEDGER} has {len(self)} releases, and the records speak of {told}")

    def __len__(self) -> int:
        return len(self._known)

    def rounds_spent(self) -> int:
        """Return in how many rounds one client's data were used at the most: of those it released in, or of all."""
        return max(Counter(what for _, what in self._known).values(), default=0)

    def write_down(self, number: int, what: str, sha256: str) -> None:
        """Add a release, which must be the one that is written down already if there is one."""
        known = self._known.get((number, what))
        if known is None:
            self._append({"round": number, "what": what, "sha256": sha256})
            self._known[number, what] = sha256
        elif known != sha256:
            raise PrivacyError(f"round {number}, {what}: this is not the release that is written down")

    def once(self, number: int, what: str, make: Callable[[], State]) -> State:
        """Return the one release of a round: the stored one, or a new one, which is stored and written down first."""
        path = None if self._folder is None else self._folder / "releases" / f"round-{number:04d}-{what}.safetensors"
        state = None if path is None else _stored(path)
        if state is None:
            if (number, what) in self._known:
                raise PrivacyError(f"round {number}, {what}: {LOST}")
            state = dict(make())
            if path is not None:
                atomic.real_folder(path.parent)
                atomic.write_checked(path, safetensors.torch.save(state))
        self.write_down(number, what, digest({what: state}))
        return state

    def engine(self, engine: Engine) -> Engine:
        """Return the clients' engine, in which no client trains again whose release of this round is written down."""

        def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any | Failure]:
            lost = [job for job in jobs if (job.round, job.id) in self._known]
            yield from (Failure(job.id, LOST) for job in lost)
            yield from engine(function, [job for job in jobs if job not in lost])

        return run

    def _append(self, line: Mapping[str, Any]) -> None:
        self._chain = _chained(self._chain, line)
        if self._folder is not None:
            atomic.append_line(self._folder / LEDGER, json.dumps({**line, "chain": self._chain}))


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """Return a ledger's lines; one that a crash cut off is removed, because its release was never used."""
    path = folder / LEDGER
    lines, damaged = atomic.read_json_lines(path)
    chain = ""
    for line in lines:
        chain = _chained(chain, {key: value for key, value in line.items() if key != "chain"})
        if damaged or line.get("chain") != chain:
            raise PrivacyError(f"{path} was changed: what it says of spent privacy cannot be relied on")
    if path.exists() and not atomic.read_regular(path).endswith(b"\n"):
        atomic.write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return lines


def planned_noise(folder: Path) -> float | None:
    """Return the noise that a run was begun with, if it has begun."""
    lines = read_ledger(folder)
    return float(lines[0]["plan"]["noise"]) if lines else None


def _chained(before: str, line: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{before} {json.dumps(line, sort_keys=True)}".encode()).hexdigest()


def _stored(path: Path) -> State | None:
    try:
        return safetensors.torch.load(atomic.read_checked(path))
    except (OSError, ValueError, safetensors.SafetensorError):
        return None


@dataclass(frozen=True)
class LedgerSpool:
    """A spool whose updates are releases: each is on disk, then written down, then used."""

    spool: Any
    releases: Releases

    def keep(self, job: Job, update: Update) -> Update | Failure:
        """Keep an admitted update and write it down."""
        kept: Update | Failure = self.spool.keep(job, update)
        return self._written(job, kept)

    def recall(self, job: Job) -> Update | None:
        """Return the update that answers this job, if it is on disk; it is written down unless it is already."""
        found: Update | None = self.spool.recall(job)
        return self._written(job, found)

    def _written(self, job: Job, update: T) -> T:
        if isinstance(update, Update):
            self.releases.write_down(job.round, job.id, digest({"weights": update.state}))
        return update
