"""Jobs that misbehave, for the tests of all engines. Workers import this module."""

from __future__ import annotations

import os
import resource
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import torch


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


def stop(job: Number) -> int:
    """Stop this process, as ``kill -STOP`` does; whoever continues it gets the answer."""
    if job.value == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return job.value


def process(job: Number) -> int:
    return os.getpid()


def fill(job: Number, *, killed: bool) -> int:
    """Allocate more and more, until the kernel refuses, or kills the process as it does when the machine is full."""
    if job.value != 2:
        return job.value
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20), before[1]))
    try:
        kept = []
        while True:
            kept.append(torch.ones(1 << 20))
            if killed and len(kept) > 20:
                os.kill(os.getpid(), signal.SIGKILL)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
