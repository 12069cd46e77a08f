"""Jobs that misbehave, for the tests of all engines. Workers import this module."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Number:
    value: int

    @property
    def id(self) -> str:
        return f"n{self.value}"


def lock(job: Number) -> object:
    """Return something that cannot be pickled, except for job 0."""
    return threading.Lock() if job.value else "fine"


def hang_or_answer(job: Number) -> int:
    if job.value == 1:
        threading.Event().wait()
    return job.value


def always_die(job: Number) -> int:
    if job.value == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return job.value


def die_once(job: Number, folder: str) -> str:
    """Kill the process that is the first to try job 2; the next one lives."""
    marker = Path(folder) / job.id
    if job.value == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return job.id
