"""An experiment's configuration, run over Flower: for simulations, and to compare with the other engines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import Tensor

from feddf.config import Experiment, Settings, parse
from feddf.data.datasets import flip_crop
from feddf.flower.client import client_app
from feddf.flower.settings import FlowerSettings, MakePart
from feddf.flower.strategy import FedDF
from feddf.runs.build import Parts, augments, build, client_name
from feddf.runtime.execution import Execution
from feddf.types import Examples


def settings_of(experiment: Experiment) -> FlowerSettings:
    """Return the settings of an experiment for a run over Flower."""
    return parse(experiment.model_dump(include=set(Settings.model_fields)), FlowerSettings)


def strategy_of(
    experiment: Experiment,
    folder: str | Path,
    settings: FlowerSettings | None = None,
    *,
    trust: bool = False,
    **options: Any,
) -> FedDF:
    """Return the strategy that runs an experiment, with its data on the server's side.

    ``settings`` are those of :func:`settings_of` unless given, ``options`` further ones of :class:`FedDF`. With
    ``trust``, the pool may be of a ``.pt2`` file.
    """
    parts = build(experiment, trust=trust)
    pool, validation, test = parts.task.pool, parts.task.validation, parts.task.data.test
    given = {"pool": pool, "validation": validation if len(validation) else None, "test": test, **options}
    return FedDF(parts.prototypes, settings or settings_of(experiment), folder=folder, **given)


def client_app_of(
    experiment: Experiment,
    *,
    states: str | Path | None = None,
    parts: Mapping[str, MakePart] | None = None,
    trust: bool = False,
) -> ClientApp:
    """Return the app of an experiment's clients: a node's ``partition-id`` says which of them it is.

    The data are loaded where the client is, when its first message comes; so the app itself is small and travels.
    ``states`` is a folder for what clients keep between rounds, where a method has them keep something; ``parts`` are
    one's own, as for :func:`feddf.flower.client_app`.
    """
    labels, run = [spec.label for spec in experiment.prototypes], experiment.run
    built = partial(_build_here, experiment.model_dump_json(), trust)

    def examples(context: Context) -> Examples:
        indices = built().federation.clients[_number(context)].indices
        assert indices is not None, "the clients of an experiment have their examples here"
        return built().task.train.take(indices)

    def augment(images: Tensor, generator: torch.Generator) -> Tensor:
        return flip_crop(images, generator) if augments(experiment, built().task.data) else images

    return client_app(
        {label: lambda label=label: built().prototypes[label].build() for label in labels},  # type: ignore[misc]
        examples,
        prototype=lambda context: labels[_number(context) % len(labels)],
        name=lambda context: client_name(_number(context), experiment.clients.total),
        augment=augment,
        device=Execution(device=run.device, precision=run.precision, deterministic=run.deterministic),
        parts=parts,
        states=None if states is None else lambda context: Path(states),
    )


@lru_cache(maxsize=2)
def _build_here(experiment: str, trust: bool) -> Parts:
    return build(Experiment.model_validate_json(experiment), trust=trust)


def _number(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if number is None:
        raise ValueError("this node has no partition-id; start it with --node-config 'partition-id=0'")
    return int(number)
