"""How a piece of training is executed: on how many threads, compiled or not, with checks in the background or not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from feddf.config.sections import RunConfig
from feddf.runtime.compile import can_compile


@dataclass(frozen=True)
class Execution:
    """How training steps run. Threads and compilation change the last bits of a result, ``background`` changes none.

    With ``background``, snapshots of a student are evaluated in a thread of their own while the student goes on.
    """

    threads: int = 1
    compile: bool = False
    background: bool = False


def of_clients(run: RunConfig) -> Execution:
    """Return how clients train: each on one thread, so that the same bytes come out anywhere."""
    return Execution(compile=_compiles(run))


def of_students(run: RunConfig, students: int, lone: Callable[[], int]) -> Execution:
    """Return how students learn: several on one thread each, one alone on ``lone()``: the machine has no say."""
    threads = run.threads or (lone() if students == 1 else 1)
    idle_cores = (os.cpu_count() or 1) >= 2 * students * threads
    return Execution(threads, _compiles(run), background=idle_cores)


def _compiles(run: RunConfig) -> bool:
    if run.compile and not can_compile():
        warnings.warn("this machine cannot compile (is a C++ compiler installed?); going on without", stacklevel=3)
        return False
    return run.compile
