"""Distillation of one student (lines 12 to 14 of Algorithm 3), with early stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddf.accelerate import Accelerate, eager
from feddf.seeds import derive, seeded, torch_generator
from feddf.states import copy, is_finite
from feddf.types import Inputs, Score, State

Teach = Callable[[Tensor, Tensor], Tensor]
"""(indices into the pool, encoded inputs) -> the class probabilities that the student should give them."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a student learns. The defaults are the paper's (section 4.1).

    ``threads`` and ``accelerate`` change the speed, and the result in its last bits.
    """

    steps: int = 10_000
    batch: int = 128
    rate: float = 1e-3
    check_every: int = 100
    patience: int = 1_000
    threads: int = 1
    accelerate: Accelerate = eager


@dataclass(frozen=True)
class Distilled:
    """The student's weights, the step at which they were best, and the number of steps taken."""

    state: State
    best_step: int
    steps: int
    first_score: float | None
    best_score: float | None


def distill(
    student: nn.Module, teach: Teach, pool: Inputs, *, schedule: Schedule, score: Score | None, seed: int
) -> Distilled:
    """Return the student after x_j := x_{j−1} − η ∂KL(teachers(d), σ(f(x_{j−1}, d)))/∂x, j = 1, ..., N.

    Adam with cosine annealing over all N steps; the student's BatchNorm is in train mode. With a ``score``
    (validation accuracy) the student is judged before the first step and every ``check_every`` steps; it
    stops after ``patience`` steps without a better score, and the best snapshot is returned. So it is never
    worse, by that score, than what it started from. Without a score, all steps are taken and the last
    weights returned. Weights that are not finite are never returned.
    """
    forward = schedule.accelerate(student, min(schedule.batch, len(pool)))
    optimizer = torch.optim.Adam(student.parameters(), lr=schedule.rate)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=schedule.steps)
    first = score(student) if score else None
    best = Distilled(copy(student.state_dict()), 0, 0, first, first)
    step = 0
    student.train()
    with seeded(derive(seed, "dropout")):
        for step, chosen in enumerate(islice(_endless_batches(len(pool), schedule.batch, seed), schedule.steps), 1):
            inputs = pool.batch(chosen)  # line 13
            loss = kl_divergence(teach(chosen, inputs), forward(inputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # line 14
            cosine.step()
            if step % schedule.check_every == 0 or step == schedule.steps:
                if not is_finite(student.state_dict()):
                    break  # it diverged: what was best before is returned
                now = score(student) if score else None
                if now is None or best.best_score is None or now > best.best_score:
                    best = Distilled(copy(student.state_dict()), step, step, first, now)
                if step - best.best_step >= schedule.patience:
                    break
    return Distilled(best.state, best.best_step, step, first, best.best_score)


def kl_divergence(probabilities: Tensor, logits: Tensor) -> Tensor:
    """Return KL(p ‖ σ(logits)), the mean over the batch."""
    return F.kl_div(F.log_softmax(logits, dim=1), probabilities, reduction="batchmean")


def _endless_batches(n: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield full batches of pool indices for ever: one random order after the other."""
    generator = torch_generator(derive(seed, "batches"))
    size = min(size, n)
    while True:
        for chosen in torch.randperm(n, generator=generator).split(size):
            if len(chosen) == size:
                yield chosen
