"""Theorem 5.1: the bound's terms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from feddf.experiments.theorem import estimate
from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured, Scale, final_accuracy
from feddf.reproduce.scales import experiment_of
from feddf.runs.build import build

CELLS = [
    Cell("discrepancy", f"α = {alpha:g}", "cifar10-resnet8", {"partition.alpha": alpha, "fusion.method": "fedavg"})
    for alpha in (100.0, 1.0, 0.1)
]


def compute(scale: Scale, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Return the mean discrepancy between a client's data and everybody's, for each α and seed."""
    return {
        cell.name: [
            estimate(build(experiment_of(ARTEFACT, cell, scale, seed)), most=500).terms()["discrepancy"]
            for seed in seeds
        ]
        for cell in CELLS
    }


def check(measured: Measured) -> list[Finding]:
    """The discrepancy grows as α falls."""
    names = [cell.name for cell in CELLS]
    return [measured.better(after, before) for before, after in pairwise(names)]


ARTEFACT = Artefact(
    "bound",
    "Theorem 5.1: the discrepancy between local data and all data",
    "The ensemble's risk is bounded by terms that grow with the discrepancy, which grows as α falls.",
    CELLS,
    check,
    final_accuracy,
    unit="half the proxy A-distance, averaged over the clients",
    reduction="three local epochs; the complexity term is vacuous and not looked at",
    reduced={"cpu": {"local.epochs": 3}},
    compute=compute,
)
