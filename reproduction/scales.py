"""The three scales at which an artifact can be run.

``paper`` is the paper's setting, but for what an artifact says (``differs``). ``cpu`` keeps what an artifact is about
(the skew, the methods, the share of clients) on a small task. Most artifacts have digits: they are learned from 20 to
90 % in twelve rounds with the paper's own local epochs, and they were chosen because the clients' ensemble is well
above their average there in the first rounds, which is what FedDF lives on. Figures that need colors have photographs,
of which little is learned in eight rounds, and Figure 3 has texts. ``smoke`` takes seconds, on data that come with
packages, and only shows that everything runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from typing import Any

from feddf.config import Experiment, load, with_values
from reproduction.artifact import Artifact, Cell, Changes, Scale, SmallTask

_BOTH: Changes = {
    "data.test_size": 1_000,
    "clients.total": 10,
    "local.batch_size": 32,
    "distill.steps": 150,
    "distill.batch_size": 64,
    "distill.eval_every": 50,
    "distill.patience": 150,
    "distill.keep_init": True,  # as the kept runs have it; the paper's student always moves
    "run.threads": 1,  # several cells run at a time, and threads that wait for each other are slow on busy cores
}
CPU: Mapping[SmallTask, Changes] = {
    "digits": {
        **_BOTH,
        "data.name": "mnist-5k",
        "data.train_size": 1_250,
        "data.validation": 0.2,
        "data.image_size": 14,
        "pool.sources": ("digits",),
        "rounds": 12,
    },
    "photographs": {
        **_BOTH,
        "data.train_size": 4_000,
        "data.image_size": 16,
        "pool.size": 2_000,
        "rounds": 8,
    },
    "texts": {
        "data.train_size": 3_000,
        "data.test_size": 500,
        "data.validation": 0.05,
        "data.max_tokens": 24,
        "local.epochs": 1,
        "local.batch_size": 8,
        "local.lr": 1e-4,
        "pool.size": 600,
        "rounds": 4,
        "distill.batch_size": 32,
        "distill.lr": 1e-4,
        "distill.steps": 75,
        "distill.eval_every": 25,
        "distill.patience": 75,
        "distill.keep_init": True,
        "run.threads": 1,
    },
}
NARROW = 8
"""The width of a ResNet-8 that learns digits."""
TUNED: Mapping[str, Mapping[float, float]] = {
    "local.prox_mu": {1.0: 0.01, 0.1: 0.01},
    "fusion.momentum": {1.0: 0.2, 0.1: 0.3},
}
"""FedProx's μ and FedAvgM's β by α, tuned on the validation digits of seed 0 (docs/results.md has the commands)."""
RATES: Mapping[str, Mapping[float, float]] = {
    "batch": {100.0: 0.5, 1.0: 0.5, 0.1: 0.1, 0.01: 0.1},
    "group": {1.0: 0.1, 0.1: 0.5},
}
"""The local rate by normalization and α, tuned likewise for FedAvg at α = 1 and 0.1, and taken by all methods."""

SMOKE: Changes = {
    "data.name": "mnist-5k",
    "data.train_size": 160,
    "data.test_size": 30,
    "data.image_size": 8,
    "data.validation": 0.2,
    "partition.min_size": 4,
    "clients.total": 4,
    "clients.fraction": 0.5,
    "rounds": 2,
    "local.epochs": 1,
    "local.batch_size": 8,
    "local.lr": 0.05,
    "pool.sources": ("digits",),
    "pool.size": 16,
    "distill.steps": 2,
    "distill.batch_size": 8,
    "distill.eval_every": 2,
    "run.engine": "in-process",
}

MOVING: Changes = {"distill.keep_init": False, "distill.steps": 1_000, "distill.patience": 300}
"""What an artifact about the distillation itself has at the scale ``cpu``: a student that moves, for long enough."""

IN_PLACE_OF_IMAGENET = ("imagenet32", "stl10")
"""Pools that few machines have: at ``cpu`` scale Tiny-ImageNet stands in for them."""


RUN_ON: Mapping[str, str] = {
    "digits": "1,250 MNIST digits at 14×14, ten clients, a ResNet-8 of half the width, 8×8 digits of another source as "
    "the pool, 12 rounds, 150 distillation steps",
    "photographs": "4,000 CIFAR-10 images at 16×16, ten clients, 8 rounds, a quarter of the epochs, 150 steps",
    "texts": "3,000 texts of 24 tokens, four rounds of an epoch, 75 distillation steps of 32 at a rate of 1e-4",
    "smoke": "so little that it only shows that everything runs",
}


def run_on(artifact: Artifact, scale: Scale) -> str:
    """Return what an artifact is really run on at a scale, in words."""
    if scale == "smoke":
        return RUN_ON["smoke"]
    if scale == "paper":
        return f"the paper's setting, but {artifact.differs}" if artifact.differs else "the paper's setting"
    task = [RUN_ON[artifact.small_task]] if artifact.reducible else []
    return "; ".join([*task, *filter(None, [artifact.reduction])]) or "the preset as it is"


def experiment_of(artifact: Artifact, cell: Cell, scale: Scale, seed: int) -> Experiment:
    """Return the experiment behind a cell, at a scale, with a seed."""
    experiment = load(cell.preset)
    changes: dict[str, Any] = dict(cell.changes)
    if scale == "cpu" and artifact.reducible:
        changes = {**CPU[artifact.small_task], **changes, **_reduced(artifact.small_task, experiment, changes)}
    elif scale == "smoke":
        changes = {**changes, **SMOKE, **_small_models(experiment, changes)}
    changes |= {**artifact.reduced.get(scale, {}), "seed": seed}
    return with_values(experiment, {**changes, **_text_model(experiment, changes)})


def _reduced(task: SmallTask, experiment: Experiment, changes: Changes) -> dict[str, Any]:
    """Return what the small task has in place of a cell's own values."""
    rounds = {"rounds": CPU[task]["rounds"]}
    if task == "digits":
        return {**rounds, **_narrow(experiment, changes), **_tuned(experiment, changes)}
    if task == "texts":
        return rounds
    epochs = changes.get("local.epochs", experiment.local.epochs)
    return {**rounds, "local.epochs": max(1, ceil(epochs / 4)), **_pool(experiment, changes)}


