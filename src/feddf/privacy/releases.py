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
from pathlib import Path
from typing import Any

from feddf.privacy.accountant import Plan, PrivacyError
from feddf.runtime import atomic
from feddf.states import digest
from feddf.types import Client, Engine, Failure, Job, Reply, State, Update

LEDGER = "releases.jsonl"
LOST = "its release of this round is written down, and not here; a second noisy version would spend twice"


class Releases:
    """The ledger of a run, and a spool whose updates are releases. In memory until :meth:`open` gives them places."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._store: Any = None
        self._chain = ""
        self._known: dict[tuple[int, str], str] = {}

    def open(self, folder: Path, plan: Plan, store: Any, told: int = 0) -> None:
        """Go on with the ledger in a run's folder, or begin one; ``told`` is how many lines its records speak of."""
        lines = read_ledger(folder)
        self._folder, self._store, self._chain = folder, store, lines[-1]["chain"] if lines else ""
        self._known = {(line["round"], line["what"]): line["sha256"] for line in lines[1:]}
        if not lines:
            if left := [*folder.glob("releases/*"), *folder.glob("spool/*"), *folder.glob("checkpoints/*")]:
                raise PrivacyError(f"{folder / LEDGER} is gone, and {left[0].name} is here: what is spent is unknown")
            self._append({"plan": plan.about})
        elif lines[0].get("plan") != plan.about:
            said = f"{lines[0].get('plan')}, now {plan.about}"
            raise PrivacyError(f"{folder / LEDGER} was begun with another plan: {said}")
        if len(self._known) < told:
            raise PrivacyError(f"{folder / LEDGER} has {len(self._known)} releases, and the records speak of {told}")

    def counts(self) -> Counter[str]:
        """Return how many releases there are of each client, or of the server: in so many rounds data were used."""
        return Counter(what for _, what in self._known)

    def write_down(self, release: Reply) -> None:
        """Add a release, which must be the one that is written down already if there is one."""
        number, what, sha256 = release.round, release.client_id, digest({"weights": release.state})
        known = self._known.get((number, what))
        if known is None:
            self._append({"round": number, "what": what, "sha256": sha256})
            self._known[number, what] = sha256
        elif known != sha256:
            raise PrivacyError(f"round {number}, {what}: this is not the release that is written down")

    def keep(self, job: Job, update: Update) -> Update | Failure:
        """Store a release, and write it down; only then is it used."""
        kept: Update | Failure = self._store.keep(job, update) if self._store else update
        if isinstance(kept, Update):
            self.write_down(kept)
        return kept

    def recall(self, job: Job) -> Update | None:
        """Return the release that answers this job, if it is stored; it is written down unless it is already."""
        found: Update | None = self._store.recall(job) if self._store else None
        if found is not None:
            self.write_down(found)
        return found

    def once(self, number: int, what: str, make: Callable[[], State]) -> State:
        """Return the one release of a round that the server makes: the stored one, or a new one."""
        job = Job(Client(what, ""), number, {}, 0)
        found: Update | Failure | None = self.recall(job)
        if found is None and (number, what) in self._known:
            raise PrivacyError(f"round {number}, {what}: {LOST}")
        found = found or self.keep(job, Update(what, "", number, make(), 1))
        assert isinstance(found, Update), found
        return found.state

    def engine(self, engine: Engine) -> Engine:
        """Return the clients' engine, in which no client trains again whose release of this round is written down.

        That is also so of what the gate refuses: the server has seen it, so it is written down, and counts.
        """

        def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any | Failure]:
            lost = [job for job in jobs if (job.round, job.id) in self._known]
            yield from (Failure(job.id, LOST) for job in lost)
            for outcome in engine(function, [job for job in jobs if job not in lost]):
                yield outcome
                if isinstance(outcome, Reply) and (outcome.round, outcome.client_id) not in self._known:
                    self.write_down(outcome)

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


def _chained(before: str, line: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{before} {json.dumps(line, sort_keys=True)}".encode()).hexdigest()
