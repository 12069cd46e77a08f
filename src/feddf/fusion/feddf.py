"""FedDF: fusion by ensemble distillation (Algorithm 3; Algorithm 1 is its case of one prototype)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from feddf.evaluate import folded
from feddf.fusion.average import average, start_from
from feddf.fusion.checks import Distilled
from feddf.fusion.distill import Augment, Schedule, Teach, distill, held_out_score
from feddf.fusion.ensemble import Question, answer, ask, combine, question
from feddf.fusion.weigh import Weigh, Weight, uniform
from feddf.outcomes import gather
from feddf.seeds import derive, torch_generator
from feddf.threads import threads
from feddf.types import Engine, Fused, Fusion, Inputs, Prototype, Rule, Score, ServerState, State, Target, Update, Vote

Mode = Literal["cached", "online"]
Start = Literal["average", "previous", "best"]
MoreTeachers = Callable[[Sequence[Update], int], Sequence[Update]]
"""(updates, seed) -> further teachers, made out of them."""


def nobody_else(updates: Sequence[Update], seed: int) -> Sequence[Update]:
    """Make no further teachers: the ensemble is that of the clients, as in the paper."""
    return ()


def feddf(
    prototypes: Mapping[str, Prototype],
    pool: Inputs,
    *,
    engine: Engine,
    score: Score | None,
    schedule: Schedule | None = None,
    rule: Rule = average,
    start: Start = "average",
    target: Target = combine,
    weigh: Weigh = uniform,
    more_teachers: MoreTeachers = nobody_else,
    held_out: float = 0.0,
    mode: Mode = "cached",
    augment: Augment | None = None,
) -> Fusion:
    """Return the fusion of Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion" (2020).

    The weights of each prototype's clients are averaged; then each prototype is distilled, on the unlabeled
    pool, from the ensemble of *all* clients, whatever their architecture. A prototype none of whose clients
    took part learns from the others too, starting from its previous weights.

    ``rule`` averages; ``start`` is where a student starts from (Table 4's "from average" and "from previous", or
    the better of both by its score). ``target`` and ``weigh`` say how teachers' answers become one, and
    ``more_teachers`` makes further ones (SWAG). ``held_out`` is the share of the pool that stops the distillation by
    the loss over it, for those without labelled data; ``score`` is not used then.

    ``mode="cached"`` asks every teacher once a round for the whole pool: teachers are frozen, so asking
    again on each batch (``mode="online"``, as the paper's pseudo code has it) gives the same targets at
    ``steps × batch / pool`` times the cost. Only online can the pool be augmented.
    """
    if start == "best" and score is None and not held_out:
        raise ValueError("start = 'best' needs a score to judge by")
    if mode == "cached" and augment is not None:
        raise ValueError("cached answers are for the pool as it is; an augmented pool needs mode = 'online'")
    if mode == "online" and more_teachers is not nobody_else:
        raise ValueError("teachers made by the server need mode = 'cached'")
    answers = partial(answer, prototypes=prototypes, inputs=pool)
    study = partial(
        _study,
        prototypes=prototypes,
        pool=pool,
        schedule=schedule or Schedule(),
        score=score,
        target=target,
        held_out=held_out,
        augment=augment,
    )

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        clock = perf_counter()
        averaged = start_from(rule, server, updates)  # lines 10 and 11
        made = more_teachers(updates, seed)
        weights = weigh([*updates, *made])
        questions = [*map(question, updates), *(replace(question(update), made=True) for update in made)]
        probabilities: Tensor | None = target(  # line 13; refuses unfit teachers
            Vote(reply.logits, weights[reply.client_id](reply.logits)) for reply in ask(engine, answers, questions)
        )
        if mode == "online":
            probabilities = None
        asked = perf_counter()
        lessons = [
            Lesson(
                prototype,
                _starts(start, server.models[prototype], state),
                derive(seed, prototype),
                probabilities,
                () if mode == "cached" else [(one, weights[one.id]) for one in questions],
            )
            for prototype, state in averaged.items()
        ]
        studied = dict(gather(engine(study, lessons), "the distillation of"))  # lines 9, 12 to 14
        seconds = {"ask": asked - clock, "distill": perf_counter() - asked}
        models = {prototype: studied[prototype].state for prototype in averaged}
        return Fused(ServerState(server.round + 1, models), averaged, _notes(studied, seconds))  # line 15

    return fuse


def _starts(start: Start, previous: State, averaged: State) -> tuple[State, ...]:
    return {"average": (averaged,), "previous": (previous,), "best": (averaged, previous)}[start]


@dataclass(frozen=True)
class Lesson:
    """One student's work: where it may start, and its targets (cached) or its teachers (online)."""

    id: str
    starts: Sequence[State]
    seed: int
    probabilities: Tensor | None
    teachers: Sequence[tuple[Question, Weight]] = field(default=())


def _study(
    lesson: Lesson,
    *,
    prototypes: Mapping[str, Prototype],
    pool: Inputs,
    schedule: Schedule,
    score: Score | None,
    target: Target,
    held_out: float,
    augment: Augment | None,
) -> tuple[str, Distilled]:
    if lesson.probabilities is not None:
        teach = _remember(lesson.probabilities)
    else:
        teach = _consult(lesson, prototypes, target)
    kept, apart = _held_out(len(pool), held_out)
    with threads(schedule.threads):
        if len(apart):
            expected = torch.cat([teach(chunk, pool.batch(chunk)) for chunk in apart.split(schedule.batch)])
            score = held_out_score(pool, apart, expected, schedule.temperature)
        student = _best([prototypes[lesson.id].load(state) for state in lesson.starts], score)
        studied = distill(
            student,
            teach,
            pool,
            schedule=schedule,
            score=score,
            seed=lesson.seed,
            chosen_from=kept,
            augment=augment,
        )
    return lesson.id, studied


def _held_out(n: int, share: float) -> tuple[Tensor, Tensor]:
    """Return (to learn from, held out): the same in every round, so that nothing held out was learned from before."""
    count = min(max(1, round(share * n)), n - 2) if share else 0
    order = torch.randperm(n, generator=torch_generator(derive(0, "held out")))
    return order[count:].sort().values, order[:count].sort().values


def _best(models: Sequence[nn.Module], score: Score | None) -> nn.Module:
    return max(models, key=score) if score is not None and len(models) > 1 else models[0]


def _remember(probabilities: Tensor) -> Teach:
    return lambda chosen, inputs: probabilities[chosen]


def _consult(lesson: Lesson, prototypes: Mapping[str, Prototype], target: Target) -> Teach:
    teachers = [(folded(prototypes[asked.prototype].load(asked.state)), weight) for asked, weight in lesson.teachers]

    @torch.no_grad()
    def votes(inputs: Tensor) -> Tensor:
        answers = ((teacher(inputs), weight) for teacher, weight in teachers)
        return target(Vote(reply, weight(reply)) for reply, weight in answers)

    return lambda chosen, inputs: votes(inputs)


def _notes(studied: Mapping[str, Distilled], seconds: Mapping[str, float]) -> dict[str, Any]:
    return {
        "seconds": dict(seconds),
        "distillation": {
            name: {
                "steps": student.steps,
                "best_step": student.best_step,
                "score_before": student.first_score,
                "score_after": student.best_score,
            }
            for name, student in sorted(studied.items())
        },
    }
