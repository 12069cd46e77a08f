"""Distillation of students (lines 12 to 15 of Algorithm 3), in parallel, each towards the same targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel

from feddf import evaluate
from feddf.batches import batches
from feddf.fusion.early_stopping import DistillResult, EarlyStopping
from feddf.fusion.ensemble import OnlineTargets, Targets
from feddf.outputs import Outputs, classes
from feddf.runtime.device import device_of, threads
from feddf.runtime.execution import Execution, forward_of
from feddf.seeds import derive, seed_torch, torch_generator
from feddf.types import Augment, Engine, Inputs, Refusal, Resources, Score, State

if TYPE_CHECKING:
    from feddf.config.records import DistillationRecord
    from feddf.config.sections import DistillConfig

MOMENTUM = 0.9  # of SGD, alone and under SWA
LOWEST = 0.4  # the rate at the end of one of SWA's cycles, as a share of that at its start

Students = Callable[[Mapping[str, Sequence[State]], Targets, int], Mapping[str, DistillResult]]
"""(the weights that each student may start from, by its prototype, targets, seed) -> what they have learned."""


def make_students(
    resources: Resources, config: DistillConfig, engine: Engine, execution: Execution = Execution()
) -> Students:
    """Return how students learn from targets on the pool: lines 12 to 15 of Algorithm 3, all at once.

    Args:
        resources: the students' architectures, the pool, and the validation examples by which they are stopped.
        config: how long, how fast and by which score (the section ``[distill]``).
        engine: where they learn.
        execution: how they are executed.
    """
    needed = replace(resources, n_clients=None)  # it travels to workers, and over Flower that is a method of the server
    learn = partial(distill_student, resources=needed, config=config, execution=execution)

    def students(starts: Mapping[str, Sequence[State]], targets: Targets, seed: int) -> Mapping[str, DistillResult]:
        jobs = [Student(name, candidates, derive(seed, name), targets) for name, candidates in starts.items()]
        learned = dict(evaluate.gather(engine(learn, jobs), "the distillation of"))
        for name in sorted(learned):
            if isinstance(refusal := learned[name], Refusal):
                raise refusal
        return {name: one for name, one in learned.items() if isinstance(one, DistillResult)}

    return students


@dataclass(frozen=True)
class Student:
    """One prototype's distillation: the weights that it may start from, its seed and its targets."""

    id: str
    starts: Sequence[State]
    seed: int
    targets: Targets


def distill_student(
    student: Student, *, resources: Resources, config: DistillConfig, execution: Execution
) -> tuple[str, DistillResult | Refusal]:
    """Let one student learn; a refusal of unfit teachers is returned, since an engine would make a failure of it."""
    pool = resources.pool
    assert pool is not None, "where there are targets for a pool, there is the pool"
    kept, held_out = held_out_inputs(len(pool), config, pool.views)
    with threads(execution.threads), execution.begun() as device:
        try:
            score = score_of(resources, config, pool, held_out, student.targets, device)
            candidates = [resources.prototypes[student.id].load(state, device) for state in student.starts]
            best = max(candidates, key=score) if score is not None and len(candidates) > 1 else candidates[0]
            return student.id, distill(
                best,
                student.targets,
                pool,
                config,
                score=score,
                seed=student.seed,
                outputs=resources.outputs,
                chosen_from=kept,
                augment=resources.augment,
                execution=execution,
            )
        except Refusal as refusal:
            return student.id, refusal


def held_out_inputs(n: int, config: DistillConfig, views: int = 1) -> tuple[Tensor, Tensor]:
    """Return (to learn from, held out): the same in every round, so that nothing held out was learned from before.

    Of an input that is held out, all views are.
    """
    n //= views
    share = config.held_out if config.early_stopping == "held-out-loss" else 0.0
    count = min(max(1, round(share * n)), n - 2) if share else 0
    order = torch.randperm(n, generator=torch_generator(derive(0, "held out")))
    all_views = order + n * torch.arange(views).unsqueeze(1)
    return all_views[:, count:].flatten().sort().values, all_views[:, :count].flatten().sort().values


def score_of(
    resources: Resources, config: DistillConfig, pool: Inputs, held_out: Tensor, targets: Targets, device: torch.device
) -> Score | None:
    """Return what a student is stopped by: validation accuracy, the loss on held-out inputs, or nothing."""
    if config.early_stopping == "validation":
        return partial(evaluate.unread_accuracy, examples=resources.labeled)
    if config.early_stopping == "none" or not len(held_out):
        return None
    held_out = held_out[evaluate.spread(len(held_out), resources.outputs.at_once(len(held_out)))]
    chunks = batches(pool.raw, held_out.split(config.batch_size), device)
    expected = torch.cat([targets(chosen, pool.encode(raw)) for chosen, raw in chunks])
    if isinstance(targets, OnlineTargets):
        targets.refuse_unfit()
    return held_out_score(pool, held_out, expected, config.temperature, resources.outputs)


def held_out_score(
    pool: Inputs, held_out: Tensor, expected: Tensor, temperature: float, outputs: Outputs = classes()
) -> Score:
    """Return a score that needs no labels: minus the distillation loss over held-out inputs of the pool."""
    inputs = pool.take(held_out)

    def score(model: nn.Module) -> Tensor:
        predicted = evaluate.logits(model, inputs)
        return -outputs.distance(expected.to(predicted.device), predicted, temperature).detach()

    return score


def notes(learned: Mapping[str, DistillResult]) -> dict[str, DistillationRecord]:
    """Return how each student learned, for the record."""
    return {
        name: {
            "steps": student.steps,
            "best_step": student.best_step,
            "score_before": student.first_score,
            "score_student": student.student_score,
            "score_after": student.best_score,
        }
        for name, student in learned.items()
    }


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
    ``patience`` steps without a better score, and the best snapshot is returned. With ``keep_init`` (the default) the
    start is one of the snapshots, so that by this score the result is never worse than the start. Without a score, all
    steps are taken and the last weights returned. Weights that are not finite are never returned.

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
    if standardize := getattr(student, "standardize", None):  # a network of values that was never trained
        some = indices[: 4 * config.batch_size]
        standardize(targets(some, pool.encode(next(iter(batches(pool.raw, [some], device)))[1])))
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
        targets.refuse_unfit()  # it may be the fault of a teacher that was not looked at since
    return snapshots.best


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
    evaluate.recalibrate(model, pool)
    return model


def _endless_batches(indices: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Yield full batches of pool indices for ever: one random order after the other."""
    generator = torch_generator(derive(seed, "batches"))
    size = min(size, len(indices))
    while True:
        for chosen in indices[torch.randperm(len(indices), generator=generator)].split(size):
            if len(chosen) == size:
                yield chosen
