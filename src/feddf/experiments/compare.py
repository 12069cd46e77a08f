"""One experiment with several methods and seeds: the same shards, sampled clients and local training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from feddf.runs.config import Experiment, differences, parse
from feddf.runs.settings import ConfigError
from feddf.runs.store import RunFolder, StoreError

PARTS: dict[str, dict[str, Any]] = {
    "prox": {"proximal": 0.01},
    "momentum": {"server_momentum": 0.2},
    "adam": {"local_optimizer": "adam"},
    "decay": {"local_decay": "linear"},
    "drop-worst": {"drop_worst": "paper"},
    "swag": {"swag_samples": 10},
    "swa": {"distill_optimizer": "swa"},
    "sgd": {"distill_optimizer": "sgd"},
    "previous": {"start": "previous"},
    "best": {"start": "best"},
    "probabilities": {"teacher_average": "probabilities"},
    "held-out": {"stop": "held-out-loss"},
    "steps": {"stop": "steps"},
}
"""What may be added to a method's name with a plus, and the values that it stands for."""

SHORT = {"fedprox": "fedavg+prox", "fedavgm": "fedavg+momentum"}


def variant(experiment: Experiment, method: str, others: Sequence[str] = ()) -> Experiment:
    """Return the experiment with a method such as ``fedavg``, ``fedprox`` or ``feddf+prox+swag``.

    A part stands for its value in :data:`PARTS`, unless the configuration has one of its own (``proximal=0.1``). What
    only ``others`` name is at its default: a comparison's ``proximal=0.1`` is FedProx's, and not FedAvg's.
    """
    name, parts = _parts(method)
    elsewhere = {key for other in others for part in _parts(other)[1] for key in PARTS[part]}
    default = {key: Experiment.model_fields[key].default for part in PARTS.values() for key in part}
    mine = {key: value for part in parts for key, value in PARTS[part].items()}
    values: dict[str, Any] = {**experiment.model_dump(), "method": name}
    for key, value in mine.items():
        if values[key] == default[key]:
            values[key] = value
    return parse({**values, **{key: default[key] for key in elsewhere - mine.keys()}})


def _parts(method: str) -> tuple[str, list[str]]:
    known = get_args(Experiment.model_fields["method"].annotation)
    name, *parts = SHORT.get(method, method).split("+")
    if name not in known or any(part not in PARTS for part in parts):
        allowed = f"known are {', '.join([*known, *SHORT])}, with any of {', '.join(f'+{part}' for part in PARTS)}"
        raise ConfigError.at("methods", method, allowed)
    return name, parts


def grid(experiment: Experiment, methods: Sequence[str], seeds: Sequence[int]) -> dict[str, Experiment]:
    """Return the experiment for each seed and method, by the name of its folder."""
    variants = {method: variant(experiment, method, methods).model_dump() for method in methods}
    return {f"{method}-seed{seed}": parse({**variants[method], "seed": seed}) for seed in seeds for method in variants}


def folders(experiments: Mapping[str, Experiment], out: Path) -> Iterator[tuple[Experiment, RunFolder]]:
    """Yield each experiment with its run folder below ``out``; one that is there is continued, if it is the same."""
    there = {name: (out / name / "config.toml").exists() for name in experiments}
    for name, experiment in experiments.items():
        if there[name] and (changed := differences(RunFolder.open(out / name).experiment(), experiment)):
            raise StoreError(f"{out / name} holds a run with another configuration: {'; '.join(changed)}")
    for name, experiment in experiments.items():
        yield experiment, RunFolder.open(out / name) if there[name] else RunFolder.create(out / name, experiment)
