"""One experiment with several methods and seeds: the same shards, sampled clients and local training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from feddf.config import ConfigError, Experiment, differences, with_values
from feddf.config.experiment import value_of
from feddf.config.keys import default_of
from feddf.config.names import METHODS
from feddf.runs.store import RunFolder, StoreError

PARTS: dict[str, tuple[str, Any]] = {
    "prox": ("local.proximal", 0.01),
    "momentum": ("fusion.momentum", 0.2),
    "adam": ("local.optimizer", "adam"),
    "decay": ("local.decay", "linear"),
    "adjusted": ("local.logit_adjustment", 1.0),
    "drop-worst": ("fusion.drop_worst", "paper"),
    "swag": ("teachers.swag_samples", 10),
    "swa": ("distill.optimizer", "swa"),
    "sgd": ("distill.optimizer", "sgd"),
    "previous": ("distill.start", "previous"),
    "best": ("distill.start", "best"),
    "probabilities": ("teachers.average", "probabilities"),
    "class-counts": ("teachers.weights", "class-counts"),
    "certainty": ("teachers.weights", "certainty"),
    "memory": ("teachers.memory", 0.5),
    "held-out": ("distill.stop", "held-out-loss"),
    "steps": ("distill.stop", "steps"),
}
"""What may be added to a method's name with a plus, and the key and value that it stands for."""

SHORT = {"fedprox": "fedavg+prox", "fedavgm": "fedavg+momentum", "feddistill": "feddf+swag+swa"}


def variant(experiment: Experiment, method: str, others: Sequence[str] = ()) -> Experiment:
    """Return the experiment with a method such as ``fedavg``, ``fedprox`` or ``feddf+prox+swag``.

    A part stands for its value in :data:`PARTS`, unless the configuration has one of its own (``proximal=0.1``). What
    only ``others`` name is at its default: a comparison's ``proximal=0.1`` is FedProx's, and not FedAvg's.
    """
    name, parts = _parts(method)
    mine = dict(PARTS[part] for part in parts)
    elsewhere = {PARTS[part][0] for other in others for part in _parts(other)[1]}
    changes = {key: value for key, value in mine.items() if value_of(experiment, key) == default_of(key)}
    defaults = {key: default_of(key) for key in elsewhere - mine.keys()}
    return with_values(experiment, {"fusion.method": name, **changes, **defaults})


def _parts(method: str) -> tuple[str, list[str]]:
    name, *parts = SHORT.get(method, method).split("+")
    if (name not in METHODS and ":" not in name) or any(part not in PARTS for part in parts):
        known = ", ".join([*METHODS, *SHORT])
        allowed = f"known are {known}, or your own as module:attribute, with any of {', '.join(f'+{p}' for p in PARTS)}"
        raise ConfigError.at("methods", method, allowed)
    return name, parts


def grid(experiment: Experiment, methods: Sequence[str], seeds: Sequence[int]) -> dict[str, Experiment]:
    """Return the experiment for each seed and method, by the name of its folder."""
    variants = {method: variant(experiment, method, methods) for method in methods}
    return {
        f"{method.replace(':', '.')}-seed{seed}": with_values(variants[method], {"seed": seed})
        for seed in seeds
        for method in variants
    }


def folders(experiments: Mapping[str, Experiment], out: Path) -> Iterator[tuple[Experiment, RunFolder]]:
    """Yield each experiment with its run folder below ``out``; one that is there is continued, if it is the same."""
    there = {name: (out / name / "config.toml").exists() for name in experiments}
    for name, experiment in experiments.items():
        if there[name] and (changed := differences(RunFolder.open(out / name).experiment(), experiment)):
            raise StoreError(f"{out / name} holds a run with another configuration: {'; '.join(changed)}")
    for name, experiment in experiments.items():
        yield experiment, RunFolder.open(out / name) if there[name] else RunFolder.create(out / name, experiment)
