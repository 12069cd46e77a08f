"""The engines of a run, by its section ``[run]``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from feddf.config.sections import RunConfig
from feddf.engines.in_process import in_process
from feddf.engines.processes import Processes
from feddf.engines.ray import RayWorkers
from feddf.engines.wrappers import retrying
from feddf.types import Engine


@dataclass(frozen=True)
class Engines:
    """The same workers: for clients, with their deadline; for the server's own work, which is tried twice."""

    clients: Engine
    server: Engine


@contextmanager
def open_engines(run: RunConfig, deadline: float | None = None) -> Iterator[Engines]:
    """Start the workers that a run asks for, and end them with the block."""
    if run.engine == "in-process":
        yield Engines(in_process, in_process)
        return
    workers: Processes | RayWorkers = (
        RayWorkers(run.workers, run.ray_address)
        if run.engine == "ray"
        else Processes(run.workers or os.cpu_count() or 1)
    )
    with workers as pool:
        yield Engines(pool.within(deadline) if deadline else pool, retrying(pool))
