"""Figure 14: the complete form of Figure 2."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Finding, Measured, final_accuracy
from feddf.reproduce.artefacts.fig2 import cells

FRACTION = "50 % of the data"


def check(measured: Measured) -> list[Finding]:
    """With half of the data, too, FedDF is above FedAvg."""
    columns = [f"α = {alpha:g}, {FRACTION}" for alpha in (1.0, 0.01)]
    return [measured.better(f"FedDF, E = 40, {column}", f"FedAvg, E = 40, {column}") for column in columns]


ARTEFACT = Artefact(
    "fig14",
    "Figure 14: FedAvg and FedDF by skew, local epochs and data fraction, complete (CIFAR-10, ResNet-8)",
    "FedDF is above FedAvg with half of the local data as well.",
    cells((100.0, 1.0, 0.01), (1, 20, 40, 80, 160), (1.0, 0.75, 0.5, 0.25)),
    check,
    final_accuracy,
    reduction="half of the data, E = 40, α = 1 and 0.01",
    subset={"cpu": lambda cell: FRACTION in cell.column and "E = 40" in cell.row and "α = 100" not in cell.column},
)
