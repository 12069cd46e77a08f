"""An experiment's configuration, played over Flower: for simulations, and to compare with the other engines."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp

from feddf.data.augment import flip_crop
from feddf.flower.client import Site, app_at
from feddf.flower.strategy import FedDF
from feddf.runs.build import Parts, augments, build, client_name
from feddf.runs.config import Experiment
from feddf.runs.settings import ConfigError, Settings


def strategy_of(experiment: Experiment, folder: str | Path, **more: Any) -> FedDF:
    """Return the strategy that plays an experiment, with its data on the server's side; ``more`` goes to FedDF."""
    _check(experiment)
    parts = build(experiment)
    own = experiment.model_dump(include=set(Settings.model_fields))
    if experiment.deadline is None:
        del own["deadline"]
    return FedDF(
        parts.prototypes,
        pool=parts.task.pool,
        validation=parts.task.validation if len(parts.task.validation) else None,
        test=parts.task.data.test,
        folder=folder,
        **{**own, **more},
    )


def client_app_of(experiment: Experiment) -> ClientApp:
    """Return the app of an experiment's clients: a node's ``partition-id`` says whose shard it has.

    The data are loaded where the client is, when its first message comes; so the app itself is small and travels.
    """
    _check(experiment)
    labels = [spec.label for spec in experiment.prototypes]
    return app_at(
        partial(_site, experiment),
        lambda context: labels[_number(context) % len(labels)],
        lambda context: client_name(_number(context), experiment.clients),
        threads=1,
    )


def _site(experiment: Experiment, context: Context) -> Site:
    parts, number = _built(experiment), _number(context)
    client = parts.federation.clients[number]
    assert client.indices is not None
    shard = partial(parts.task.train.take, client.indices)
    return Site(
        parts.prototypes[client.prototype],
        shard,
        augment=flip_crop if augments(experiment, parts.task) else None,
    )


@lru_cache(maxsize=2)
def _built(experiment: Experiment) -> Parts:
    return build(experiment)


def _number(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if number is None:
        raise ValueError("this node has no partition-id; start it with --node-config 'partition-id=0'")
    return int(number)


def _check(experiment: Experiment) -> None:
    if experiment.local_binary != "none":
        raise ConfigError.at("local_binary", experiment.local_binary, "Flower's arrays carry full precision only")
