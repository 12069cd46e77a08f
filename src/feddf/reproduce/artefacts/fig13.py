"""Figure 13: learning curves with BatchNorm and GroupNorm."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, all_better, final_accuracy
from feddf.reproduce.artefacts import table2

ROW = table2.row("cifar10", 1.0)

ARTEFACT = Artefact(
    "fig13",
    "Figure 13: learning curves with BatchNorm and GroupNorm (CIFAR-10, ResNet-8, α = 1)",
    "FedDF with BatchNorm is above FedAvg with either normalisation.",
    [cell for cell in table2.ARTEFACT.cells if cell.row == ROW],
    all_better([(f"{ROW}, FedDF, BN", f"{ROW}, FedAvg, {norm}") for norm in ("BN", "GN")]),
    final_accuracy,
    reduction="as Table 2",
)
