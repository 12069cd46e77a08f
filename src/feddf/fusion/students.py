"""Students: each is drawn towards the same targets, in parallel, wherever the engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from feddf import evaluate
from feddf.batches import batches
from feddf.fusion.distill import distill, held_out_score
from feddf.fusion.early_stopping import DistillResult
from feddf.fusion.ensemble import OnlineTargets, Targets
from feddf.outcomes import gather
from feddf.runtime.device import CPU, threads
from feddf.runtime.execution import Execution
from feddf.seeds import derive, torch_generator
from feddf.types import Engine, Inputs, Refusal, Resources, Score, State

if TYPE_CHECKING:
    from feddf.config.records import DistillationRecord
    from feddf.config.sections import DistillConfig

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
        learned = dict(gather(engine(learn, jobs), "the distillation of"))
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
    resources: Resources,
    config: DistillConfig,
    pool: Inputs,
    held_out: Tensor,
    targets: Targets,
    device: torch.device = CPU,
) -> Score | None:
    """Return what a student is stopped by: validation accuracy, the loss on held-out inputs, or nothing."""
    if config.early_stopping == "validation":
        return partial(evaluate.unread_accuracy, examples=resources.labeled)
    if config.early_stopping == "none":
        return None
    chunks = batches(pool.raw, held_out.split(config.batch_size), device)
    expected = torch.cat([targets(chosen, pool.encode(raw)) for chosen, raw in chunks])
    if isinstance(targets, OnlineTargets):
        targets.refuse_unfit()
    return held_out_score(pool, held_out, expected, config.temperature, resources.outputs)


def notes(learned: Mapping[str, DistillResult]) -> dict[str, DistillationRecord]:
    """Return how each student learned, for the record."""
    return {
        name: {
            "steps": student.steps,
            "best_step": student.best_step,
            "score_before": student.first_score,
            "score_after": student.best_score,
        }
        for name, student in learned.items()
    }
