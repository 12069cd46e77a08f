"""One experiment with several methods and seeds: the same shards, sampled clients and local training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from feddf.runs.config import Experiment, differences, parse
from feddf.runs.store import RunFolder, StoreError


def grid(experiment: Experiment, methods: Sequence[str], seeds: Sequence[int]) -> list[Experiment]:
    """Return the experiment once for each seed and method; anything else stays the same."""
    values: dict[str, Any] = experiment.model_dump()
    return [parse({**values, "method": method, "seed": seed}) for seed in seeds for method in methods]


def folders(experiments: Sequence[Experiment], out: Path) -> Iterator[tuple[Experiment, RunFolder]]:
    """Yield each experiment with its run folder below ``out``; one that is there is continued, if it is the same."""
    paths = [out / f"{experiment.method}-seed{experiment.seed}" for experiment in experiments]
    there = [(path / "config.toml").exists() for path in paths]
    for experiment, path, exists in zip(experiments, paths, there, strict=True):
        if exists and (changed := differences(RunFolder.open(path).experiment(), experiment)):
            raise StoreError(f"{path} holds a run with another configuration: {'; '.join(changed)}")
    for experiment, path, exists in zip(experiments, paths, there, strict=True):
        yield experiment, RunFolder.open(path) if exists else RunFolder.create(path, experiment)
