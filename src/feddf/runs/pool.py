"""The unlabeled pool of an experiment: from the sources that its configuration names to one set of inputs.

A source is a function ``(source, task, seed)`` that returns raw inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf.config import ConfigError, DataConfig, PoolConfig, SourceConfig
from feddf.config.names import SOURCES
from feddf.data.datasets import Dataset
from feddf.data.files import read_all_images
from feddf.data.generator import load_generator, sample_images
from feddf.data.unlabeled import choose, fit, noise, of_classes, uniform_points, with_views
from feddf.runs.loading import load_dataset, named
from feddf.seeds import derive
from feddf.types import Inputs, Rows

ENOUGH = 10_000
"""Inputs of a source that could give any number of them, where the configuration does not say how many."""


@dataclass(frozen=True)
class PoolTask:
    """What sources are made from: the form of the inputs, what the server has of them, and where data sets are.

    With ``trust``, a generator may be a program in a ``.pt2`` file.
    """

    like: Inputs
    validation: Inputs
    training: Inputs
    data: DataConfig
    size: int | None = None
    flips: bool = False
    trust: bool = False

    def wanted(self, source: SourceConfig) -> int | None:
        """Return how many inputs a source is to give, if the configuration says so."""
        return source.size or self.size


def pool_of(pool: PoolConfig, task: PoolTask, seed: int) -> Inputs | None:
    """Return the inputs of all sources, in the form of the task's; at most as many as the pool's size, at random.

    Of images there may be several views; other inputs stay as they are.
    """
    if not pool.sources:
        return None
    parts = [
        _adapted(source, task, derive(seed, number) if number else seed) for number, source in enumerate(pool.sources)
    ]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if pool.size is not None and len(whole) > pool.size:
        whole = choose(whole, pool.size, derive(seed, "size"))
    if len(whole) < 2:
        raise ConfigError.at("pool.sources", pool.names, f"a pool needs at least two inputs, and this has {len(whole)}")
    if pool.views > 1 and whole.ndim == 4:
        return Inputs(with_views(whole, pool.views, task.flips, derive(seed, "views")), task.like.encode, pool.views)
    return Inputs(whole, task.like.encode)


def _adapted(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    read = SOURCES[source.name] if source.name in SOURCES else from_dataset  # noqa: SIM401 (get imports)
    try:
        return fit(read(source, task, seed), tuple(task.like.raw.shape[1:]), task.like.raw.dtype)
    except (ValueError, OSError) as error:
        raise ConfigError.at("pool.sources", source.name, str(error)) from None


def from_plane(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Points in (−3, 3)², as in the paper's toy example: 60 unless a size is given."""
    return uniform_points((2,), task.wanted(source) or 60, -3.0, 3.0, seed)


def from_noise(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Uniform noise."""
    return noise(task.like.raw, task.wanted(source) or ENOUGH, seed)


def from_generator(path: str, source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Images of a generator in a ``.pt2`` file, made on the CPU."""
    make, latent = load_generator(Path(path).expanduser(), trust=task.trust)
    return sample_images(make, task.wanted(source) or ENOUGH, latent, seed)


def from_images(path: str, source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Every image file in a folder and the folders below it, whatever they are called."""
    size = task.like.raw.shape[-1] if len(task.like.raw.shape) == 4 else None
    rows = read_all_images(Path(path).expanduser(), size)
    return choose(rows, min(task.wanted(source) or len(rows), len(rows)), seed)


def from_validation(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """The server's validation inputs, without their labels."""
    return _own(task.validation.raw, source, task, seed)


def from_training(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """A share of the training data that no client gets, without labels."""
    return _own(task.training.raw, source, task, seed)


def _own(rows: Rows, source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    return choose(rows, source.size or min(task.size or len(rows), len(rows)), seed)  # the pool's size is a most here


def from_dataset(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Inputs of another data set, all or some of its classes; or images of a generator of the user's own."""
    found = named("pool.sources", source.name, task.data)
    if isinstance(found, nn.Module):
        return sample_images(found, task.wanted(source) or ENOUGH, (100,), seed)
    if not isinstance(found, Dataset):
        raise ValueError(f"must give a feddf.Dataset or a generator, and gave a {type(found).__name__}")
    rows = _of_classes(source, found, task, seed)
    if source.fraction is not None:
        return choose(rows, max(2, round(source.fraction * len(rows))), seed)
    return choose(rows, task.wanted(source), seed)


def _of_classes(source: SourceConfig, data: Dataset, task: PoolTask, seed: int) -> Rows:
    inputs = data.unlabeled or data.train.inputs
    if source.classes is None and not source.avoid:
        return inputs.raw
    avoid = source.avoid
    if isinstance(avoid, str):
        avoid = load_dataset("pool.sources", avoid, task.data).classes
    chosen = of_classes(data.train.labels, data.train.n_classes, data.classes, source.classes, avoid, seed)
    return data.train.inputs.take(chosen).raw
