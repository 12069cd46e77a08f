"""Data by name: data sets, checked before anything is trained on them, and the unlabeled pool of all its sources.

A source of the pool is a function ``(source, task, seed)`` that returns raw inputs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf.config import ConfigError, DataConfig, Experiment, PoolConfig, PrototypeConfig, SourceConfig
from feddf.config.errors import FeddfError, one_line, reason
from feddf.config.names import DATASETS, SOURCES
from feddf.data import unlabeled
from feddf.data.datasets import Dataset, wrong_parts
from feddf.data.files import read_all_images
from feddf.data.tables import read_table
from feddf.data.text import TEXTS, tokenizer
from feddf.runtime.packages import transformers
from feddf.seeds import derive
from feddf.types import Inputs, Rows

ENOUGH = 10_000  # inputs of a source that could give any number of them, where the configuration does not say


def load_dataset(key: str, name: str, data: DataConfig) -> Dataset:
    """Return a data set; ``key`` is where the configuration names it."""
    found = load_named(key, name, data)
    if not isinstance(found, Dataset):
        raise ConfigError.at(key, name, f"must give a feddf.Dataset, and gave a {type(found).__name__}")
    if data.image_size is not None:
        resized = _resized(found, data.image_size)
        if found.train.outputs.positions and resized.shape != found.shape:
            allowed = "the labels, one for each pixel, would keep their size; leave it out, or resize both before"
            raise ConfigError.at("data.image_size", data.image_size, allowed)
        found = resized
    if wrong := wrong_parts(found):
        raise ConfigError.at(key, name, f"has {wrong}")
    return found


def load_named(key: str, name: str, data: DataConfig) -> object:
    """Return what a name stands for: a data set, or whatever a function (or module) of the user's own gives."""
    try:
        loader = DATASETS[name]
        return loader if isinstance(loader, nn.Module) else loader(data)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError.at(key, name, str(error)) from error
    except FeddfError:
        raise
    except Exception as error:  # a function of the user's own may fail in any way
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if place.filename == __file__ else f" ({place.filename}, line {place.lineno})"
        allowed = f"must be a function of [data] that returns a feddf.Dataset; it raised {reason(error)}{where}"
        raise ConfigError.at(key, name, allowed) from error


def _resized(data: Dataset, side: int) -> Dataset:
    """Return a data set of images with all of them at one size; one that has it already is returned itself."""
    raw = data.train.inputs.raw
    if len(raw.shape) != 4 or tuple(raw.shape[2:]) == (side, side):
        return data
    shape, encode, parts = (raw.shape[1], side, side), data.train.inputs.encode, (data.train, data.test)
    rows = [unlabeled.resize(unlabeled.all_rows(one.inputs.raw), shape, raw.dtype) for one in parts]
    train, test = (replace(one, inputs=Inputs(some, encode)) for one, some in zip(parts, rows, strict=True))
    return replace(data, train=train, test=test)


def with_tokenizer(experiment: Experiment) -> DataConfig:
    """Return the section [data] with the tokenizer of the first transformer, where none is named."""
    paths = [str(prototype.options["path"]) for prototype in experiment.prototypes if "path" in prototype.options]
    if experiment.data.tokenizer or not paths:
        return experiment.data
    return experiment.data.model_copy(update={"tokenizer": paths[0]})


def check_vocabulary(prototype: PrototypeConfig, data: DataConfig) -> None:
    """A tokenizer that knows more tokens than the model would fail somewhere inside the first batch that has one."""
    if data.name not in TEXTS or "path" not in prototype.options or data.tokenizer is None:
        return
    path, found = prototype.options["path"], tokenizer(data.tokenizer, data.max_tokens)
    model = transformers().AutoConfig.from_pretrained(path, trust_remote_code=False)
    if found.n_tokens > model.vocab_size:
        allowed = f"it knows {found.n_tokens} tokens, and the model {path} can read {model.vocab_size}"
        raise ConfigError.at("data.tokenizer", data.tokenizer, allowed)
    if found.padding != (model.pad_token_id or 0):
        allowed = f"it pads with token {found.padding}, and the model {path} with {model.pad_token_id}"
        raise ConfigError.at("data.tokenizer", data.tokenizer, allowed)