def _tuned(experiment: Experiment, changes: Changes) -> dict[str, Any]:
    """Return the rate for this skew, and FedProx's and FedAvgM's factors where a cell has them."""
    alpha = changes.get("partition.alpha", experiment.partition.alpha)
    factors = {key: by_alpha[alpha] for key, by_alpha in TUNED.items() if changes.get(key)}
    if "local.lr" in changes:
        return factors
    (prototype,) = _prototypes(experiment, changes)
    return {"local.lr": RATES[prototype.get("norm", "batch")][alpha], **factors}


def _narrow(experiment: Experiment, changes: Changes) -> dict[str, Any]:
    """Return the prototypes with narrower ResNets."""
    given = _prototypes(experiment, changes)
    return {"prototypes": tuple({**one, "width": NARROW} if one["model"] == "resnet8" else one for one in given)}


def _prototypes(experiment: Experiment, changes: Changes) -> list[Any]:
    """Return a cell's own prototypes, or the preset's."""
    return list(changes.get("prototypes") or [one.model_dump() for one in experiment.prototypes])


def _text_model(experiment: Experiment, changes: Changes) -> dict[str, Any]:
    """Return the transformer in the folder that FEDDF_TEXT_MODEL names, where a transformer is asked for."""
    folder = os.environ.get("FEDDF_TEXT_MODEL")
    if not folder or "prototypes" in changes or experiment.prototypes[0].model != "transformer":
        return {}
    return {"prototypes": ({"model": "transformer", "name": "transformer", "path": folder},)}


def _pool(experiment: Experiment, changes: Changes) -> dict[str, Any]:
    names = [source.name for source in experiment.pool.sources]
    if "pool.sources" in changes or not set(names) & set(IN_PLACE_OF_IMAGENET):
        return {}
    return {"pool.sources": tuple("tiny-imagenet" if name in IN_PLACE_OF_IMAGENET else name for name in names)}


def _small_models(experiment: Experiment, changes: Changes) -> dict[str, Any]:
    """Return one tiny network for each prototype, under its own name."""
    given = _prototypes(experiment, changes)
    names = [one if isinstance(one, str) else one.get("name") or one["model"] for one in given]
    fedma = changes.get("fusion.method") == "fedma"
    model = {"model": "mlp", "width": 6} if fedma else {"model": "cnn", "width": 2}
    binary = {"model": "cnn", "width": 2, "depth": 3}
    chosen = binary if changes.get("local.binary", experiment.local.binary) != "none" else model
    return {"prototypes": tuple({**chosen, "name": name} for name in names)}
