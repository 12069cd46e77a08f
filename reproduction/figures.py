"""The paper's figures and its theorem: what is run or computed for each of them, and its claims as comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from reproduction.artifact import (
    BOTH,
    FEDAVG,
    Artifact,
    Axis,
    Cell,
    Changes,
    Scale,
    all_above,
    crossed,
    gain,
    grid,
    mean_accuracy,
    skews,
)
from reproduction.judging import Comparison, Values, above, larger_gap, not_below, within
from reproduction.scales import MOVING, experiment_of
from reproduction.tables import TABLE2, epochs

CIFAR10 = "cifar10-resnet8"


def feddf_above(name: str) -> float:
    """Return numbers in which FedDF is above everything else."""
    return 80.0 if "FedDF" in name else 75.0


# Figures 1 and 8: the toy


GAP = "ensemble minus fused"
CLOSE = 10.0
"""What counts as close to the ensemble, in points; the paper has no number."""

FIG1 = Artifact(
    "fig1",
    "Figure 1: the limitation of FedAvg on a toy example",
    "Averaging blurs the decision boundaries, and FedDF comes close to the ensemble.",
    [Cell("toy", "gain", "toy", {})],
    [
        Comparison("the fused model is above the averaged one", {"toy, gain": 1}, low=0),
        Comparison(f"the fused model is within {CLOSE:g} points of the ensemble", {f"toy, gain: {GAP}": 1}, high=CLOSE),
    ],
    lambda run: 100 * (run.curve()[-1] - run.curve(which="averaged")[-1]),
    {GAP: lambda run: 100 * (run.ensemble()[-1] - run.curve()[-1])},
    unit="fused minus averaged accuracy in points",
    differs="the data are three spiral arms; the paper's points are unknown",
    reduction="a toy of three spiral arms, two clients, MLPs of width 12, one round of 1,000 epochs",
    as_claimed=lambda name: 2.0 if GAP in name else 15.0,
    reducible=False,
    reduced={
        "smoke": {
            "data.name": "toy",
            "data.train_size": None,
            "data.test_size": None,
            "data.image_size": None,
            "clients.total": 2,
            "clients.fraction": 1.0,
            "pool.sources": ("plane",),
            "prototypes": ({"model": "mlp", "width": 4},),
        },
    },
)
FIG8 = replace(
    FIG1,
    name="fig8",
    title="Figure 8: the toy example in detail",
    claim="FedDF comes close to the ensemble from 60 unlabeled points.",
    comparisons=FIG1.comparisons[1:],
)

# Figures 2 and 14: skew × local epochs × data fraction

HALF = "50 % of the data"


def fractions(*shares: float) -> Axis:
    """Return an axis of shares of the clients' data."""
    return {f"{100 * share:g} % of the data": {"data.train_fraction": share} for share in shares}


def sufficient_training(column: str) -> list[Comparison]:
    """Return: FedDF is above FedAvg from 40 epochs on, and gains more from more epochs."""
    feddf, fedavg = ((f"{method}, E = 80, {column}", f"{method}, E = 1, {column}") for method in ("FedDF", "FedAvg"))
    return [
        *all_above((f"FedDF, E = {e}, {column}", f"FedAvg, E = {e}, {column}") for e in (40, 80)),
        larger_gap(feddf, fedavg, f"FedDF gains more than FedAvg from 1 to 80 epochs ({column})"),
    ]


def by_epochs(name: str) -> float:
    """Return numbers as in Figures 2 and 14: FedDF rises with the local epochs, FedAvg saturates."""
    cell = name.split(", ")
    number = float(cell[1].removeprefix("E = "))
    return 50 + number / 4 if cell[0] == "FedDF" else 52 + min(number, 20) / 10