@dataclass(frozen=True)
class PoolTask:
    """What sources are made from: the form of one raw input, and how a data set is loaded by its name.

    ``held`` are inputs that the server has already, by the name of the source that takes them. With ``trust``, a
    generator may be a program in a ``.pt2`` file. ``columns`` are those of a table, by name.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[str], object]
    size: int | None = None
    held: Mapping[str, Rows] = field(default_factory=dict)
    trust: bool = False
    columns: tuple[str, ...] = ()

    def wanted(self, source: SourceConfig) -> int | None:
        """Return how many inputs a source is to give, if the configuration says so."""
        return source.size or self.size


def pool_of(pool: PoolConfig, task: PoolTask, seed: int, *, flips: bool = False) -> tuple[Tensor, int]:
    """Return the raw inputs of all sources, at most as many as the pool's size, at random; and how many views of each.

    Only images have several, which are shifted, and mirrored if ``flips``; other inputs stay as they are.
    """
    parts = []
    for number, source in enumerate(pool.sources):
        read = SOURCES[source.name] if source.name in SOURCES else from_dataset  # noqa: SIM401 (get imports)
        with one_line(partial(ConfigError.at, "pool.sources", source.name), of=(ValueError, OSError)):
            found = read(source, task, derive(seed, number) if number else seed)
            parts.append(unlabeled.resize(found, task.shape, task.dtype))
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if pool.size is not None and len(whole) > pool.size:
        whole = unlabeled.choose(whole, pool.size, derive(seed, "size"))
    if len(whole) < 2:
        raise ConfigError.at("pool.sources", pool.names, f"a pool needs at least two inputs, and this has {len(whole)}")
    views = pool.views if whole.ndim == 4 else 1
    return (unlabeled.with_views(whole, views, flips, derive(seed, "views")) if views > 1 else whole), views


def from_plane(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Points in (−3, 3)², as in the paper's toy example: 60 unless a size is given."""
    return unlabeled.noise((2,), torch.float32, task.wanted(source) or 60, seed)


def from_noise(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Uniform noise."""
    return unlabeled.noise(task.shape, task.dtype, task.wanted(source) or ENOUGH, seed)


def from_generator(path: str, source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Images of a generator in a ``.pt2`` file, made on the CPU."""
    make, latent = unlabeled.load_generator(Path(path).expanduser(), trust=task.trust)
    return unlabeled.sample_images(make, task.wanted(source) or ENOUGH, latent, seed)


def from_images(path: str, source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Every image file in a folder and the folders below it, whatever they are called."""
    rows = read_all_images(Path(path).expanduser(), task.shape[-1] if len(task.shape) == 3 else None)
    return unlabeled.choose(rows, min(task.wanted(source) or len(rows), len(rows)), seed)


def from_table(path: str, source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """The rows of a table, without its labels."""
    rows = read_table(path).taking(task.columns).rows
    return unlabeled.choose(rows, min(task.wanted(source) or len(rows), len(rows)), seed)


def from_held(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """What the server has: its validation inputs, or a share of the training data that no client gets."""
    rows = task.held.get(source.name)
    if rows is None:
        raise ValueError("there are no clients here; name other unlabeled inputs")
    most = min(task.size or len(rows), len(rows))  # the pool's size is a most here
    return unlabeled.choose(rows, source.size or most, seed)


def from_dataset(source: SourceConfig, task: PoolTask, seed: int) -> Tensor:
    """Inputs of another data set, all or some of its classes; or images of a generator of the user's own."""
    found = task.load(source.name)
    if isinstance(found, nn.Module):
        return unlabeled.sample_images(found, task.wanted(source) or ENOUGH, (100,), seed)
    data, avoid = _checked(found, "a feddf.Dataset or a generator"), source.avoid
    inputs, (labels, n_groups) = data.unlabeled or data.train.inputs, data.train.partitioned_by
    if source.classes is not None or avoid:
        if isinstance(avoid, str):
            avoid = _checked(task.load(avoid), "a feddf.Dataset").classes
        chosen = unlabeled.of_classes(labels, n_groups, data.classes, source.classes, avoid, seed)
        inputs = data.train.inputs.take(chosen)
    few = None if source.fraction is None else max(2, round(source.fraction * len(inputs.raw)))
    return unlabeled.choose(inputs.raw, few or task.wanted(source), seed)


def _checked(found: object, expected: str) -> Dataset:
    if not isinstance(found, Dataset):
        raise ValueError(f"must give {expected}, and gave a {type(found).__name__}")
    return found
