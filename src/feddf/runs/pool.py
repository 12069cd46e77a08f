"""The unlabeled pool of an experiment: from the sources that its configuration names to one set of inputs.

A source is a function ``(source, task, seed)`` that returns raw inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf.config import ConfigError, PoolConfig, SourceConfig
from feddf.config.names import SOURCES
from feddf.data.datasets import Dataset
from feddf.data.files import read_all_images
from feddf.data.unlabeled import (
    choose,
    load_generator,
    noise,
    of_classes,
    resize,
    sample_images,
    uniform_points,
    with_views,
)
from feddf.seeds import derive
from feddf.types import Rows

ENOUGH = 10_000
"""Inputs of a source that could give any number of them, where the configuration does not say how many."""


@dataclass(frozen=True)
class PoolTask:
    """What sources are made from: the form of one raw input, and how a data set is loaded by its name.

    ``held`` are inputs that the server has already, by the name of the source that takes them. With ``trust``, a
    generator may be a program in a ``.pt2`` file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[str], object]
    size: int | None = None
    held: Mapping[str, Rows] = field(default_factory=dict)
    trust: bool = False

    def wanted(self, source: SourceConfig) -> int | None:
        """Return how many inputs a source is to give, if the configuration says so."""
        return source.size or self.size


def pool_of(pool: PoolConfig, task: PoolTask, seed: int, *, flips: bool = False) -> Tensor:
    """Return the raw inputs of all sources; at most as many as the pool's size, at random.

    Of images there may be several views, mirrored ones if ``flips``; other inputs stay as they are.
    """
    parts = [
        _adapted(source, task, derive(seed, number) if number else seed) for number, source in enumerate(pool.sources)
    ]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if pool.size is not None and len(whole) > pool.size:
        whole = choose(whole, pool.size, derive(seed, "size"))
    if len(whole) < 2:
        raise ConfigError.at("pool.sources", pool.names, f"a pool needs at least two inputs, and this has {len(whole)}")
    return with_views(whole, pool.views, flips, derive(seed, "views")) if views_of(pool, whole) > 1 else whole


def views_of(pool: PoolConfig, rows: Rows) -> int:
    """Return how many versions of each input there are: those of images only can be shifted."""
    return pool.views if len(rows.shape) == 4 else 1


def _adapted(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    read = SOURCES[source.name] if source.name in SOURCES else from_dataset  # noqa: SIM401 (get imports)
    try:
        return resize(read(source, task, seed), task.shape, task.dtype)
    except (ValueError, OSError) as error:
        raise ConfigError.at("pool.sources", source.name, str(error)) from None


def from_plane(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Points in (−3, 3)², as in the paper's toy example: 60 unless a size is given."""
    return uniform_points((2,), task.wanted(source) or 60, -3.0, 3.0, seed)


def from_noise(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Uniform noise."""
    return noise(task.shape, task.dtype, task.wanted(source) or ENOUGH, seed)


def from_generator(path: str, source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Images of a generator in a ``.pt2`` file, made on the CPU."""
    make, latent = load_generator(Path(path).expanduser(), trust=task.trust)
    return sample_images(make, task.wanted(source) or ENOUGH, latent, seed)


def from_images(path: str, source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Every image file in a folder and the folders below it, whatever they are called."""
    rows = read_all_images(Path(path).expanduser(), task.shape[-1] if len(task.shape) == 3 else None)
    return choose(rows, min(task.wanted(source) or len(rows), len(rows)), seed)


def from_held(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """What the server has: its validation inputs, or a share of the training data that no client gets."""
    rows = task.held.get(source.name)
    if rows is None:
        raise ValueError("there are no clients here; name other unlabeled inputs")
    return choose(rows, source.size or min(task.size or len(rows), len(rows)), seed)  # the pool's size is a most here


def from_dataset(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Inputs of another data set, all or some of its classes; or images of a generator of the user's own."""
    found = task.load(source.name)
    if isinstance(found, nn.Module):
        return sample_images(found, task.wanted(source) or ENOUGH, (100,), seed)
    rows = _of_classes(source, _checked(found, "a feddf.Dataset or a generator"), task, seed)
    if source.fraction is not None:
        return choose(rows, max(2, round(source.fraction * len(rows))), seed)
    return choose(rows, task.wanted(source), seed)


def _of_classes(source: SourceConfig, data: Dataset, task: PoolTask, seed: int) -> Rows:
    inputs = data.unlabeled or data.train.inputs
    if source.classes is None and not source.avoid:
        return inputs.raw
    avoid = source.avoid
    if isinstance(avoid, str):
        avoid = _checked(task.load(avoid), "a feddf.Dataset").classes
    chosen = of_classes(data.train.labels, data.train.n_classes, data.classes, source.classes, avoid, seed)
    return data.train.inputs.take(chosen).raw


def _checked(found: object, expected: str) -> Dataset:
    if not isinstance(found, Dataset):
        raise ValueError(f"must give {expected}, and gave a {type(found).__name__}")
    return found