SHARES_OF_DATA = fractions(1.0, 0.5)
FIG2 = Artifact(
    "fig2",
    "Figure 2: FedAvg and FedDF by skew, local epochs and data fraction (CIFAR-10, ResNet-8)",
    "FedDF is above FedAvg when local training is sufficient (40 epochs and more), and gains from more local epochs, "
    "where FedAvg saturates.",
    grid(CIFAR10, crossed(BOTH, epochs(1, 20, 40, 80)), crossed(skews(100.0, 1.0, 0.01), SHARES_OF_DATA)),
    [one for column in crossed(skews(100.0, 1.0, 0.01), SHARES_OF_DATA) for one in sufficient_training(column)],
    reduction="α = 1 and 0.01 with all the data",
    as_claimed=by_epochs,
    subset={"cpu": lambda cell: "100 %" in cell.column and "α = 100" not in cell.column},
)
FIG14 = Artifact(
    "fig14",
    "Figure 14: FedAvg and FedDF by skew, local epochs and data fraction, complete (CIFAR-10, ResNet-8)",
    "FedDF is above FedAvg with half of the local data as well.",
    grid(
        CIFAR10,
        crossed(BOTH, epochs(1, 20, 40, 80, 160)),
        crossed(skews(100.0, 1.0, 0.01), fractions(1.0, 0.75, 0.5, 0.25)),
    ),
    all_above(
        (f"FedDF, E = 40, {skew}, {HALF}", f"FedAvg, E = 40, {skew}, {HALF}") for skew in skews(100.0, 1.0, 0.01)
    ),
    as_claimed=by_epochs,
    reduction="half of the data, E = 40, α = 1 and 0.01",
    subset={"cpu": lambda cell: HALF in cell.column and "E = 40" in cell.row and "α = 100" not in cell.column},
)

# Figure 3: fine-tuning of a transformer on texts

TEXTS = {"AG News": "ag-news", "SST-2": "sst2"}
FIG3 = Artifact(
    "fig3",
    "Figure 3: fine-tuning DistilBERT on AG News and SST-2",
    "FedDF converges faster than FedAvg and stays above it.",
    [cell for data, preset in TEXTS.items() for cell in grid(preset, {data: {}}, BOTH)],
    [
        comparison
        for data in TEXTS
        for comparison in all_above(
            [(f"{data}, FedDF", f"{data}, FedAvg"), (f"{data}, FedDF: all rounds", f"{data}, FedAvg: all rounds")]
        )
    ],
    also={"all rounds": mean_accuracy},
    as_claimed=feddf_above,
    small_task="texts",
    reduction="the model in the folder FEDDF_TEXT_MODEL (here MiniLM-L6)",
)

# Figure 4: three architectures at once

PHOTOGRAPHS = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "ImageNet": "imagenet32"}


FIG4 = Artifact(
    "fig4",
    "Figure 4: ResNet-20, ResNet-32 and ShuffleNetV2 together",
    "FedDF is above FedAvg, which can average models of one architecture only.",
    [cell for data, name in PHOTOGRAPHS.items() for cell in grid(f"{name}-heterogeneous", {data: {}}, BOTH)],
    all_above((f"{data}, FedDF", f"{data}, FedAvg") for data in PHOTOGRAPHS),
    small_task="photographs",
    as_claimed=feddf_above,
    reduction="CIFAR-10 only, nine clients instead of ten, with ResNet-8, a narrower ResNet-14 and a small CNN",
    reduced={
        "cpu": {
            "prototypes": (
                {"model": "resnet8"},
                {"model": "feddf.models.resnet:ResNet", "name": "resnet14", "depth": 14, "width": 8},
                {"model": "cnn", "width": 32},
            ),
            "clients.total": 9,
            "clients.fraction": 0.67,
        }
    },
    subset={"cpu": lambda cell: cell.row == "CIFAR-10"},
)

# Figure 5: distillation sources

SOURCES: Axis = {
    "CIFAR-100": {},
    "Tiny-ImageNet": {"pool.sources": ("tiny-imagenet",)},
    "ImageNet32": {"pool.sources": ("imagenet32",)},
    "STL-10": {"pool.sources": ("stl10",)},
    "validation images": {"pool.sources": ("validation",)},
    "noise": {"pool.sources": ("noise",)},
}
NATURAL = ("CIFAR-100", "Tiny-ImageNet", "ImageNet32", "STL-10", "validation images")
POINTS = 3.0
"""By how much natural sources may differ, and by more than how much noise must be worse than each of them."""


FIG5 = Artifact(
    "fig5",
    "Figure 5: distillation data sets (CIFAR-10, ResNet-8)",
    "FedDF is consistent over natural sources (within three points of CIFAR-100), and noise is worse by more.",
    grid(CIFAR10, SOURCES, {"FedDF": {"partition.alpha": 1.0}}),
    [
        *(within(f"{name}, FedDF", "CIFAR-100, FedDF", POINTS) for name in NATURAL[1:]),
        *(above(f"{name}, FedDF", "noise, FedDF", POINTS) for name in NATURAL),
    ],
    small_task="photographs",
    differs="CIFAR-10 with E = 40 only; no generator",
    reduction="CIFAR-100, Tiny-ImageNet, the validation images and noise; no generator",
    subset=dict.fromkeys(("cpu", "smoke"), lambda cell: cell.row not in ("ImageNet32", "STL-10")),
    as_claimed=lambda name: 50.0 if name.startswith("noise") else 78.0 + len(name) / 20,
)

