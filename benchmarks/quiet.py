"""How quiet a machine is: its load, and how far repetitions of one matrix product are apart. Needs torch alone."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_LOAD = 0.5
"""Processes that run or wait for a core, beside this one, for each core."""
MOST_SPREAD = 0.25
"""(90th − 10th percentile) / median of the seconds of a fixed matrix product."""


@dataclass(frozen=True)
class Quiet:
    """What was found."""

    load: float
    spread: float

    @property
    def enough(self) -> bool:
        """Whether what is measured now says something about a program, and not about what else runs."""
        return self.load <= MOST_LOAD * (os.cpu_count() or 1) and self.spread <= MOST_SPREAD

    def __str__(self) -> str:
        said = f"load {self.load:.2f} on {os.cpu_count()} cores, spread of a matrix product {self.spread:.0%}"
        return f"{said}: {'quiet' if self.enough else 'not quiet, results are not written'}"


def look(repeats: int = 40, size: int = 768) -> Quiet:
    """Look for a second or two. Load is what runs now: its average over a minute would still know this program."""
    import torch

    running = statistics.mean(_running() for _ in range(20))
    torch.set_num_threads(1)
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    taken = sorted(_seconds(lambda: a @ b) for _ in range(repeats))
    return Quiet(running, (taken[repeats * 9 // 10] - taken[repeats // 10]) / statistics.median(taken))


def _running() -> float:
    """Return how many processes run or wait for a core, without this one."""
    time.sleep(0.05)
    return float(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
