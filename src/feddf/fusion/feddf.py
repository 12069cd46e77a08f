"""FedDF: fusion by ensemble distillation (Algorithm 3; Algorithm 1 is its case of one prototype)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from feddf import evaluate
from feddf.batches import batches
from feddf.config.experiment import Settings
from feddf.config.records import DistillationRecord
from feddf.config.sections import DistillConfig
from feddf.fusion.average import averaging_rule, start_from
from feddf.fusion.distill import distill, held_out_score
from feddf.fusion.early_stopping import Distilled
from feddf.fusion.ensemble import Answers, Ask, AskedAgain, ensemble
from feddf.outcomes import gather
from feddf.runtime.device import CPU
from feddf.runtime.execution import Execution, of_students
from feddf.runtime.threads import threads, threads_for
from feddf.seeds import derive, torch_generator
from feddf.types import Engine, Fused, Fusion, Inputs, Refusal, Resources, Score, ServerState, State, Update

ENSEMBLE = "ensemble"
"""What the teachers' answers are called in the server's memory."""


def feddf(resources: Resources, settings: Settings, engine: Engine, ask: Ask | None = None) -> Fusion:
    """Return the fusion of Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion" (2020).

    The weights of each prototype's clients are averaged; then each prototype is distilled, on the unlabeled
    pool, from the ensemble of *all* clients, whatever their architecture. A prototype none of whose clients
    took part learns from the others too, starting from its previous weights.

    The settings' sections ``fusion``, ``teachers`` and ``distill`` say how. ``ask`` replaces the ensemble of the
    clients' models, where teachers are of another kind.
    """
    rule = averaging_rule(resources, settings)
    ask = ask or ensemble(resources, settings, engine)
    execution = of_students(settings.run, len(resources.prototypes), partial(_lone_threads, resources, settings))
    learn = partial(distilled, resources=resources, config=settings.distill, execution=execution)

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        began = perf_counter()
        averaged = start_from(rule, server, updates)  # lines 9 to 11
        answers, past = ask(updates, seed, server.memory.get(ENSEMBLE, {}))  # line 13, of all teachers
        asked = perf_counter()
        students = [
            Student(name, starts(settings.distill, server.models[name], state), derive(seed, name), answers)
            for name, state in averaged.items()
        ]
        results = accepted(gather(engine(learn, students), "the distillation of"))  # lines 12 to 14
        seconds = {"ask": asked - began, "distill": perf_counter() - asked}
        models = {name: results[name].state for name in averaged}
        after = replace(server.next(models), memory={ENSEMBLE: past} if past else {})
        return Fused(after, averaged, {"seconds": seconds, "distillation": notes(results)})  # line 15

    return fuse


def _lone_threads(resources: Resources, settings: Settings) -> int:
    (prototype,) = resources.prototypes.values()
    assert resources.pool is not None, "there is something to distil on"
    with torch.random.fork_rng(devices=[]):
        model = prototype.build()
    return threads_for(model, resources.pool.batch(torch.zeros(1, dtype=torch.long)), settings.distill.batch)


@dataclass(frozen=True)
class Student:
    """One prototype's distillation: the weights that it may start from, its seed and its teachers' answers."""

    id: str
    starts: Sequence[State]
    seed: int
    answers: Answers


def starts(config: DistillConfig, previous: State, averaged: State) -> tuple[State, ...]:
    """Return the weights that a student may start from (Table 5: from average, from previous)."""
    return {"average": (averaged,), "previous": (previous,), "best": (averaged, previous)}[config.start]


def distilled(
    student: Student, *, resources: Resources, config: DistillConfig, execution: Execution
) -> tuple[str, Distilled | Refusal]:
    """Let one student learn, wherever this runs; teachers that turn out to be unfit are returned as a refusal."""
    pool = resources.pool
    assert pool is not None, "whoever has answers for a pool has the pool"
    kept, held_out = held_out_inputs(len(pool), config, pool.views)
    with threads(execution.threads), execution.begun() as device:
        try:
            score = score_of(resources, config, pool, held_out, student.answers, device)
            candidates = [resources.prototypes[student.id].load(state, device) for state in student.starts]
            best = max(candidates, key=score) if score is not None and len(candidates) > 1 else candidates[0]
            return student.id, distill(
                best,
                student.answers,
                pool,
                config,
                score=score,
                seed=student.seed,
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
    share = config.held_out if config.stop == "held-out-loss" else 0.0
    count = min(max(1, round(share * n)), n - 2) if share else 0
    order = torch.randperm(n, generator=torch_generator(derive(0, "held out")))
    all_views = order + n * torch.arange(views).unsqueeze(1)
    return all_views[:, count:].flatten().sort().values, all_views[:, :count].flatten().sort().values


def score_of(
    resources: Resources,
    config: DistillConfig,
    pool: Inputs,
    held_out: Tensor,
    answers: Answers,
    device: torch.device = CPU,
) -> Score | None:
    """Return what a student is stopped by: validation accuracy, the loss on held-out inputs, or nothing."""
    if config.stop == "validation":
        return partial(evaluate.unread_accuracy, examples=resources.labelled)
    if config.stop == "steps":
        return None
    chunks = batches(pool.raw, held_out.split(config.batch), device)
    expected = torch.cat([answers(chosen, pool.encode(raw)) for chosen, raw in chunks])
    if isinstance(answers, AskedAgain):
        answers.refuse_unfit()
    return held_out_score(pool, held_out, expected, config.temperature)


def accepted(results: Iterable[tuple[str, Distilled | Refusal]]) -> dict[str, Distilled]:
    """Return the students by name, or raise the refusal of one of them."""
    found: dict[str, Distilled] = {}
    for name, result in sorted(results, key=lambda result: result[0]):
        if isinstance(result, Refusal):
            raise result
        found[name] = result
    return found


def notes(results: Mapping[str, Distilled]) -> dict[str, DistillationRecord]:
    """Return how each student learned, for the record."""
    return {
        name: {
            "steps": student.steps,
            "best_step": student.best_step,
            "score_before": student.first_score,
            "score_after": student.best_score,
        }
        for name, student in results.items()
    }
