"""An experiment's configuration, run over Flower: for simulations, and to compare with the other engines."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp

from feddf.config import Experiment, Settings, parse
from feddf.data.augment import flip_crop
from feddf.flower.client import Site, app_at
from feddf.flower.settings import FlowerSettings
from feddf.flower.strategy import FedDF
from feddf.runs.build import Parts, augments, build, client_name
from feddf.runtime.execution import Execution


def settings_of(experiment: Experiment) -> FlowerSettings:
    """Return the settings of an experiment for a run over Flower; a deadline is always needed there."""
    own = experiment.model_dump(include=set(Settings.model_fields))
    if experiment.clients.deadline is None:
        del own["clients"]["deadline"]
    return parse(own, FlowerSettings)


def strategy_of(
    experiment: Experiment,
    folder: str | Path,
    settings: FlowerSettings | None = None,
    *,
    wait: float = 60.0,
    poll: float = 0.2,
    trust: bool = False,
) -> FedDF:
    """Return the strategy that runs an experiment, with its data on the server's side.

    ``settings`` are those of :func:`settings_of` unless given. With ``trust``, the pool may be of a ``.pt2`` file.
    """
    parts = build(experiment, trust=trust)
    return FedDF(
        parts.prototypes,
        settings or settings_of(experiment),
        pool=parts.task.pool,
        validation=parts.task.validation if len(parts.task.validation) else None,
        test=parts.task.data.test,
        folder=folder,
        wait=wait,
        poll=poll,
    )


def client_app_of(experiment: Experiment, *, states: str | Path | None = None, trust: bool = False) -> ClientApp:
    """Return the app of an experiment's clients: a node's ``partition-id`` says whose shard it has.

    The data are loaded where the client is, when its first message comes; so the app itself is small and travels.
    ``states`` is a folder for what clients keep between rounds, where a method has them keep something.
    """
    settings = settings_of(experiment)
    settings.refuse(settings.mistakes(labelled=True, pooled=True))
    labels = [spec.label for spec in experiment.prototypes]
    return app_at(
        partial(_site, experiment, trust),
        lambda context: labels[_number(context) % len(labels)],
        lambda context: client_name(_number(context), experiment.clients.number),
        threads=1,
        execution=Execution(
            device=experiment.run.device,
            precision=experiment.run.precision,
            deterministic=experiment.run.deterministic,
        ),
        states=None if states is None else lambda context: Path(states),
    )


def _site(experiment: Experiment, trust: bool, context: Context) -> Site:
    parts, number = _built(experiment.model_dump_json(), trust), _number(context)
    client = parts.federation.clients[number]
    assert client.indices is not None
    return Site(
        parts.prototypes[client.prototype],
        partial(parts.task.train.take, client.indices),
        augment=flip_crop if augments(experiment, parts.task.data) else None,
    )


@lru_cache(maxsize=2)
def _built(experiment: str, trust: bool) -> Parts:
    return build(Experiment.model_validate_json(experiment), trust=trust)


def _number(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if number is None:
        raise ValueError("this node has no partition-id; start it with --node-config 'partition-id=0'")
    return int(number)
