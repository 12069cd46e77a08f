"""Table 7: the server's optimizer."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured, final_accuracy

SERVER = {
    "SGD": {"distill.optimizer": "sgd", "distill.rate": 0.1},
    "Adam": {},
    "SWAG": {"teachers.swag_samples": 10, "distill.optimizer": "swa", "distill.rate": 0.1},
}
PAPER = {("SGD", 1.0): "76.68", ("SGD", 0.1): "57.33", ("Adam", 1.0): "80.27", ("Adam", 0.1): "71.52"}
PAPER |= {("SWAG", 1.0): "80.84", ("SWAG", 0.1): "72.40"}


def check(measured: Measured) -> list[Finding]:
    """Adam is above SGD, and SWAG makes little difference."""
    adam, sgd, swag = (f"{optimizer}, α = " for optimizer in ("Adam", "SGD", "SWAG"))
    return [
        *(measured.better(f"{adam}{alpha}", f"{sgd}{alpha}") for alpha in ("1", "0.1")),
        *(measured.within(f"{swag}{alpha}", f"{adam}{alpha}", 2.0) for alpha in ("1", "0.1")),
    ]


ARTEFACT = Artefact(
    "table7",
    "Table 7: the optimizer of the distillation (CIFAR-10, ResNet-8)",
    "Adam is better than SGD; SWAG (FedDistill: ten sampled teachers, and SWA) is within two points of Adam.",
    [
        Cell(optimizer, f"α = {alpha:g}", "cifar10-resnet8", {**SERVER[optimizer], "partition.alpha": alpha}, paper)
        for (optimizer, alpha), paper in PAPER.items()
    ],
    check,
    final_accuracy,
)
