"""Table 4: clients with binarised weights."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Changes, all_better, final_accuracy

GROUPNORM: Changes = {"prototypes": ({"model": "resnet8", "norm": "group"},)}
COLUMNS: dict[str, Changes] = {
    "FedAvg, BN": {"fusion.method": "fedavg"},
    "FedAvg, GN": {"fusion.method": "fedavg", **GROUPNORM},
    "FedDF, BN": {"fusion.method": "feddf"},
}
PAPER = {
    20: ("44.38 ± 1.21", "59.70 ± 1.65", "59.49 ± 0.98"),
    40: ("43.91 ± 3.26", "64.25 ± 1.31", "65.49 ± 0.74"),
    80: ("47.62 ± 1.84", "65.99 ± 1.29", "70.27 ± 1.22"),
}

ARTEFACT = Artefact(
    "table4",
    "Table 4: federated learning with 1-bit ResNet-8 on CIFAR-10",
    "FedDF with BatchNorm is above FedAvg with BatchNorm, and on par with or above FedAvg with GroupNorm.",
    [
        Cell(f"E = {epochs}", column, "cifar10-binary", {**changes, "local.epochs": epochs}, paper)
        for epochs, numbers in PAPER.items()
        for (column, changes), paper in zip(COLUMNS.items(), numbers, strict=True)
    ],
    all_better(
        [(f"E = {epochs}, FedDF, BN", f"E = {epochs}, FedAvg, {norm}") for epochs in (20, 40) for norm in ("BN", "GN")]
    ),
    final_accuracy,
    reduction="E = 20 and 40 only",
    subset={"cpu": lambda cell: cell.row != "E = 80"},
)
