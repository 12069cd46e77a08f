"""Early stopping: snapshots of a student are scored, the best one is kept, and the student stops in time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from feddf.evaluate import as_it_is, fold_batchnorm
from feddf.runtime.device import threads
from feddf.runtime.execution import Execution
from feddf.states import all_finite, on_cpu
from feddf.types import Score, State

if TYPE_CHECKING:
    from feddf.config.sections import DistillConfig


@dataclass(frozen=True)
class DistillResult:
    """The student's weights, the step at which they were best, and the number of steps taken."""

    state: State
    best_step: int
    steps: int
    first_score: float | None
    best_score: float | None


class EarlyStopping:
    """The snapshots of one student, scored in the order in which they were taken.

    In the background, a score is read when the next snapshot comes, and what the student did after the snapshot at
    which it should have stopped is thrown away: the result is the same as if it had waited.
    """

    def __init__(self, student: nn.Module, score: Score | None, config: DistillConfig, execution: Execution) -> None:
        self._score, self._config, self._execution = score, config, execution
        first = float(score(student)) if score else None
        self._best = DistillResult(_snapshot(student), 0, 0, first, first if config.keep_init else None)
        self._best_student: tuple[int, float | None] = 0, None
        self._pending: tuple[int, nn.Module, Future[float]] | None = None
        self._background: ThreadPoolExecutor | None = None
        self.has_diverged = False

    @property
    def best(self) -> DistillResult:
        """The best snapshot, on the CPU."""
        return replace(self._best, state=on_cpu(self._best.state))

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

    def enough(self, step: int, student: nn.Module, candidate: nn.Module) -> bool:
        """Take a snapshot, and say whether the student may stop: also when its weights are not finite any more.

        All that is to be known of it is read off the device at once.
        """
        if self._background is None:
            finite, now = self._read(student, candidate)
            return self._compare(step, candidate, now) if finite else self._diverged(step)
        if not all_finite(student.state_dict()):
            return self._diverged(step)
        if self._read_score():
            return True
        snapshot = deepcopy(candidate).eval()
        ready = fold_batchnorm(snapshot)  # here and not in the background: tracing it would disturb the student
        self._pending = step, snapshot, self._background.submit(self._scored_in_background, ready)
        return False

    def _read(self, student: nn.Module, candidate: nn.Module) -> tuple[bool, float | None]:
        """Return whether the student's weights are finite, and the candidate's score."""
        finite = all_finite(student.state_dict())
        if self._score is None or (finite.device.type == "cpu" and not finite):
            return bool(finite), None
        score = self._score(candidate)
        if not isinstance(score, Tensor) or score.device != finite.device:
            return bool(finite), float(score)
        both = torch.stack([finite.to(score.dtype), score.detach()]).to("cpu")
        return bool(both[0]), float(both[1])

    def _diverged(self, step: int) -> bool:
        """Note that the student's weights stopped being finite."""
        self.has_diverged = True
        if not self._read_score():
            self._best = replace(self._best, steps=step)
        return True

    def _scored_in_background(self, ready: nn.Module) -> float:
        assert self._score is not None
        with threads(self._execution.threads), as_it_is():
            return float(self._score(ready))

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
        best, (_, best_now) = self._best, self._best_student
        if now is None or best_now is None or now > best_now:
            self._best_student = step, now
        if now is None or best.best_score is None or now > best.best_score:
            best = DistillResult(_snapshot(candidate), step, step, best.first_score, now)
        self._best = replace(best, steps=step)
        return step - max(self._best_student[0], self._config.approach) >= self._config.patience


def _snapshot(model: nn.Module) -> State:
    """Return a model's weights with storage of their own, on its device: only the best ones travel, at the end."""
    found = model.state_dict().items()
    return {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in found}
