"""Figures 15 to 17: learning curves before and after fusion."""

from __future__ import annotations

from statistics import fmean

from feddf.report.read import Run
from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured


def measure(run: Run) -> float:
    """Return what distillation adds to the average: fused minus averaged, the mean over all rounds, in points."""
    pairs = zip(run.curve(which="fused"), run.curve(which="averaged"), strict=True)
    return 100 * fmean(after - before for after, before in pairs)


def check(measured: Measured) -> list[Finding]:
    """Distillation adds to the average at every skew."""
    return [
        Finding(
            f"distillation adds accuracy, {cell}",
            measured.mean(cell),
            0.0,
            measured.spread(cell),
            measured.mean(cell) > 0,
        )
        for cell in measured.values
    ]


ARTEFACT = Artefact(
    "fig15",
    "Figures 15 to 17: FedDF before and after the distillation (CIFAR-10, ResNet-8)",
    "The fused model is above the averaged one that it started from.",
    [
        Cell("FedDF", f"α = {alpha:g}", "cifar10-resnet8", {"partition.alpha": alpha})
        for alpha in (100.0, 1.0, 0.1, 0.01)
    ],
    check,
    measure,
    unit="fused minus averaged test accuracy in points, mean over all rounds",
    reduction="α = 1 and 0.1",
    subset={"cpu": lambda cell: cell.column in ("α = 1", "α = 0.1")},
)
