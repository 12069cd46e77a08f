"""Table 1: rounds to reach a target accuracy."""

from __future__ import annotations

from feddf.report.read import Run
from feddf.reproduce import scales
from feddf.reproduce.artefact import Artefact, Cell, Changes, Finding, Measured, rounds_to

PAPER = {
    ("FedAvg", 1): ("350 ± 31", "546 ± 191", "246 ± 41", "445 ± 8", "278 ± 83", "361 ± 111"),
    ("FedAvg", 20): ("144 ± 51", "423 ± 105", "97 ± 29", "309 ± 88", "103 ± 26", "379 ± 151"),
    ("FedAvg", 40): ("130 ± 13", "312 ± 87", "104 ± 52", "325 ± 82", "100 ± 76", "312 ± 110"),
    ("FedProx", 20): ("99 ± 61", "346 ± 12", "91 ± 40", "235 ± 41", "92 ± 21", "237 ± 93"),
    ("FedProx", 40): ("115 ± 17", "270 ± 96", "87 ± 49", "229 ± 79", "80 ± 44", "284 ± 130"),
    ("FedAvgM", 20): ("92 ± 15", "299 ± 85", "92 ± 46", "221 ± 29", "97 ± 37", "235 ± 129"),
    ("FedAvgM", 40): ("135 ± 52", "322 ± 99", "78 ± 28", "224 ± 38", "83 ± 34", "232 ± 11"),
    ("FedDF", 20): ("61 ± 24", "102 ± 42", "28 ± 10", "51 ± 4", "22 ± 1", "33 ± 18"),
    ("FedDF", 40): ("28 ± 6", "80 ± 25", "20 ± 4", "39 ± 10", "14 ± 2", "20 ± 4"),
}
METHODS: dict[str, Changes] = {
    "FedAvg": {"fusion.method": "fedavg"},
    "FedProx": {"fusion.method": "fedavg", "local.proximal": 0.01},
    "FedAvgM": {"fusion.method": "fedavg", "fusion.momentum": 0.2},
    "FedDF": {"fusion.method": "feddf"},
}
COLUMNS = [(fraction, alpha) for fraction in (0.2, 0.4, 0.8) for alpha in (1.0, 0.1)]
RATES = scales.RATES["batch"]
"""The local rate by α. The paper tunes it for FedAvg and does not say what came out: these are the best ones on digits.

At α = 1, three rounds of FedAvg at the paper's scale (E = 20, C = 0.4, seed 0) have 56.7 % of the validation images
with 0.5 and 49.5 % with 0.1, the paper's rate everywhere else.
"""
TARGETS = {"cifar10": {1.0: 0.80, 0.1: 0.75}, "mnist-5k": {1.0: 0.85, 0.1: 0.60}}


def measure(run: Run) -> float:
    """Return the rounds to the target of this task and skew."""
    return rounds_to(TARGETS[run.value("data.name")][run.value("partition.alpha")])(run)


def name(method: str, epochs: int, fraction: float, alpha: float) -> str:
    """Return a cell's name."""
    return f"{method}, E = {epochs}, C = {fraction:g}, α = {alpha:g}"


def check(measured: Measured) -> list[Finding]:
    """FedDF needs fewer rounds than every other method, wherever both were run."""
    found = []
    for method, epochs in PAPER:
        for fraction, alpha in COLUMNS:
            ours, other = name("FedDF", epochs, fraction, alpha), name(method, epochs, fraction, alpha)
            if method != "FedDF" and ours in measured.values and other in measured.values:
                found.append(measured.better(ours, other))
    return found


ARTEFACT = Artefact(
    "table1",
    "Table 1: communication rounds to reach a target accuracy (CIFAR-10, ResNet-8)",
    "In all scenarios FedDF needs significantly fewer rounds than FedAvg, FedProx and FedAvgM.",
    [
        Cell(
            f"{method}, E = {epochs}",
            f"C = {fraction:g}, α = {alpha:g}",
            "cifar10-resnet8",
            {
                **METHODS[method],
                "local.epochs": epochs,
                "local.rate": RATES[alpha],
                "clients.fraction": fraction,
                "partition.alpha": alpha,
                "rounds": 600 if method != "FedDF" else 150,
            },
            paper,
        )
        for (method, epochs), row in PAPER.items()
        for (fraction, alpha), paper in zip(COLUMNS, row, strict=True)
    ],
    check,
    measure,
    unit="rounds to 80 % (α = 1) or 75 % (α = 0.1) test accuracy; to 85 and 60 % on digits",
    reduction="C = 0.4 and E = 20 only",
    subset={"cpu": lambda cell: "C = 0.4" in cell.column and "E = 20" in cell.row},
    higher_is_better=False,
)
