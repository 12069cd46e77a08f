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
    for experiment in experiments:
        path = out / f"{experiment.method}-seed{experiment.seed}"
        if not (path / "config.toml").exists():
            yield experiment, RunFolder.create(path, experiment)
            continue
        folder = RunFolder.open(path)
        if changed := differences(folder.experiment(), experiment):
            raise StoreError(f"{path} holds a run with another configuration: {'; '.join(changed)}")
        yield experiment, folder
