"""Distillation of one student (lines 12 to 14 of Algorithm 3), with early stopping."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel

from feddf.batches import batches
from feddf.evaluate import logits, recalibrate
from feddf.fusion.early_stopping import DistillResult, EarlyStopping
from feddf.fusion.ensemble import OnlineTargets, Targets
from feddf.outputs import Outputs, classes
from feddf.runtime.device import device_of
from feddf.runtime.execution import Execution, forward_of
from feddf.seeds import derive, seed_torch, torch_generator
from feddf.types import Augment, Inputs, Score

if TYPE_CHECKING:
    from feddf.config.sections import DistillConfig

MOMENTUM = 0.9
"""Of SGD, alone and under SWA."""

LOWEST = 0.4
"""The rate at the end of one of SWA's cycles, as a share of that at its start."""


def distill(
    student: nn.Module,
    targets: Targets,
    pool: Inputs,
    config: DistillConfig,
    *,
    score: Score | None,
    seed: int,
    outputs: Outputs = classes(),
    chosen_from: Tensor | None = None,
    augment: Augment | None = None,
    execution: Execution = Execution(),
) -> DistillResult:
    """Return the student after x_j := x_{j−1} − η ∂KL(teachers(d), σ(f(x_{j−1}, d)))/∂x, j = 1, ..., N.

    Adam with cosine annealing over all N steps; the student's BatchNorm is in train mode. With a ``score``
    (validation accuracy) the student is scored before the first step and every ``eval_every`` steps; it stops after
    ``patience`` steps without a better score, and the best snapshot is returned. So it is never worse, by that score,
    than what it started from. Without a score, all steps are taken and the last weights returned. Weights that are not
    finite are never returned.

    With a temperature T the loss is T² KL(teachers(d), σ(f(x, d) / T)): the gradient keeps its size (Hinton 2015).
    ``optimizer = "swa"`` is SGD with a cyclical rate, the weights at the end of each cycle being averaged (Izmailov et
    al. 2018, as in FedDistill).

    All is computed on the device that the student is on, and read off it every ``eval_every`` steps; what is
    returned is on the CPU.

    Args:
        student: the module to train, which is changed; its weights and its device are where training begins.
        targets: (indices of pool inputs, encoded inputs) -> the ensemble's predictions.
        pool: the unlabeled inputs.
        config: the section ``[distill]``.
        score: model -> what early stopping maximizes; ``None`` to take all steps.
        seed: decides the order of batches, augmentation and dropout.
        outputs: what the models' outputs mean; its ``distance`` is the loss.
        chosen_from: the indices of the pool inputs to train on; all if it is left out.
        augment: changes raw batches of the pool.
        execution: precision and compilation.
    """
    device = device_of(student)
    forward = forward_of(student, execution.compile, execution.precision)
    optimizer, rates = _optimizer(student, config)
    averaged = AveragedModel(student) if config.optimizer == "swa" else None
    distort = torch_generator(derive(seed, "augment"))
    indices = torch.arange(len(pool)) if chosen_from is None else chosen_from
    learned_from = pool.take(indices) if averaged is not None else pool
    snapshots = EarlyStopping(student, score, config)
    student.train()
    order = islice(_endless_batches(indices, config.batch_size, seed), config.steps)
    with seed_torch(derive(seed, "dropout"), device):
        for step, (chosen, raw) in enumerate(batches(pool.raw, order, device), 1):
            inputs = pool.encode(augment(raw, distort) if augment else raw)  # line 13
            loss = outputs.distance(targets(chosen, inputs), forward(inputs), config.temperature)
            optimizer.zero_grad()
            loss.backward()
            if config.clip is not None:
                nn.utils.clip_grad_norm_(student.parameters(), config.clip)
            optimizer.step()  # line 14
            rates.step()
            if averaged is not None and step > config.approach and step % config.swa_cycle == 0:
                averaged.update_parameters(student)
            if step % config.eval_every == 0 or step == config.steps:
                candidate = student if averaged is None else _averaged_model(averaged, student, learned_from)
                if snapshots.enough(step, student, candidate):
                    break  # if it has diverged, what was best before is returned
    if snapshots.has_diverged and isinstance(targets, OnlineTargets):
        targets.refuse_unfit()  # it may be the fault of a teacher that nobody has looked at since
    return snapshots.best


def held_out_score(
    pool: Inputs, held_out: Tensor, expected: Tensor, temperature: float, outputs: Outputs = classes()
) -> Score:
    """Return a score that needs no labels: minus the distillation loss over held-out inputs of the pool."""
    inputs = pool.take(held_out)

    def score(model: nn.Module) -> Tensor:
        predicted = logits(model, inputs)
        return -outputs.distance(expected.to(predicted.device), predicted, temperature).detach()

    return score


def _optimizer(student: nn.Module, config: DistillConfig) -> tuple[torch.optim.Optimizer, LRScheduler]:
    weights = list(student.parameters())
    if config.optimizer == "adam":
        adam = torch.optim.Adam(weights, lr=config.lr)
        return adam, CosineAnnealingLR(adam, T_max=config.steps)
    sgd = torch.optim.SGD(weights, lr=config.lr, momentum=MOMENTUM)
    if config.optimizer == "sgd":
        return sgd, CosineAnnealingLR(sgd, T_max=config.steps)
    cycle = config.swa_cycle
    return sgd, LambdaLR(sgd, lambda done: 1 - (1 - LOWEST) * (done % cycle + 1) / cycle)


def _averaged_model(averaged: AveragedModel, student: nn.Module, pool: Inputs) -> nn.Module:
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
