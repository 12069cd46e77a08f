"""Distillation of one student (lines 12 to 14 of Algorithm 3), with early stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel

from feddf.accelerate import Accelerate, eager
from feddf.evaluate import logits
from feddf.fusion.checks import Checks, Distilled
from feddf.recalibrate import recalibrate
from feddf.seeds import derive, seeded, torch_generator
from feddf.states import is_finite
from feddf.types import Inputs, Score

Teach = Callable[[Tensor, Tensor], Tensor]
"""(indices into the pool, encoded inputs) -> the class probabilities that the student should give them."""

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""(raw batch, generator) -> raw batch."""

Optimizer = Literal["adam", "sgd", "swa"]

MOMENTUM = 0.9
"""Of SGD, alone and under SWA."""

LOWEST = 0.4
"""The rate at the end of one of SWA's cycles, as a share of that at its start."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a student learns. The defaults are the paper's (section 4.1).

    ``optimizer``: ``adam`` and ``sgd`` (with momentum) have cosine annealing; ``swa`` is SGD with a cyclical rate, the
    weights at the end of each cycle being averaged (Izmailov et al. 2018, as in FedDistill).
    ``clip`` bounds the gradient's norm. ``threads`` and ``accelerate`` change the speed, and the result in its last
    bits. With ``beside`` snapshots are judged in a thread of their own while the student goes on: the same result,
    sooner where cores are idle.
    """

    steps: int = 10_000
    batch: int = 128
    rate: float = 1e-3
    check_every: int = 100
    patience: int = 1_000
    optimizer: Optimizer = "adam"
    temperature: float = 1.0
    clip: float | None = None
    swa_cycle: int = 25
    threads: int = 1
    accelerate: Accelerate = eager
    beside: bool = False

    @property
    def settling(self) -> int:
        """The steps before patience counts: SWA begins to average after the first quarter, which only approaches."""
        return self.steps // 4 if self.optimizer == "swa" else 0


def distill(
    student: nn.Module,
    teach: Teach,
    pool: Inputs,
    *,
    schedule: Schedule,
    score: Score | None,
    seed: int,
    chosen_from: Tensor | None = None,
    augment: Augment | None = None,
) -> Distilled:
    """Return the student after x_j := x_{j−1} − η ∂KL(teachers(d), σ(f(x_{j−1}, d)))/∂x, j = 1, ..., N.

    Adam with cosine annealing over all N steps; the student's BatchNorm is in train mode. With a ``score``
    (validation accuracy) the student is judged before the first step and every ``check_every`` steps; it
    stops after ``patience`` steps without a better score, and the best snapshot is returned. So it is never
    worse, by that score, than what it started from. Without a score, all steps are taken and the last
    weights returned. Weights that are not finite are never returned.

    With a temperature T the loss is T² KL(teachers(d), σ(f(x, d) / T)): the gradient keeps its size (Hinton 2015).
    ``chosen_from`` limits the pool to the inputs at these indices.
    """
    forward = schedule.accelerate(student)
    optimizer, rates = _optimizer(student, schedule)
    averaged = AveragedModel(student) if schedule.optimizer == "swa" else None
    distort = torch_generator(derive(seed, "augment"))
    indices = torch.arange(len(pool)) if chosen_from is None else chosen_from
    checks = Checks(student, score, schedule)
    student.train()
    with checks.at_work(), seeded(derive(seed, "dropout")):
        for step, chosen in enumerate(islice(_endless_batches(indices, schedule.batch, seed), schedule.steps), 1):
            raw = pool.raw[chosen]
            inputs = pool.encode(augment(raw, distort) if augment else raw)  # line 13
            loss = kl_divergence(teach(chosen, inputs), forward(inputs), schedule.temperature)
            optimizer.zero_grad()
            loss.backward()
            if schedule.clip is not None:
                nn.utils.clip_grad_norm_(student.parameters(), schedule.clip)
            optimizer.step()  # line 14
            rates.step()
            if averaged is not None and step > schedule.settling and step % schedule.swa_cycle == 0:
                averaged.update_parameters(student)
            if step % schedule.check_every == 0 or step == schedule.steps:
                if not is_finite(student.state_dict()):
                    checks.diverged(step)
                    break  # what was best before is returned
                candidate = student if averaged is None else _settled(averaged, student, pool.take(indices))
                if checks.enough(step, candidate):
                    break
    return checks.best


def kl_divergence(probabilities: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T² KL(p ‖ σ(logits / T)), the mean over the batch."""
    loss = F.kl_div(F.log_softmax(logits / temperature, dim=1), probabilities, reduction="batchmean")
    return loss * temperature**2


def held_out_score(pool: Inputs, held_out: Tensor, probabilities: Tensor, temperature: float) -> Score:
    """Return a score that needs no labels: minus the distillation loss over held-out inputs of the pool."""
    inputs = pool.take(held_out)

    def score(model: nn.Module) -> float:
        return -float(kl_divergence(probabilities, logits(model, inputs), temperature))

    return score


def _optimizer(student: nn.Module, schedule: Schedule) -> tuple[torch.optim.Optimizer, LRScheduler]:
    weights = list(student.parameters())
    if schedule.optimizer == "adam":
        adam = torch.optim.Adam(weights, lr=schedule.rate)
        return adam, CosineAnnealingLR(adam, T_max=schedule.steps)
    sgd = torch.optim.SGD(weights, lr=schedule.rate, momentum=MOMENTUM)
    if schedule.optimizer == "sgd":
        return sgd, CosineAnnealingLR(sgd, T_max=schedule.steps)
    cycle = schedule.swa_cycle
    return sgd, LambdaLR(sgd, lambda done: 1 - (1 - LOWEST) * (done % cycle + 1) / cycle)


def _settled(averaged: AveragedModel, student: nn.Module, pool: Inputs) -> nn.Module:
    """Return SWA's model, with BatchNorm statistics of its own; the student before there is one."""
    if int(averaged.n_averaged) == 0:
        return student
    model: nn.Module = averaged.module
    recalibrate(model, pool)
    return model


def _endless_batches(indices: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Yield full batches of pool indices for ever: one random order after the other."""
    generator = torch_generator(derive(seed, "batches"))
    size = min(size, len(indices))
    while True:
        for chosen in indices[torch.randperm(len(indices), generator=generator)].split(size):
            if len(chosen) == size:
                yield chosen
