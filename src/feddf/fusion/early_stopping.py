"""Early stopping: snapshots of a student are scored, the best one is kept, and the student stops in time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from feddf.states import all_finite, on_cpu
from feddf.types import Score, State

if TYPE_CHECKING:
    from feddf.config.sections import DistillConfig


@dataclass(frozen=True)
class DistillResult:
    """The student's weights, the step at which they were best, and the number of steps taken.

    ``student_score`` is that of the best snapshot after a step, also where the start was better and is returned.
    """

    state: State
    best_step: int
    steps: int
    first_score: float | None
    best_score: float | None
    student_score: float | None = None


class EarlyStopping:
    """The snapshots of one student, scored in the order in which they are taken."""

    def __init__(self, student: nn.Module, score: Score | None, config: DistillConfig) -> None:
        self._score, self._config = score, config
        first = float(score(student)) if score else None
        self._best = DistillResult(_snapshot(student), 0, 0, first, first if config.keep_init else None)
        self._best_student_step = 0
        self.has_diverged = False

    @property
    def best(self) -> DistillResult:
        """The best snapshot, on the CPU."""
        return replace(self._best, state=on_cpu(self._best.state))

    def enough(self, step: int, student: nn.Module, candidate: nn.Module) -> bool:
        """Score a snapshot, keep it if it is the best so far, and say whether the student may stop.

        It also stops when its weights are not finite any more. Patience counts from the best snapshot, not from the
        start: a student may rise steadily from below a good start, and is not stopped for being below it.
        """
        finite, now = self._read(student, candidate)
        if not finite:
            self.has_diverged, self._best = True, replace(self._best, steps=step)
            return True
        best = self._best
        if now is None or best.best_score is None or now > best.best_score:
            best = replace(best, state=_snapshot(candidate), best_step=step, best_score=now)
        if now is None or best.student_score is None or now > best.student_score:
            self._best_student_step, best = step, replace(best, student_score=now)
        self._best = replace(best, steps=step)
        return step - max(self._best_student_step, self._config.approach) >= self._config.patience

    def _read(self, student: nn.Module, candidate: nn.Module) -> tuple[bool, float | None]:
        """Return whether the student's weights are finite, and the candidate's score, in one transfer from a device."""
        finite = all_finite(student.state_dict())
        if self._score is None or (finite.device.type == "cpu" and not finite):
            return bool(finite), None
        score = self._score(candidate)
        if not isinstance(score, Tensor) or score.device != finite.device:
            return bool(finite), float(score)
        both = torch.stack([finite.to(score.dtype), score.detach()]).to("cpu")
        return bool(both[0]), float(both[1])


def _snapshot(model: nn.Module) -> State:
    """Return a model's weights with storage of their own, on its device: only the best ones travel, at the end."""
    found = model.state_dict().items()
    return {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in found}
