"""Figure 4: three architectures at once."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured, final_accuracy

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "ImageNet": "imagenet32"}


def check(measured: Measured) -> list[Finding]:
    """FedDF is above FedAvg on every data set that was run."""
    pairs = [(f"{data}, FedDF", f"{data}, FedAvg") for data in DATA]
    return [measured.better(*pair) for pair in pairs if pair[0] in measured.values]


ARTEFACT = Artefact(
    "fig4",
    "Figure 4: ResNet-20, ResNet-32 and ShuffleNetV2 together",
    "FedDF is above FedAvg, which can average models of one architecture only.",
    [
        Cell(title, method, f"{data}-heterogeneous", {"fusion.method": fusion})
        for title, data in DATA.items()
        for method, fusion in (("FedAvg", "fedavg"), ("FedDF", "feddf"))
    ],
    check,
    final_accuracy,
    small_task="photographs",
    reduction="CIFAR-10 only, with ResNet-8, a narrower ResNet-14 and a small CNN, 9 clients",
    reduced={
        "cpu": {
            "prototypes": (
                {"model": "resnet8"},
                {"model": "feddf.models.resnet:ResNet", "name": "resnet14", "depth": 14, "width": 8},
                {"model": "cnn", "width": 32},
            ),
            "clients.number": 9,
            "clients.fraction": 0.67,
        }
    },
    subset={"cpu": lambda cell: cell.row == "CIFAR-10"},
)
