"""One experiment with several methods and seeds: the same shards, sampled clients and local training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from feddf.config import ConfigError, Experiment, differences, with_values
from feddf.config.experiment import value_of
from feddf.config.keys import default_of, short
from feddf.config.names import METHODS
from feddf.runs.store import RunFolder, StoreError

PARTS: dict[str, tuple[str, Any]] = {
    "prox": ("local.proximal", 0.01),
    "momentum": ("fusion.momentum", 0.2),
    "adam": ("local.optimizer", "adam"),
    "decay": ("local.decay", "linear"),
    "adjusted": ("local.logit_adjustment", 1.0),
    "robust": ("fusion.defence", "robust"),
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


@dataclass(frozen=True)
class Variation:
    """One run of a comparison: what was set (text such as "alpha=0.1", or nothing), the method and the experiment."""

    setting: str
    method: str
    experiment: Experiment

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return "-".join(filter(None, [self.setting, self.method.replace(":", "."), f"seed{self.experiment.seed}"]))


def grid(
    experiment: Experiment,
    methods: Sequence[str],
    seeds: Sequence[int],
    swept: Mapping[str, Sequence[Any]] | None = None,
) -> list[Variation]:
    """Return the experiment for each setting of the swept keys, each seed and each method."""
    swept = swept or {}
    found = []
    for values in product(*swept.values()):
        setting = dict(zip(swept, values, strict=True))
        label = ",".join(f"{short(key)}={value}" for key, value in setting.items())
        variants = {method: variant(with_values(experiment, setting), method, methods) for method in methods}
        found += [
            Variation(label, method, with_values(variants[method], {"seed": seed}))
            for seed in seeds
            for method in variants
        ]
    return found


def folders(variations: Sequence[Variation], out: Path) -> Iterator[tuple[Variation, RunFolder, list[str]]]:
    """Yield each variation with its run folder below ``out`` and what should be said about it.

    A folder that is there is continued, if its run is the same or shorter.
    """
    opened = open_folders({out / one.folder: one.experiment for one in variations})
    for one, (folder, said) in zip(variations, opened, strict=True):
        yield one, folder, said


def open_folders(wanted: Mapping[Path, Experiment]) -> Iterator[tuple[RunFolder, list[str]]]:
    """Yield each experiment's run folder, made or continued, and what should be said about it."""
    there = {path: (path / "config.toml").exists() for path in wanted}
    for path, experiment in wanted.items():  # all of them before any is run
        if there[path]:
            old = RunFolder.open(path).experiment()
            longer = ["rounds"] if experiment.rounds >= old.rounds else []
            if changed := differences(old, experiment, also_free=longer):
                raise StoreError(f"{path} holds a run with another configuration: {'; '.join(changed)}")
    for path, experiment in wanted.items():
        if there[path]:
            folder = RunFolder.open(path)
            yield folder, folder.continue_as(experiment)
        else:
            yield RunFolder.create(path, experiment), []
