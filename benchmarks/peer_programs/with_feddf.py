"""The work with feddf: a configuration like any other, with checkpoints and records in its run folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from common import CLASSES, MEAN, STD, Stopwatch, Work, report, shards, simple_cnn, small_cnn
from safetensors.torch import load_file

from feddf import Examples, Inputs, RunFolder, ServerState, build, run_experiment
from feddf.config import DataConfig, PartitionConfig, parse
from feddf.data.datasets import Dataset, Pixels
from feddf.outputs import classes


def images(data: DataConfig) -> Dataset:
    """All clients' images; the test set is as small as can be, because the peers evaluate nothing."""
    folder = Path(str(data.folder))
    raw, labels = (torch.from_numpy(np.load(folder / name)) for name in ("images.npy", "labels.npy"))
    train = Examples(Inputs(raw, Pixels(MEAN, STD)), labels, classes(CLASSES))
    return Dataset("peers", train, train.take(torch.arange(2)))


def slices(
    labels: torch.Tensor, clients: int, partition: PartitionConfig, *, n_classes: int, seed: int
) -> list[torch.Tensor]:
    """The shards that the peers have."""
    return [torch.arange(len(labels))[rows] for rows in shards(Work.given())]


def others(data: DataConfig) -> Dataset:
    """Other images, without labels, which only feddf has a use for."""
    raw = torch.from_numpy(np.load(Path(str(data.folder)) / "pool-images.npy"))
    train = Examples(Inputs(raw, Pixels(MEAN, STD)), torch.zeros(len(raw), dtype=torch.int64), classes(CLASSES))
    return Dataset("others", train, train.take(torch.arange(2)))


def simple(shape: tuple[int, ...], channels: int) -> torch.nn.Module:
    """pfl's network, as one that is not feddf's own."""
    return simple_cnn()


def small(shape: tuple[int, ...], channels: int) -> torch.nn.Module:
    """The small one."""
    return small_cnn()


NETWORKS = {
    "resnet8": "resnet8",
    "simple_cnn": {"name": "simple_cnn", "model": "with_feddf:simple"},
    "small_cnn": {"name": "small_cnn", "model": "with_feddf:small"},
}
DISTILLED = {
    "pool": {"sources": [{"name": "with_feddf:others"}]},
    "distill": {"steps": 200, "batch_size": 64, "early_stopping": "none"},
}


def newest(run: RunFolder) -> ServerState:
    """Return the state after the last round."""
    found, _ = run.latest()
    assert found is not None
    return found


def main() -> None:
    work = Work.given()
    values = {
        "name": "peers",
        "rounds": work.rounds,
        "seed": work.seed,
        "data": {"name": "with_feddf:images", "folder": work.folder, "validation": 0.0},
        "partition": {"scheme": "with_feddf:slices", "min_size": 2},
        "clients": {"total": work.clients, "fraction": work.cohort / work.clients},
        "prototypes": [NETWORKS[work.network]],
        "local": {"epochs": work.epochs, "batch_size": work.batch, "lr": work.rate, "augment": "none"},
        "fusion": {"method": work.method},
        "run": {"workers": work.workers, "log_ensemble": False, "device": "cpu"},
    }
    parts = build(parse({**values, **(DISTILLED if work.method.startswith("feddf") else {})}))
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", parts.experiment)
        watch.begin()
        for _ in run_experiment(parts, run):
            watch.end(work, lambda: newest(run).models[work.network])
            watch.begin()
        state = load_file(Path(folder) / "run" / "models" / f"{work.network}.safetensors")
    report(work, watch, state)


if __name__ == "__main__":
    main()
