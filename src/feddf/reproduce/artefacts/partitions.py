"""Figures 9 to 11: partitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from feddf.config import with_values
from feddf.data.partition import class_counts, skew
from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured, Scale, final_accuracy
from feddf.reproduce.scales import experiment_of
from feddf.runs.build import build_task

ALPHAS = (100.0, 1.0, 0.1, 0.01)
CELLS = [
    Cell("top-class share", f"α = {alpha:g}", "cifar10-resnet8", {"partition.alpha": alpha, "fusion.method": "fedavg"})
    for alpha in ALPHAS
]


def compute(scale: Scale, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Return the mean share of a client's largest class in %, for each α and seed."""
    found: dict[str, list[float]] = {}
    for cell in CELLS:
        for seed in seeds:
            task = build_task(with_values(experiment_of(ARTEFACT, cell, scale, seed), {"pool.sources": ()}))
            counts = class_counts(task.train.labels, task.shards, task.train.n_classes)
            found.setdefault(cell.name, []).append(100 * skew(counts).top_class_share)
    return found


def check(measured: Measured) -> list[Finding]:
    """The smaller α, the more of a client's examples are of one class; α = 100 is nearly even."""
    names = [cell.name for cell in CELLS]
    even = measured.mean(names[0])
    return [
        Finding("at α = 100 a client's largest class has at most twice its even share", even, 20.0, 0.0, even <= 20),
        *(measured.better(after, before) for before, after in pairwise(names)),
    ]


ARTEFACT = Artefact(
    "partitions",
    "Figures 9 to 11: who holds what, by α",
    "α = 100 mimics identical local data, and the smaller α is, the more clients hold examples of one class only.",
    CELLS,
    check,
    final_accuracy,
    unit="mean share of a client's largest class, in %",
    compute=compute,
)
