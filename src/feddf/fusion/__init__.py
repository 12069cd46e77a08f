"""How updates become the next server state. Methods are compositions of small functions.

``FUSIONS`` names them for configs: each takes a :class:`Kit` and uses what it needs of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from feddf.fusion.average import average, fedavg
from feddf.fusion.distill import Augment, Schedule, distill
from feddf.fusion.ensemble import avg_logits, combine
from feddf.fusion.feddf import Mode, MoreTeachers, Start, feddf, nobody_else
from feddf.fusion.fedma import fedma, layers_of
from feddf.fusion.weigh import Weigh, uniform
from feddf.types import Engine, Fusion, Inputs, Prototype, Rule, Score, Target


@dataclass(frozen=True)
class Kit:
    """All that a fusion may be made of. What is not stated is as in the paper."""

    prototypes: Mapping[str, Prototype]
    pool: Inputs | None
    engine: Engine
    score: Score | None
    schedule: Schedule
    mode: Mode = "cached"
    rule: Rule = average
    start: Start = "average"
    target: Target = combine
    weigh: Weigh = uniform
    more_teachers: MoreTeachers = nobody_else
    held_out: float = 0.0
    augment: Augment | None = None
    growth: float = 1.25


def _feddf(kit: Kit) -> Fusion:
    if kit.pool is None:
        raise ValueError("feddf needs an unlabeled pool")
    return feddf(
        kit.prototypes,
        kit.pool,
        engine=kit.engine,
        score=kit.score,
        schedule=kit.schedule,
        rule=kit.rule,
        start=kit.start,
        target=kit.target,
        weigh=kit.weigh,
        more_teachers=kit.more_teachers,
        held_out=kit.held_out,
        mode=kit.mode,
        augment=kit.augment,
    )


def _fedma(kit: Kit) -> Fusion:
    return fedma({name: layers_of(prototype) for name, prototype in kit.prototypes.items()}, growth=kit.growth)


FUSIONS: dict[str, Callable[[Kit], Fusion]] = {
    "fedavg": lambda kit: fedavg(kit.rule),
    "feddf": _feddf,
    "fedma": _fedma,
}

__all__ = ["FUSIONS", "Kit", "Schedule", "average", "avg_logits", "combine", "distill", "fedavg", "feddf", "fedma"]
