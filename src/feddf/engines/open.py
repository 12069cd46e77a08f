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
from feddf.engines.wrappers import alone_if_full, with_retries
from feddf.runtime.device import WORKERS_A_DEVICE, count
from feddf.runtime.execution import device_for
from feddf.types import Engine


@dataclass(frozen=True)
class Engines:
    """The same workers: for clients, with their deadline; for the server's own work, which is tried twice."""

    clients: Engine
    server: Engine


@contextmanager
def open_engines(run: RunConfig, deadline: float | None = None) -> Iterator[Engines]:
    """Start the workers that a run asks for, and end them with the block."""
    device = device_for(run)
    careful = alone_if_full if device != "cpu" else _as_it_is
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


def _as_it_is(engine: Engine) -> Engine:
    return engine
