"""Table 8: FedDF with the proximal penalty."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, all_better, final_accuracy

PAPER = {
    ("SGD", 1.0): ("80.27", "72.73"),
    ("SGD", 0.1): ("71.52", "62.44"),
    ("SGD + proximal penalty", 1.0): ("80.56", "76.11"),
    ("SGD + proximal penalty", 0.1): ("71.64", "62.53"),
}
PROXIMAL = {"SGD": 0.0, "SGD + proximal penalty": 0.01}


def row(scheme: str, alpha: float) -> str:
    """Return a row's name."""
    return f"{scheme}, α = {alpha:g}"


ARTEFACT = Artefact(
    "table8",
    "Table 8: FedDF with a proximal penalty in local training (CIFAR-10, ResNet-8)",
    "FedDF is above FedAvg with and without the proximal penalty.",
    [
        Cell(
            row(*key),
            method,
            "cifar10-resnet8",
            {"local.proximal": PROXIMAL[key[0]], "partition.alpha": key[1], "fusion.method": fusion},
            paper,
        )
        for key, numbers in PAPER.items()
        for (method, fusion), paper in zip((("FedDF", "feddf"), ("FedAvg", "fedavg")), numbers, strict=True)
    ],
    all_better([(f"{row(*key)}, FedDF", f"{row(*key)}, FedAvg") for key in PAPER]),
    final_accuracy,
)
