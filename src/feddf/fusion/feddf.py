"""FedDF: fusion by ensemble distillation (Algorithm 3; Algorithm 1 is its case of one prototype)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from feddf.evaluate import folded
from feddf.fusion.average import average, start_from
from feddf.fusion.distill import Distilled, Schedule, Teach, distill
from feddf.fusion.ensemble import answer, ask, avg_logits
from feddf.outcomes import gather
from feddf.seeds import derive
from feddf.threads import threads
from feddf.types import Engine, Fused, Fusion, Inputs, Prototype, Rule, Score, ServerState, State, Target, Update

Mode = Literal["cached", "online"]


def feddf(
    prototypes: Mapping[str, Prototype],
    pool: Inputs,
    *,
    engine: Engine,
    score: Score | None,
    schedule: Schedule | None = None,
    start: Rule = average,
    target: Target = avg_logits,
    mode: Mode = "cached",
) -> Fusion:
    """Return the fusion of Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion" (2020).

    The weights of each prototype's clients are averaged; then each prototype is distilled, on the unlabeled
    pool, from the ensemble of *all* clients, whatever their architecture. A prototype none of whose clients
    took part learns from the others too, starting from its previous weights.

    ``mode="cached"`` asks every teacher once a round for the whole pool: teachers are frozen, so asking
    again on each batch (``mode="online"``, as the paper's pseudo code has it) gives the same targets at
    ``steps × batch / pool`` times the cost.
    """
    answers = partial(answer, prototypes=prototypes, inputs=pool)
    study = partial(
        _study, prototypes=prototypes, pool=pool, schedule=schedule or Schedule(), score=score, target=target
    )

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        clock = perf_counter()
        starts = start_from(start, server, updates)  # lines 10 and 11
        probabilities: Tensor | None = target(ask(engine, answers, updates))  # line 13; refuses unfit teachers
        if mode == "online":
            probabilities = None
        asked = perf_counter()
        lessons = [
            Lesson(prototype, state, derive(seed, prototype), probabilities, () if mode == "cached" else updates)
            for prototype, state in starts.items()
        ]
        studied = dict(gather(engine(study, lessons), "the distillation of"))  # lines 9, 12 to 14
        seconds = {"ask": asked - clock, "distill": perf_counter() - asked}
        models = {prototype: studied[prototype].state for prototype in starts}
        return Fused(ServerState(server.round + 1, models), starts, _notes(studied, seconds))  # line 15

    return fuse


@dataclass(frozen=True)
class Lesson:
    """One student's work: where it starts, and its targets (cached) or its teachers (online)."""

    id: str
    start: State
    seed: int
    probabilities: Tensor | None
    teachers: Sequence[Update] = field(default=())


def _study(
    lesson: Lesson,
    *,
    prototypes: Mapping[str, Prototype],
    pool: Inputs,
    schedule: Schedule,
    score: Score | None,
    target: Target,
) -> tuple[str, Distilled]:
    student = prototypes[lesson.id].load(lesson.start)
    teach = (
        _remember(lesson.probabilities) if lesson.probabilities is not None else _consult(lesson, prototypes, target)
    )
    with threads(schedule.threads):
        return lesson.id, distill(student, teach, pool, schedule=schedule, score=score, seed=lesson.seed)


def _remember(probabilities: Tensor) -> Teach:
    return lambda chosen, inputs: probabilities[chosen]


def _consult(lesson: Lesson, prototypes: Mapping[str, Prototype], target: Target) -> Teach:
    teachers = [folded(prototypes[update.prototype].load(update.state)) for update in lesson.teachers]

    @torch.no_grad()
    def teach(chosen: Tensor, inputs: Tensor) -> Tensor:
        return target(teacher(inputs) for teacher in teachers)

    return teach


def _notes(studied: Mapping[str, Distilled], seconds: Mapping[str, float]) -> dict[str, Any]:
    return {
        "seconds": dict(seconds),
        "distillation": {
            name: {
                "steps": student.steps,
                "best_step": student.best_step,
                "validation_before": student.first_score,
                "validation_after": student.best_score,
            }
            for name, student in sorted(studied.items())
        },
    }
