"""The unlabeled pool of an experiment: from the sources that its configuration names to one set of inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf.data import Dataset
from feddf.data.unlabeled import adapt, choose, noise, of_classes, uniform
from feddf.generator import GeneratorError, load, sample
from feddf.runs.config import PoolSpec
from feddf.runs.settings import ConfigError
from feddf.seeds import derive
from feddf.types import Inputs, Rows

ENOUGH = 10_000
"""Inputs of a source that could give any number of them, where the configuration does not say how many."""

Find = Callable[[str], object]
"""The name of a data set, or ``module:attribute`` -> a data set, or a generator."""


def pool_of(
    specs: tuple[PoolSpec, ...], size: int | None, like: Inputs, *, own: dict[str, Inputs], find: Find, seed: int
) -> Inputs | None:
    """Return the inputs of all sources, in the form of ``like``; if ``size`` is given, at most so many, at random.

    ``own`` holds what the server has of the task itself: its validation inputs, and those set apart from training.
    """
    if not specs:
        return None
    parts = [
        _adapted(spec, size, like, own, find, derive(seed, number) if number else seed)
        for number, spec in enumerate(specs)
    ]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if size is not None and len(whole) > size:
        whole = choose(whole, size, derive(seed, "size"))
    if len(whole) < 2:
        named = ", ".join(spec.source for spec in specs)
        raise ConfigError.at("pool", named, f"a pool needs at least two inputs, and this has {len(whole)}")
    return Inputs(whole, like.encode)


def _adapted(spec: PoolSpec, size: int | None, like: Inputs, own: dict[str, Inputs], find: Find, seed: int) -> Tensor:
    try:
        adapted = adapt(_chosen(spec, size, like, own, find, seed), like).raw
        return adapted if isinstance(adapted, Tensor) else adapted[torch.arange(len(adapted))]
    except (ValueError, OSError, GeneratorError) as error:
        raise ConfigError.at("pool", spec.source, str(error)) from None


def _chosen(spec: PoolSpec, size: int | None, like: Inputs, own: dict[str, Inputs], find: Find, seed: int) -> Tensor:
    wanted = spec.size or size
    kind, _, rest = spec.source.partition(":")
    if spec.source == "plane":
        return uniform((2,), wanted or 60, -3.0, 3.0, seed)
    if spec.source == "noise":
        return noise(like.raw, wanted or ENOUGH, seed)
    if kind == "generator":
        network, latent = load(Path(rest).expanduser())
        return sample(network, wanted or ENOUGH, latent, seed)
    if spec.source in own:
        rows = own[spec.source].raw  # the task's own inputs are as many as they are: pool_size is a most
        return choose(rows, spec.size or min(size or len(rows), len(rows)), seed)
    found = find(spec.source)
    if isinstance(found, nn.Module):
        return sample(found, wanted or ENOUGH, (100,), seed)
    if not isinstance(found, Dataset):
        raise ValueError(f"must give a feddf.Dataset or a generator, and gave a {type(found).__name__}")
    rows = _of_dataset(spec, found, find, seed)
    if spec.fraction is not None:
        return choose(rows, max(2, round(spec.fraction * len(rows))), seed)
    return choose(rows, wanted, seed)


def _of_dataset(spec: PoolSpec, data: Dataset, find: Find, seed: int) -> Rows:
    inputs = data.unlabeled or data.train.inputs
    if spec.classes is None and not spec.avoid:
        return inputs.raw
    if not data.classes:
        raise ValueError("its classes have no names, so none can be chosen or avoided")
    avoid = spec.avoid
    if isinstance(avoid, str):
        other = find(avoid)
        avoid = other.classes if isinstance(other, Dataset) else ()
    chosen = of_classes(data.train.labels, data.classes, spec.classes, avoid, seed)
    return data.train.inputs.take(chosen).raw
