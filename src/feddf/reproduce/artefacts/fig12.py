"""Figure 12: decay of the local rate in FedAvg."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured, final_accuracy

ALPHAS = (100.0, 1.0, 0.01)


def check(measured: Measured) -> list[Finding]:
    """A falling rate brings nothing: the constant one is at least as good, within two points."""
    columns = [f"α = {alpha:g}" for alpha in ALPHAS if f"constant, α = {alpha:g}" in measured.values]
    found = []
    for column in columns:
        constant, linear = f"constant, {column}", f"linear, {column}"
        a, b = measured.mean(constant), measured.mean(linear)
        claim = f"decay gains no more than two points ({column})"
        found.append(Finding(claim, a, b, measured.spread(constant, linear), a > b - 2.0))
    return found


ARTEFACT = Artefact(
    "fig12",
    "Figure 12: FedAvg with and without decay of the local learning rate (CIFAR-10, ResNet-8)",
    "Decaying the rate during local training has no benefit.",
    [
        Cell(
            name,
            f"α = {alpha:g}",
            "cifar10-resnet8",
            {"fusion.method": "fedavg", "local.decay": decay, "partition.alpha": alpha},
        )
        for name, decay in (("constant", "none"), ("linear", "linear"))
        for alpha in ALPHAS
    ],
    check,
    final_accuracy,
    reduction="α = 1 and 0.01",
    subset={"cpu": lambda cell: cell.column != "α = 100"},
)
