"""Figure 2: skew × local epochs × data fraction."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured, final_accuracy

ALPHAS, EPOCHS, FRACTIONS = (100.0, 1.0, 0.01), (1, 20, 40, 80), (1.0, 0.5)
METHODS = {"FedAvg": "fedavg", "FedDF": "feddf"}


def cells(alphas: tuple[float, ...], epochs: tuple[int, ...], fractions: tuple[float, ...]) -> list[Cell]:
    """Return a cell for each combination and method."""
    return [
        Cell(
            f"{method}, E = {e}",
            f"α = {alpha:g}, {100 * fraction:g} % of the data",
            "cifar10-resnet8",
            {"fusion.method": name, "partition.alpha": alpha, "local.epochs": e, "data.train_fraction": fraction},
        )
        for method, name in METHODS.items()
        for alpha in alphas
        for e in epochs
        for fraction in fractions
    ]


def check(measured: Measured) -> list[Finding]:
    """FedDF is above FedAvg from 40 epochs on, and gains more than FedAvg from more epochs."""
    found = []
    for column in ("α = 1, 100 % of the data", "α = 0.01, 100 % of the data"):
        for epochs in (40, 80):
            found.append(measured.better(f"FedDF, E = {epochs}, {column}", f"FedAvg, E = {epochs}, {column}"))
        pairs = [(f"{method}, E = 80, {column}", f"{method}, E = 1, {column}") for method in ("FedDF", "FedAvg")]
        claim = f"FedDF gains more than FedAvg from 1 to 80 epochs ({column})"
        found.append(measured.larger_gap(pairs[0], pairs[1], claim))
    return found


ARTEFACT = Artefact(
    "fig2",
    "Figure 2: FedAvg and FedDF by skew, local epochs and data fraction (CIFAR-10, ResNet-8)",
    "FedDF is above FedAvg when local training is sufficient (40 epochs and more), and gains from more local epochs, "
    "where FedAvg saturates.",
    cells(ALPHAS, EPOCHS, FRACTIONS),
    check,
    final_accuracy,
    reduction="α = 1 and 0.01 with all the data",
    subset={"cpu": lambda cell: "100 %" in cell.column and "α = 100" not in cell.column},
)
