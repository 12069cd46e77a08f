"""How updates become the next server state. Methods are compositions of small functions.

``FUSIONS`` names them for configs: each takes a :class:`Kit` and uses what it needs of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from feddf.fusion.average import average, fedavg
from feddf.fusion.distill import Schedule, distill
from feddf.fusion.ensemble import avg_logits
from feddf.fusion.feddf import Mode, feddf
from feddf.types import Engine, Fusion, Inputs, Prototype, Score


@dataclass(frozen=True)
class Kit:
    """All that a fusion may be made of."""

    prototypes: Mapping[str, Prototype]
    pool: Inputs | None
    engine: Engine
    score: Score | None
    schedule: Schedule
    mode: Mode = "cached"


def _feddf(kit: Kit) -> Fusion:
    if kit.pool is None:
        raise ValueError("feddf needs an unlabeled pool")
    return feddf(kit.prototypes, kit.pool, engine=kit.engine, score=kit.score, schedule=kit.schedule, mode=kit.mode)


FUSIONS: dict[str, Callable[[Kit], Fusion]] = {
    "fedavg": lambda kit: fedavg(),
    "feddf": _feddf,
}

__all__ = ["FUSIONS", "Kit", "Schedule", "average", "avg_logits", "distill", "fedavg", "feddf"]
