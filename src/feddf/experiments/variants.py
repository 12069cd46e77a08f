"""One experiment with several methods and seeds: the same shards, sampled clients and local training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from feddf.config import Experiment, differences, with_values
from feddf.config.keys import default_of, short
from feddf.config.method_names import changes_of
from feddf.runs.store import RunFolder, StoreError


def variant(experiment: Experiment, method: str, others: Sequence[str] = ()) -> Experiment:
    """Return the experiment with a method such as ``fedavg``, ``fedprox`` or ``feddf+prox+swag``.

    What only ``others`` name is at its default: a comparison's ``proximal=0.1`` is FedProx's, and not FedAvg's.
    """
    mine, elsewhere = changes_of(method)[1], {key for other in others for key in changes_of(other)[1]}
    return with_values(
        experiment, {"fusion.method": method, **{key: default_of(key) for key in elsewhere - mine.keys()}}
    )


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
