"""Table 6: Adam in local training."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Changes, all_better, final_accuracy

LOCAL: dict[str, Changes] = {
    "SGD": {"local.optimizer": "sgd"},
    "Adam": {"local.optimizer": "adam", "local.rate": 1e-3},
}
PAPER = {
    ("SGD", 1.0): ("80.27", "72.73"),
    ("SGD", 0.1): ("71.52", "62.44"),
    ("Adam", 1.0): ("83.32", "78.13"),
    ("Adam", 0.1): ("72.58", "62.53"),
}


def row(optimizer: str, alpha: float) -> str:
    """Return a row's name."""
    return f"{optimizer}, α = {alpha:g}"


ARTEFACT = Artefact(
    "table6",
    "Table 6: the impact of local training (CIFAR-10, ResNet-8)",
    "FedDF is above FedAvg with SGD and with Adam; Adam helps FedAvg at α = 1.",
    [
        Cell(
            row(*key),
            method,
            "cifar10-resnet8",
            {**LOCAL[key[0]], "partition.alpha": key[1], "fusion.method": fusion},
            paper,
        )
        for key, numbers in PAPER.items()
        for (method, fusion), paper in zip((("FedDF", "feddf"), ("FedAvg", "fedavg")), numbers, strict=True)
    ],
    all_better(
        [
            *((f"{row(*key)}, FedDF", f"{row(*key)}, FedAvg") for key in PAPER),
            ("Adam, α = 1, FedAvg", "SGD, α = 1, FedAvg"),
        ]
    ),
    final_accuracy,
)
