"""Early stopping: snapshots of a student are scored, the best one is kept, and the student stops in time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace

from torch import nn

from feddf.config.sections import DistillConfig
from feddf.evaluate import as_it_is, folded
from feddf.runtime.execution import Execution
from feddf.runtime.threads import threads
from feddf.states import copy
from feddf.types import Score, State


@dataclass(frozen=True)
class Distilled:
    """The student's weights, the step at which they were best, and the number of steps taken."""

    state: State
    best_step: int
    steps: int
    first_score: float | None
    best_score: float | None


class Snapshots:
    """The snapshots of one student, scored in the order in which they were taken.

    In the background, a score is read when the next snapshot comes, and what the student did after the snapshot at
    which it should have stopped is thrown away: the result is the same as if it had waited.
    """

    def __init__(self, student: nn.Module, score: Score | None, config: DistillConfig, execution: Execution) -> None:
        self._score, self._config, self._execution = score, config, execution
        first = score(student) if score else None
        self.best = Distilled(copy(student.state_dict()), 0, 0, first, first if config.keep_start else None)
        self._best_student: tuple[int, float | None] = 0, None
        self._pending: tuple[int, nn.Module, Future[float]] | None = None
        self._background: ThreadPoolExecutor | None = None

    @contextmanager
    def scored(self) -> Iterator[None]:
        """Score snapshots inside the block; at its end the last score is in."""
        if not self._execution.background or self._score is None:
            yield
            return
        with ThreadPoolExecutor(1, "feddf-score") as self._background:
            yield
            self._read_score()
        self._background = None

    def enough(self, step: int, candidate: nn.Module) -> bool:
        """Take a snapshot, and say whether the student may stop."""
        if self._background is None:
            return self._compare(step, candidate, self._score(candidate) if self._score else None)
        if self._read_score():
            return True
        snapshot = deepcopy(candidate).eval()
        ready = folded(snapshot)  # here and not in the background: tracing it would disturb the student
        self._pending = step, snapshot, self._background.submit(self._scored_in_background, ready)
        return False

    def diverged(self, step: int) -> None:
        """Note that the student's weights stopped being finite."""
        if not self._read_score():
            self.best = replace(self.best, steps=step)

    def _scored_in_background(self, ready: nn.Module) -> float:
        assert self._score is not None
        with threads(self._execution.threads), as_it_is():
            return self._score(ready)

    def _read_score(self) -> bool:
        """Read the score that is due, and say whether the student may stop."""
        if self._pending is None:
            return False
        step, snapshot, score = self._pending
        self._pending = None
        return self._compare(step, snapshot, score.result())

    def _compare(self, step: int, candidate: nn.Module, now: float | None) -> bool:
        """Keep the candidate if it is the best so far; patience counts from the best snapshot, not from the start.

        A student may rise steadily from below a good start: it is not stopped for being below it.
        """
        best, (_, best_now) = self.best, self._best_student
        if now is None or best_now is None or now > best_now:
            self._best_student = step, now
        if now is None or best.best_score is None or now > best.best_score:
            best = Distilled(copy(candidate.state_dict()), step, step, best.first_score, now)
        self.best = replace(best, steps=step)
        return step - max(self._best_student[0], self._config.approach) >= self._config.patience