# Figure 6: classes, size and steps of the distillation

CLASSES = {"tiny-imagenet": (10, 50, 200), "digits": (2, 5, 10)}
SHARES, STEPS = (0.05, 0.2, 1.0), (25, 100, 400)


def three_panels(source: str) -> list[Cell]:
    """Return the three panels with this source as the pool, one number changed at a time."""
    whole: Changes = {"pool.sources": (source,)}
    columns: dict[str, Changes] = {
        **{f"{n} classes": {"pool.sources": ({"name": source, "classes": n},)} for n in CLASSES[source]},
        **{f"{share:.0%} of the pool": {"pool.sources": ({"name": source, "fraction": share},)} for share in SHARES},
        f"{CLASSES[source][-1]} classes": whole,  # one run in two panels
        "100% of the pool": whole,
        **{f"{steps} steps": {**whole, "distill.steps": steps} for steps in STEPS},
    }
    return grid("cifar100-resnet8", {source: {}}, columns)


def panels_of(source: str) -> list[Comparison]:
    """Return: the number of classes and the size matter little; few steps are too few, and some hundred are enough."""
    *fewer, every = (f"{source}, {n} classes" for n in CLASSES[source])
    *less, whole = (f"{source}, {share:.0%} of the pool" for share in SHARES)
    few, some, many = (f"{source}, {steps} steps" for steps in STEPS)
    return [
        *(within(one, every, 3.0) for one in fewer),
        *(within(one, whole, 3.0) for one in less),
        above(some, few),
        within(some, many, 3.0),
    ]


FIG6 = Artifact(
    "fig6",
    "Figure 6: classes, size and steps of the distillation (CIFAR-100, ResNet-8)",
    "The number of classes matters little, a small share of the pool and a moderate number of steps suffice.",
    [cell for source in CLASSES for cell in three_panels(source)],
    [one for source in CLASSES for one in panels_of(source)],
    mean_accuracy,  # what a pool is worth shows while there is something to learn
    unit="test accuracy in %, mean over all rounds",
    differs="Tiny-ImageNet in place of ImageNet, and classes that CIFAR-100 has are not avoided",
    as_claimed=lambda name: 20.0 if name.endswith(f" {STEPS[0]} steps") else 40.0 + len(name) / 20,
    reduction="2, 5 and all 10 classes of the pool's digits; all of the pool is 1,438 digits",
    subset={"paper": lambda cell: cell.row == "tiny-imagenet", "cpu": lambda cell: cell.row == "digits"},
)

# Figures 9 to 11: partitions, and Theorem 5.1: both are computed, not run

PARTITION_CELLS = grid(CIFAR10, {"top-class share": FEDAVG}, skews(100.0, 1.0, 0.1, 0.01))
BOUND_CELLS = grid(CIFAR10, {"discrepancy": FEDAVG}, skews(100.0, 1.0, 0.1))


def top_class_shares(scale: Scale, seeds: Sequence[int]) -> Values:
    """Return the mean share of a client's largest class in %, for each α and seed."""
    from feddf.config import with_values
    from feddf.data.partition import class_counts, skew
    from feddf.runs.build import build_task

    found: dict[str, dict[int, float]] = {}
    for cell in PARTITION_CELLS:
        for seed in seeds:
            task = build_task(with_values(experiment_of(PARTITIONS, cell, scale, seed), {"pool.sources": ()}))
            counts = class_counts(task.train.labels, task.shards, task.train.n_classes)
            found.setdefault(cell.name, {})[seed] = 100 * skew(counts).top_class_share
    return found


def discrepancies(scale: Scale, seeds: Sequence[int]) -> Values:
    """Return the mean discrepancy between a client's data and all data, for each α and seed."""
    from feddf.runs.build import build
    from reproduction.theorem import estimate

    return {
        cell.name: {
            seed: estimate(build(experiment_of(BOUND, cell, scale, seed)), most=500).terms()["discrepancy"]
            for seed in seeds
        }
        for cell in BOUND_CELLS
    }


