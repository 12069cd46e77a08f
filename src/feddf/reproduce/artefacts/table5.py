"""Table 5: where a student starts."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, all_better, final_accuracy

PAPER = {
    (40, 1.0): ("80.43 ± 0.37", "74.13 ± 0.91"),
    (40, 0.1): ("71.84 ± 0.86", "62.94 ± 1.12"),
    (80, 1.0): ("81.17 ± 0.53", "76.37 ± 0.60"),
    (80, 0.1): ("74.73 ± 0.65", "67.88 ± 0.90"),
}


def row(epochs: int, alpha: float) -> str:
    """Return a row's name."""
    return f"E = {epochs}, α = {alpha:g}"


ARTEFACT = Artefact(
    "table5",
    "Table 5: the importance of the student's initialisation (CIFAR-10, ResNet-8)",
    "Starting from the average is clearly better than starting from the previous round's fused model.",
    [
        Cell(
            row(*key),
            f"from {start}",
            "cifar10-resnet8",
            {"local.epochs": key[0], "partition.alpha": key[1], "distill.start": start},
            paper,
        )
        for key, numbers in PAPER.items()
        for start, paper in zip(("average", "previous"), numbers, strict=True)
    ],
    all_better([(f"{row(40, alpha)}, from average", f"{row(40, alpha)}, from previous") for alpha in (1.0, 0.1)]),
    final_accuracy,
    reduction="E = 40 only",
    subset={"cpu": lambda cell: "E = 40" in cell.row},
)
