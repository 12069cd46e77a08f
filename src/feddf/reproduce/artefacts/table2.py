"""Table 2: BatchNorm and GroupNorm."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Changes, all_better, final_accuracy

PAPER = {
    ("cifar10", 1.0): ("76.01 ± 1.53", "78.57 ± 0.22", "76.32 ± 1.98", "77.79 ± 1.22", "80.69 ± 0.43"),
    ("cifar10", 0.1): ("62.22 ± 3.88", "68.37 ± 0.50", "68.65 ± 0.77", "68.63 ± 0.79", "71.36 ± 1.07"),
    ("cifar100", 1.0): ("35.56 ± 1.99", "42.54 ± 0.51", "42.94 ± 1.23", "42.83 ± 0.36", "47.43 ± 0.45"),
    ("cifar100", 0.1): ("29.14 ± 1.91", "36.72 ± 1.50", "35.74 ± 1.00", "36.29 ± 1.98", "39.33 ± 0.03"),
}
COLUMNS: dict[str, tuple[str, Changes]] = {
    "FedAvg, BN": ("resnet8", {"fusion.method": "fedavg"}),
    "FedAvg, GN": ("groupnorm", {"fusion.method": "fedavg"}),
    "FedProx, GN": ("groupnorm", {"fusion.method": "fedavg", "local.proximal": 0.01}),
    "FedAvgM, GN": ("groupnorm", {"fusion.method": "fedavg", "fusion.momentum": 0.2}),
    "FedDF, BN": ("resnet8", {"fusion.method": "feddf"}),
}


def row(data: str, alpha: float) -> str:
    """Return a row's name."""
    return f"{data}, α = {alpha:g}"


ARTEFACT = Artefact(
    "table2",
    "Table 2: the impact of normalisation (ResNet-8)",
    "FedDF with BatchNorm is above FedAvg with BatchNorm, and above FedAvg, FedProx and FedAvgM with GroupNorm.",
    [
        Cell(row(*key), column, f"{key[0]}-{norm}", {**changes, "partition.alpha": key[1]}, paper)
        for key, numbers in PAPER.items()
        for (column, (norm, changes)), paper in zip(COLUMNS.items(), numbers, strict=True)
    ],
    all_better(
        [
            (f"{row(*key)}, FedDF, BN", f"{row(*key)}, {other}")
            for key in PAPER
            for other in COLUMNS
            if "FedDF" not in other
        ]
    ),
    final_accuracy,
    reduction="the rows of CIFAR-10 only; two groups in GroupNorm",
    subset={"cpu": lambda cell: cell.row.startswith("cifar10,")},
)
