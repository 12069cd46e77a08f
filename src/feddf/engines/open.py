"""The engines of a run, by its section ``[run]``; and engines around engines: tried again, watched, timed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from feddf.config.sections import RunConfig
from feddf.engines.jobs import in_process
from feddf.engines.processes import Processes
from feddf.engines.ray import RayWorkers
from feddf.runtime.atomic import write_atomically
from feddf.runtime.device import WORKERS_A_DEVICE, count
from feddf.runtime.execution import device_for
from feddf.types import Engine, Failure, J, OutOfMemory, R, WorkerDied

Watch = Callable[[str, int, int], None]
"""(stage, done, total): called as the work within a round goes on."""


@dataclass(frozen=True)
class Engines:
    """The same workers: for clients, with their deadline; for the server's own work, which is tried again."""

    clients: Engine
    server: Engine


@contextmanager
def open_engines(run: RunConfig, deadline: float | None = None) -> Iterator[Engines]:
    """Start the workers that a run asks for, and end them with the block."""
    device = device_for(run)

    def careful(engine: Engine) -> Engine:
        return engine if device == "cpu" else alone_if_full(engine)

    if run.engine == "in-process":
        yield Engines(careful(in_process), careful(in_process))
        return
    workers: Processes | RayWorkers = (
        RayWorkers(run.workers, run.ray_address, gpus=device.partition(":")[0] in ("cuda", "xpu"))
        if run.engine == "ray"
        else Processes(run.workers or default_workers(device))
    )
    with workers as pool:
        yield Engines(careful(pool.within(deadline) if deadline else pool), with_retries(careful(pool)))


def default_workers(device: str) -> int:
    """Return one worker for each core; on accelerators, two for each device, where each has a context of its own."""
    cores, (kind, _, number) = os.cpu_count() or 1, device.partition(":")
    return cores if kind == "cpu" else min(cores, WORKERS_A_DEVICE * (1 if number else count(kind)))


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


def alone_if_full(engine: Engine) -> Engine:
    """Return the engine for work on accelerators: a job for which a device had no room is tried once more, alone.

    That is after all others have ended: by then their workers have given back the memory that they kept in reserve.
    """
    return _again(engine, OutOfMemory, alone=True)


def with_retries(engine: Engine) -> Engine:
    """Return the engine for the server's own work: a job that failed is run once more.

    One whose worker died both times is run twice more, alone: a model that is asked here is not to blame for a worker
    that was killed from outside, and a model that kills its worker each time is.
    """
    return _again(_again(engine, Failure, alone=False), WorkerDied, alone=True)


def _again(engine: Engine, kind: type[Failure], alone: bool) -> Engine:
    def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        by_id = {job.id: job for job in jobs}
        again: list[J] = []
        for outcome in engine(function, jobs):
            if isinstance(outcome, kind):
                again.append(by_id[outcome.client_id])
            else:
                yield outcome
        for group in [[job] for job in again] if alone else [again]:
            if group:
                yield from engine(function, group)

    return run


def unwatched(stage: str, done: int, total: int) -> None:
    """Watch nothing."""


def report_progress(engine: Engine, watch: Watch, stage: str) -> Engine:
    """Return the engine, telling ``watch`` of every job that it finishes."""

    def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        watch(stage, 0, len(jobs))
        for done, outcome in enumerate(engine(function, jobs), 1):
            watch(stage, done, len(jobs))
            yield outcome

    return run


class Profile:
    """A timeline of a run: which worker did which job when, as a trace that Perfetto (or chrome://tracing) opens."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self._functions: dict[int, Callable[..., Any]] = {}  # by the id of what they time, which they keep alive

    def engine(self, engine: Engine, stage: str) -> Engine:
        """Return the engine, with every job's time taken where it runs."""

        def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
            timed = self._functions.setdefault(id(function), partial(_timed, function))
            for outcome in engine(timed, jobs):
                if isinstance(outcome, Failure):
                    yield outcome
                else:
                    result, span = outcome
                    self.add(stage, *span)
                    yield result

        return run

    def add(self, stage: str, name: str, process: int, began: float, ended: float) -> None:
        """Add a span; times are seconds since 1970."""
        span = {"name": f"{stage}: {name}", "cat": stage, "ph": "X", "pid": process, "tid": 0}
        self.spans.append({**span, "ts": began * 1e6, "dur": (ended - began) * 1e6})

    def write(self, path: Path) -> None:
        """Write the trace."""
        pids = {span["pid"] for span in self.spans}
        names = {pid: "server" if pid == os.getpid() else f"worker {pid}" for pid in sorted(pids)}
        rows = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in names.items()]
        write_atomically(path, json.dumps({"traceEvents": rows + self.spans, "displayTimeUnit": "ms"}).encode())


def _timed(function: Callable[[Any], Any], job: Any) -> tuple[Any, tuple[str, int, float, float]]:
    began, clock = time.time(), time.perf_counter()  # the first may be changed meanwhile
    result = function(job)
    return result, (job.id, os.getpid(), began, began + time.perf_counter() - clock)
