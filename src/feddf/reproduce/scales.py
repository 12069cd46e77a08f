"""The three scales at which an artefact can be run.

``paper`` is the paper's exact setting. ``cpu`` keeps what an artefact is about (the skew, the methods, the share of
clients, the order of local epochs) on a smaller task: 8,000 images of CIFAR-10 or CIFAR-100 at 16×16, ten clients and
fifteen rounds, a quarter of the local epochs, 150 distillation steps on batches of 64. ``smoke`` takes seconds, on data
that come with packages, and only shows that everything runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from typing import Any

from feddf.config import Experiment, load, with_values
from feddf.reproduce.artefact import Artefact, Cell, Changes, Scale

CPU: Changes = {
    "data.size": 8_000,
    "data.test_size": 1_000,
    "data.image_size": 16,
    "clients.number": 10,
    "rounds": 15,
    "local.batch": 32,
    "pool.size": 3_000,
    "distill.steps": 150,
    "distill.batch": 64,
    "distill.check": 50,
    "distill.patience": 150,
    "run.threads": 1,  # several cells run at a time, and threads that wait for each other are slow on busy cores
}

SMOKE: Changes = {
    "data.name": "mnist-5k",
    "data.size": 160,
    "data.test_size": 30,
    "data.image_size": 8,
    "data.validation": 0.2,
    "partition.min_size": 4,
    "clients.number": 4,
    "clients.fraction": 0.5,
    "rounds": 2,
    "local.epochs": 1,
    "local.batch": 8,
    "local.rate": 0.05,
    "pool.sources": ("digits",),
    "pool.size": 16,
    "distill.steps": 2,
    "distill.batch": 8,
    "distill.check": 2,
    "run.engine": "in-process",
}

IN_PLACE_OF_IMAGENET = ("imagenet32", "stl10")
"""Pools that few machines have: at ``cpu`` scale Tiny-ImageNet stands in for them."""


REDUCTIONS: Mapping[Scale, str] = {
    "cpu": "8,000 images at 16×16, ten clients, 15 rounds, a quarter of the local epochs, 150 distillation steps",
    "smoke": "so small that it only shows that everything runs",
}


def reduction_of(artefact: Artefact, scale: Scale) -> str:
    """Return what a scale takes away from an artefact, in words."""
    if scale == "paper" or (scale == "cpu" and not artefact.reducible):
        return ""
    return "; ".join(part for part in (REDUCTIONS[scale], artefact.reduction if scale == "cpu" else "") if part)


def experiment_of(artefact: Artefact, cell: Cell, scale: Scale, seed: int) -> Experiment:
    """Return the experiment behind a cell, at a scale, with a seed."""
    experiment = load(cell.preset)
    changes: dict[str, Any] = dict(cell.changes)
    if scale == "cpu" and artefact.reducible:
        epochs = changes.get("local.epochs", experiment.local.epochs)
        rounds = max(15, changes.get("rounds", 0) // 20)  # FedMA's 900 become 45: five whole models of nine layers
        reduced = {"local.epochs": max(1, ceil(epochs / 4)), "rounds": rounds}
        changes = {**CPU, **changes, **reduced, **_pool(experiment, changes)}
    elif scale == "smoke":
        changes = {**changes, **SMOKE, **_small_models(experiment, changes)}
    changes |= {**artefact.reduced.get(scale, {}), "seed": seed}
    return with_values(experiment, {**changes, **_text_model(experiment, changes)})


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
    given = changes.get("prototypes") or [prototype.model_dump() for prototype in experiment.prototypes]
    names = [one if isinstance(one, str) else one.get("name") or one["model"] for one in given]
    fedma = changes.get("fusion.method") == "fedma"
    model = {"model": "mlp", "width": 6} if fedma else {"model": "cnn", "width": 2}
    binary = {"model": "cnn", "width": 2, "depth": 3}
    chosen = binary if changes.get("local.binary", experiment.local.binary) != "none" else model
    return {"prototypes": tuple({**chosen, "name": name} for name in names)}
