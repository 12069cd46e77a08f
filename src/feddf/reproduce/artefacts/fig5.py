"""Figure 5: distillation sources."""

from __future__ import annotations

from dataclasses import replace

from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured, final_accuracy

SOURCES = {
    "CIFAR-100": {},
    "Tiny-ImageNet": {"pool.sources": ("tiny-imagenet",)},
    "ImageNet32": {"pool.sources": ("imagenet32",)},
    "STL-10": {"pool.sources": ("stl10",)},
    "validation images": {"pool.sources": ("validation",)},
    "noise": {"pool.sources": ("noise",)},
}
HERE = ("CIFAR-100", "Tiny-ImageNet", "validation images", "noise")


POINTS = 3.0
"""By how much natural sources may differ, and by more than how much noise must be worse than each of them."""


def check(measured: Measured) -> list[Finding]:
    """Natural images do as well as one another, and noise is clearly worse."""
    natural = [name for name in HERE if name != "noise"]
    return [
        *(measured.within(f"{name}, FedDF", "CIFAR-100, FedDF", POINTS) for name in natural[1:]),
        *(_far_above(measured, f"{name}, FedDF", "noise, FedDF") for name in natural),
    ]


def _far_above(measured: Measured, left: str, right: str) -> Finding:
    found = measured.better(left, right)
    claim = f"{left} is more than {POINTS:g} above {right}"
    return replace(found, claim=claim, holds=found.left - found.right > POINTS)


ARTEFACT = Artefact(
    "fig5",
    "Figure 5: distillation data sets (CIFAR-10, ResNet-8)",
    "FedDF is consistent over natural sources (within three points of CIFAR-100), and noise is worse by more.",
    [Cell(name, "FedDF", "cifar10-resnet8", {**changes, "partition.alpha": 1.0}) for name, changes in SOURCES.items()],
    check,
    final_accuracy,
    small_task="photographs",
    reduction="CIFAR-100, Tiny-ImageNet, the validation images and noise; no generator",
    subset={"cpu": lambda cell: cell.row in HERE, "smoke": lambda cell: cell.row in HERE},
)
