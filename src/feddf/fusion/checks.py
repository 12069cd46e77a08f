"""Early stopping: a student's snapshots are judged, the best is kept, and enough is enough."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Protocol

from torch import nn

from feddf.evaluate import as_it_is, folded
from feddf.states import copy
from feddf.threads import threads
from feddf.types import Score, State


@dataclass(frozen=True)
class Distilled:
    """The student's weights, the step at which they were best, and the number of steps taken."""

    state: State
    best_step: int
    steps: int
    first_score: float | None
    best_score: float | None


class Patience(Protocol):
    """When to stop, and how snapshots are judged."""

    @property
    def patience(self) -> int:
        """Steps without a better score after which it is enough."""
        ...

    @property
    def settling(self) -> int:
        """Steps before patience counts."""
        ...

    @property
    def threads(self) -> int:
        """Torch threads of the student, and of its judge: a score may depend on them in its last bits."""
        ...

    @property
    def beside(self) -> bool:
        """Whether snapshots are judged while the student goes on."""
        ...


class Checks:
    """The snapshots of one student, judged in the order in which they were taken.

    Beside the loop, a verdict is read when the next snapshot comes, and what the student did after a snapshot that was
    enough is thrown away: the result is the same as if it had waited.
    """

    def __init__(self, student: nn.Module, score: Score | None, schedule: Patience) -> None:
        self._score, self._schedule = score, schedule
        first = score(student) if score else None
        self.best = Distilled(copy(student.state_dict()), 0, 0, first, first)
        self._pending: tuple[int, nn.Module, Future[float]] | None = None
        self._judge: ThreadPoolExecutor | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Judge inside the block; at its end the last verdict is in."""
        if not self._schedule.beside or self._score is None:
            yield
            return
        with ThreadPoolExecutor(1, "feddf-judge") as self._judge:
            yield
            self._read()
        self._judge = None

    def enough(self, step: int, candidate: nn.Module) -> bool:
        """Take a snapshot, and say whether the student may stop."""
        if self._judge is None:
            return self._settle(step, candidate, self._score(candidate) if self._score else None)
        if self._read():
            return True
        snapshot = deepcopy(candidate).eval()
        ready = folded(snapshot)  # here and not by the judge: tracing it would disturb the student
        self._pending = step, snapshot, self._judge.submit(self._judged, ready)
        return False

    def diverged(self, step: int) -> None:
        """Note that the student has come to nothing at a step."""
        if not self._read():
            self.best = replace(self.best, steps=step)

    def _judged(self, ready: nn.Module) -> float:
        assert self._score is not None
        with threads(self._schedule.threads), as_it_is():
            return self._score(ready)

    def _read(self) -> bool:
        """Read the verdict that is due, and say whether it was enough."""
        if self._pending is None:
            return False
        step, snapshot, verdict = self._pending
        self._pending = None
        return self._settle(step, snapshot, verdict.result())

    def _settle(self, step: int, candidate: nn.Module, now: float | None) -> bool:
        best = self.best
        if now is None or best.best_score is None or now > best.best_score:
            best = Distilled(copy(candidate.state_dict()), step, step, best.first_score, now)
        self.best = replace(best, steps=step)
        return step - max(best.best_step, self._schedule.settling) >= self._schedule.patience
