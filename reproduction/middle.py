"""A task in the middle, which can show something on two cores, and two studies on it.

10,000 images of CIFAR-10 at their own 32×32, the whole ResNet-8, ten clients, C = 0.4, E = 10, 10,000 images of
CIFAR-100 as the pool, at most 1,000 distillation steps (patience 300), and a student that always moves. In contrast to
the digits nothing is learned by round five: FedAvg is at 20 to 50 % in ten rounds.
"""

from __future__ import annotations

from statistics import fmean

from feddf.report.read import Run
from reproduction.artifact import (
    FEDAVG,
    FEDDF,
    Artifact,
    Changes,
    crossed,
    final_accuracy,
    gain,
    grid,
    mean_accuracy,
    rounds_to,
    skews,
)
from reproduction.judging import Comparison, above, larger_gap

PRESET = "cifar10-resnet8"
MIDDLE: Changes = {
    "data.train_size": 10_000,
    "clients.total": 10,
    "clients.fraction": 0.4,
    "local.epochs": 10,
    "pool.size": 10_000,
    "distill.steps": 1_000,
    "distill.patience": 300,
    "run.threads": 1,
    "run.compile": True,
}
SMOKE: Changes = {"run.compile": False}
RUN_ON = (
    "10,000 CIFAR-10 images at 32×32, ResNet-8, ten clients, C = 0.4, E = 10, 10,000 images of CIFAR-100, at most "
    "1,000 distillation steps"
)


def ensemble_gap(run: Run) -> float:
    """Return the ensemble's minus the average's test accuracy in points, the mean over all rounds."""
    pairs = zip(run.ensemble(), run.curve(which="averaged"), strict=True)
    return 100 * fmean(ensemble - averaged for ensemble, averaged in pairs)


ALSO = {"last quarter": final_accuracy, "gain": gain, "ensemble minus average": ensemble_gap}

# Why: where FedDF's advantage over FedAvg comes from

STATISTICS: dict[str, Changes] = {
    "averaged": {"fusion.batchnorm": "average"},
    "last client's": {"fusion.batchnorm": "last"},
}
LRS: dict[str, Changes] = {f"lr = {lr:g}": {"local.lr": lr} for lr in (0.1, 0.5)}
METHODS: dict[str, Changes] = {
    "FedAvg": {**FEDAVG, "distill.keep_init": True},  # it distills nothing; its runs are called so
    "FedDF": {**FEDDF, "distill.keep_init": False},
    "FedDF, start kept": {**FEDDF, "distill.keep_init": True},
}


def advantage_of(student: str, lr: str) -> list[Comparison]:
    """Return: with the last client's statistics FedDF is above FedAvg, and by more than with averaged ones."""
    mine, averaged = (
        tuple(f"{method}, {lr}, {statistics}" for method in (student, "FedAvg"))
        for statistics in ("last client's", "averaged")
    )
    claim = f"{student} is further above FedAvg with the last client's statistics than with averaged ones ({lr})"
    return [above(mine[0], mine[1]), larger_gap((mine[0], mine[1]), (averaged[0], averaged[1]), claim)]


def why_as_claimed(name: str) -> float:
    """Return numbers in which only FedAvg depends on the statistics."""
    return 30.0 if name.startswith("FedAvg") and "last" in name else 40.0


WHY = Artifact(
    "why",
    "Why: FedDF and FedAvg by BatchNorm's statistics, local rate and start (α = 1)",
    "FedDF's advantage over FedAvg repairs what the last client's BatchNorm statistics break.",
    grid(PRESET, METHODS, crossed(LRS, STATISTICS)),
    [
        *(above(f"FedAvg, {lr}, averaged", f"FedAvg, {lr}, last client's") for lr in LRS),
        *(one for student in list(METHODS)[1:] for lr in LRS for one in advantage_of(student, lr)),
    ],
    mean_accuracy,
    ALSO,
    unit="test accuracy in %, mean over ten rounds",
    reduction=f"{RUN_ON}, ten rounds",
    reduced={"cpu": {**MIDDLE, "partition.alpha": 1.0, "rounds": 10}, "smoke": SMOKE},
    reducible=False,
    as_claimed=why_as_claimed,
)

# The methods side by side

ADJUSTED: Changes = {"local.logit_adjustment": 1.0}
PLUS: Changes = {
    **ADJUSTED,
    "ensemble.weights": "class-counts",
    "fusion.aggregation": "class-counts",
    "ensemble.combine": "probabilities",
}
GROUP: Changes = {"prototypes": ({"model": "resnet8", "norm": "group"},)}
FIRST: dict[str, Changes] = {
    "FedAvg": FEDAVG,
    "FedDF": FEDDF,
    "feddf-plus": {**FEDDF, **PLUS},
    "FedAvg, adjusted": {**FEDAVG, **ADJUSTED},
    "SCAFFOLD": {**FEDAVG, "fusion.parts": ("scaffold",)},
}
THEN: dict[str, Changes] = {
    "FedProx": {**FEDAVG, "local.prox_mu": 0.01},
    "FedAvgM": {**FEDAVG, "fusion.momentum": 0.2},
    "FedDF, from previous": {**FEDDF, "distill.init": "previous"},
    "FedDF, SGD": {**FEDDF, "distill.optimizer": "sgd", "distill.lr": 0.1},
    "FedDF, SWAG": {**FEDDF, "ensemble.swag_samples": 10, "distill.optimizer": "swa", "distill.lr": 0.1},
    "FedAvg, GroupNorm": {**FEDAVG, **GROUP},
    "FedDF, GroupNorm": {**FEDDF, **GROUP},
}
SKEWED = "α = 0.1"
SIDE_BY_SIDE = Artifact(
    "middle",
    "The methods side by side on the middle task",
    "FedDF is above FedAvg, FedProx, FedAvgM and SCAFFOLD, from the average above from the previous model, with Adam "
    "above with SGD; GroupNorm helps FedAvg.",
    [*grid(PRESET, FIRST, skews(1.0, 0.1)), *grid(PRESET, THEN, skews(0.1))],
    [
        *(above(f"FedDF, α = {a}", f"{other}, α = {a}") for a in ("1", "0.1") for other in ("FedAvg", "SCAFFOLD")),
        *(above(f"FedDF, {SKEWED}", f"{other}, {SKEWED}") for other in ("FedProx", "FedAvgM")),
        *(above(f"FedDF, {SKEWED}", f"FedDF, {other}, {SKEWED}") for other in ("from previous", "SGD")),
        above(f"FedAvg, GroupNorm, {SKEWED}", f"FedAvg, {SKEWED}"),
    ],
    mean_accuracy,
    {**ALSO, "rounds to 30 %": rounds_to(0.3), "rounds to 40 %": rounds_to(0.4)},
    unit="test accuracy in %, mean over twenty rounds",
    reduction=f"{RUN_ON}, twenty rounds",
    reduced={"cpu": {**MIDDLE, "rounds": 20}, "smoke": SMOKE},
    reducible=False,
    as_claimed=lambda name: 45.0 if name.startswith("FedDF, α") else 40.0 if "FedAvg, Group" in name else 35.0,
)

ARTIFACTS = (WHY, SIDE_BY_SIDE)
