"""One column of Table 1 at the paper's own scale, for the rounds in which both methods reached the target here."""

from __future__ import annotations

from math import nan

from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured
from feddf.reproduce.artefacts import table1

ROUNDS = {"FedAvg": 18, "FedDF": 15}
COLUMN = table1.COLUMNS.index((0.4, 1.0))
AT_MOST, AT_LEAST = 28 + 10, 97 - 29  # the paper's numbers of rounds, by one standard deviation
SETTING = "E = 20, C = 0.4, α = 1"


def check(measured: Measured) -> list[Finding]:
    """Both take about as many rounds as in the paper (not judged where the target was not reached), FedDF fewer."""
    fedavg, feddf = (f"{method}, {SETTING}" for method in ROUNDS)
    slow, fast = (_reached(measured.mean(f"{method}, {SETTING}"), most) for method, most in ROUNDS.items())
    return [
        Finding(f"{feddf} takes at most {AT_MOST} rounds", fast, AT_MOST, 0.0, fast <= AT_MOST),
        Finding(f"{fedavg} takes at least {AT_LEAST} rounds", slow, AT_LEAST, 0.0, slow >= AT_LEAST),
        measured.better(feddf, fedavg),
    ]


def _reached(taken: float, most: int) -> float:
    return taken if taken <= most else nan


ARTEFACT = Artefact(
    "table1-start",
    f"Table 1, one column of it (CIFAR-10, ResNet-8, {SETTING})",
    "FedDF reaches 80 % in 28 ± 10 rounds, significantly fewer than FedAvg, which takes 97 ± 29.",
    [
        Cell(
            method,
            SETTING,
            "cifar10-resnet8",
            {
                "fusion.method": method.lower(),
                "local.epochs": 20,
                "local.rate": table1.RATES[1.0],
                "partition.alpha": 1.0,
                "rounds": rounds,
                "run.compile": True,
            },
            table1.PAPER[method, 20][COLUMN],
        )
        for method, rounds in ROUNDS.items()
    ],
    check,
    table1.measure,
    unit=f"rounds to 80 % test accuracy; {ROUNDS['FedAvg'] + 1} where FedAvg did not reach it in {ROUNDS['FedAvg']}",
    reduced={"smoke": {"run.compile": False}},
    subset={"cpu": lambda cell: False, "smoke": lambda cell: True},
    higher_is_better=False,
)