EVEN = Comparison(
    "at α = 100 a client's largest class has at most twice its even share",
    {PARTITION_CELLS[0].name: 1},
    high=20.0,
    or_equal=True,
)


def growing(cells: Sequence[Cell]) -> list[Comparison]:
    """Return: each cell is above the one before."""
    return all_above((after.name, before.name) for before, after in pairwise(cells))


def growing_as_claimed(name: str) -> float:
    """Return numbers that grow as α falls."""
    return {"100": 12.0, "1": 30.0, "0.1": 60.0}.get(name.rpartition("= ")[2], 85.0)


PARTITIONS = Artifact(
    "partitions",
    "Figures 9 to 11: who holds what, by α",
    "α = 100 mimics identical local data, and the smaller α is, the more clients hold examples of one class only.",
    PARTITION_CELLS,
    [EVEN, *growing(PARTITION_CELLS)],
    unit="mean share of a client's largest class, in %",
    differs="CIFAR-10 only; α = 0.5 is left out",
    compute=top_class_shares,
    as_claimed=growing_as_claimed,
)
BOUND = Artifact(
    "bound",
    "Theorem 5.1: the discrepancy between local data and all data",
    "The ensemble's risk is bounded by terms that grow with the discrepancy, which grows as α falls.",
    BOUND_CELLS,
    growing(BOUND_CELLS),
    unit="half the proxy A-distance, averaged over the clients",
    reduction="three local epochs; the complexity term is vacuous and not looked at",
    reduced={"cpu": {"local.epochs": 3}},
    compute=discrepancies,
    as_claimed=growing_as_claimed,
)

# Figure 12: decay of the local rate in FedAvg

DECAYS: Axis = {
    name: {**FEDAVG, "local.lr_schedule": decay} for name, decay in (("constant", "none"), ("linear", "linear"))
}

FIG12 = Artifact(
    "fig12",
    "Figure 12: FedAvg with and without decay of the local learning rate (CIFAR-10, ResNet-8)",
    "Decaying the rate during local training has no benefit.",
    grid(CIFAR10, DECAYS, skews(100.0, 1.0, 0.01)),
    [not_below(f"constant, {skew}", f"linear, {skew}", 2.0) for skew in skews(100.0, 1.0, 0.01)],
    differs="E = 40 and all data only",
    reduction="α = 1 and 0.01",
    as_claimed=lambda name: 70.0 if name.startswith("constant") else 69.0,
    subset={"cpu": lambda cell: cell.column != "α = 100"},
)

# Figure 13: learning curves with BatchNorm and GroupNorm

FIG13 = Artifact(
    "fig13",
    "Figure 13: learning curves with BatchNorm and GroupNorm (CIFAR-10, ResNet-8, α = 1)",
    "FedDF with BatchNorm is above FedAvg with either normalization, of which GroupNorm is the better.",
    [cell for cell in TABLE2.cells if cell.row == "cifar10, α = 1"],
    all_above(
        [
            *(("cifar10, α = 1, FedDF, BN", f"cifar10, α = 1, FedAvg, {norm}") for norm in ("BN", "GN")),
            ("cifar10, α = 1, FedAvg, GN", "cifar10, α = 1, FedAvg, BN"),
        ]
    ),
    reduction="as Table 2",
)

# Figures 15 to 17: learning curves before and after fusion


FIG15 = Artifact(
    "fig15",
    "Figures 15 to 17: FedDF before and after the distillation (CIFAR-10, ResNet-8)",
    "The fused model is above the averaged one that it started from.",
    grid(CIFAR10, {"FedDF": {}}, skews(100.0, 1.0, 0.1, 0.01)),
    [
        Comparison(f"distillation adds accuracy, α = {alpha}", {f"FedDF, α = {alpha}": 1}, low=0)
        for alpha in ("100", "1", "0.1", "0.01")
    ],
    gain,
    unit="fused minus averaged test accuracy in points, mean over all rounds",
    differs="E = 40 and all data only",
    as_claimed=lambda name: 5.0,
    reduction="α = 1 and 0.1; 1,000 steps, the start not kept",
    reduced={"cpu": MOVING},
    subset={"cpu": lambda cell: cell.column in ("α = 1", "α = 0.1")},
)

ARTIFACTS = (FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG8, PARTITIONS, BOUND, FIG12, FIG13, FIG14, FIG15)
