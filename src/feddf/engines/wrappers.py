"""Engines around engines: tried twice, watched, timed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from feddf.runtime.atomic import write_atomically
from feddf.types import Engine, Failure, J, OutOfMemory, R

Watch = Callable[[str, int, int], None]
"""(stage, done, total): called as the work within a round goes on."""


def unwatched(stage: str, done: int, total: int) -> None:
    """Watch nothing."""


def alone_if_full(engine: Engine) -> Engine:
    """Return the engine for work on accelerators: a job for which a device had no room is tried once more, alone.

    That is after all others have ended: by then their workers have given back the memory that they kept in reserve.
    """
    return _again(engine, OutOfMemory, alone=True)


def with_retries(engine: Engine) -> Engine:
    """Return the engine for the server's own work: a job that failed (say its worker died) is run once more."""
    return _again(engine, Failure, alone=False)


def _again(engine: Engine, kind: type[Failure], alone: bool) -> Engine:
    def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        by_id = {job.id: job for job in jobs}
        again: list[J] = []
        for outcome in engine(function, jobs):
            if isinstance(outcome, kind):
                again.append(by_id[outcome.client_id])
            else:
                yield outcome
        size = 1 if alone else len(again)
        for first in range(0, len(again), size or 1):
            yield from engine(function, again[first : first + size])

    return run


def report_progress(engine: Engine, watch: Watch, stage: str) -> Engine:
    """Return the engine, telling ``watch`` of every job that it finishes."""

    def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        watch(stage, 0, len(jobs))
        for done, outcome in enumerate(engine(function, jobs), 1):
            watch(stage, done, len(jobs))
            yield outcome

    return run


class DeferredEngine:
    """An engine that others are built with before it is open: nothing runs in it until :meth:`become` says where."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def become(self, engine: Engine) -> None:
        """Run in this engine from now on."""
        self._engine = engine

    def __call__(self, function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        """Run ``function`` on every job, where the engine is."""
        assert self._engine is not None, "an experiment runs once its engines are open"
        return self._engine(function, jobs)


@dataclass(frozen=True)
class _Timed:
    result: Any
    job: str
    process: int
    began: float
    ended: float


def _timed(function: Callable[[Any], Any], job: Any) -> _Timed:
    began = time.time()
    result = function(job)
    return _Timed(result, job.id, os.getpid(), began, time.time())


class Profile:
    """A timeline of a run: which worker did which job when, as a trace that Perfetto (or chrome://tracing) opens."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self._functions: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def engine(self, engine: Engine, stage: str) -> Engine:
        """Return the engine, with every job's time taken where it runs."""

        def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
            for outcome in engine(self._wrapped(function), jobs):
                if isinstance(outcome, Failure):
                    yield outcome
                    continue
                self.add(stage, outcome.job, outcome.process, outcome.began, outcome.ended)
                yield outcome.result

        return run

    def add(self, stage: str, name: str, process: int, began: float, ended: float) -> None:
        """Add a span; times are seconds since 1970."""
        span = {"name": f"{stage}: {name}", "cat": stage, "ph": "X", "pid": process, "tid": 0}
        self.spans.append({**span, "ts": began * 1e6, "dur": (ended - began) * 1e6})

    def write(self, path: Path) -> None:
        """Write the trace."""
        names = {os.getpid(): "server"}
        rows = [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": names.get(pid, f"worker {pid}")}}
            for pid in sorted({span["pid"] for span in self.spans})
        ]
        write_atomically(path, json.dumps({"traceEvents": rows + self.spans, "displayTimeUnit": "ms"}).encode())

    def _wrapped(self, function: Callable[[Any], Any]) -> Callable[[Any], _Timed]:
        """Return the same wrapper for the same function: workers keep a function that they have seen."""
        if id(function) not in self._functions:
            self._functions[id(function)] = (function, partial(_timed, function))
        return self._functions[id(function)][1]
