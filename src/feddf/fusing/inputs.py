"""Raw inputs that every model sees in its own way: unlabeled ones to distill on, and labeled ones to measure with."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from feddf.config.errors import ConfigError, one_line
from feddf.config.fuse_config import FuseConfig, LabeledConfig
from feddf.config.names import SOURCES
from feddf.config.sections import DataConfig, PoolConfig
from feddf.data.catalog import CATALOG, root_of
from feddf.data.datasets import Standardized, plain
from feddf.data.files import image_files, read_image
from feddf.data.tables import read_table
from feddf.data.text import TEXTS, Texts
from feddf.data.unlabeled import all_rows, choose, resize
from feddf.fusing.classes import columns_of
from feddf.fusing.feeding import POOL, Feeding, assumed
from feddf.outputs import Outputs
from feddf.outputs import classes as one_class
from feddf.runs.loading import PoolTask, load_dataset, load_named, pool_of
from feddf.saved.model import Features, Images, Preprocess, Tokens
from feddf.saved.model_folder import read_lines
from feddf.scores import CHANNELS
from feddf.seeds import derive
from feddf.types import Examples, Inputs

LINES = "lines:"
"""A source of texts: a file with one text in each line."""


class FeedingWarning(UserWarning):
    """How a teacher is fed, or what its classes are, is assumed."""


@dataclass(frozen=True)
class RawInputs:
    """Inputs as they are before any model's preprocessing: a tensor, or texts.

    ``encode`` is what models without a preprocessing of their own are fed with; ``views`` as in :class:`Inputs`;
    ``columns`` are those of a table.
    """

    rows: Tensor | tuple[str, ...]
    encode: Callable[[Tensor], Tensor] = plain
    views: int = 1
    columns: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the inputs' content."""
        if not isinstance(self.rows, Tensor):
            return hashlib.sha256("\0".join(self.rows).encode()).hexdigest()
        sha = hashlib.sha256(repr((str(self.rows.dtype), tuple(self.rows.shape))).encode())
        sha.update(self.rows.flatten().contiguous().view(torch.uint8).numpy().data)
        return sha.hexdigest()

    def inputs(self, preprocess: Preprocess | None) -> Inputs:
        """Return the inputs as a model with this preprocessing takes them."""
        if isinstance(self.rows, Tensor):
            if isinstance(preprocess, Tokens):
                raise ValueError("it reads texts, and these inputs are none")
            if isinstance(preprocess, Images) and (self.rows.dtype != torch.uint8 or self.rows.ndim != 4):
                raise ValueError("it takes images, and these inputs are none")
            if isinstance(preprocess, Features) and tuple(self.rows.shape[1:]) != preprocess.shape:
                raise ValueError(f"it takes inputs of shape {preprocess.shape}, not {tuple(self.rows.shape[1:])}")
            return Inputs(self.rows, preprocess or self.encode, self.views)
        if not isinstance(preprocess, Tokens):
            raise ValueError("it has no tokenizer, and these inputs are texts; name one with tokenizer = ...")
        return Inputs(preprocess.read(self.rows), preprocess)

    def stored(self, preprocess: Preprocess | None) -> Inputs:
        """Return the inputs for a model that sees them many times: resized once."""
        inputs = self.inputs(preprocess)
        if isinstance(preprocess, Images):
            return replace(inputs, raw=resize(all_rows(inputs.raw), preprocess.shape))
        return inputs

    def take(self, chosen: Tensor) -> RawInputs:
        """Return some of the inputs."""
        if len(chosen) == len(self):
            return self
        some = self.rows[chosen] if isinstance(self.rows, Tensor) else tuple(self.rows[one] for one in chosen.tolist())
        return replace(self, rows=some, views=1)

    def first(self, size: int) -> RawInputs:
        """Return the first few inputs."""
        return self.take(torch.arange(min(size, len(self))))


@dataclass(frozen=True)
class Labeled:
    """Raw inputs with labels: numbers of ``names``, or of the student's classes where there are no names.

    ``fixed`` names are the user's, not the data set's; ``key`` and ``name`` are where the data set is named.
    ``outputs`` say what labels mean that are not one class for each input.
    """

    raw: RawInputs
    labels: Tensor
    n_classes: int
    names: tuple[str, ...] = ()
    fixed: bool = False
    key: str = ""
    name: str = ""
    outputs: Outputs = one_class()

    def among(self, classes: Sequence[str], outputs: Outputs = one_class()) -> Labeled:
        """Return the same inputs with labels for these outputs, whose channels are the classes; names are matched."""
        if self.outputs.title != outputs.title:
            said = f"its labels are {self.outputs.title}, and the teachers answer with {outputs.title}"
            raise ConfigError.at(f"{self.key or 'labeled'}.name", self.name, said)
        if not self.names and self.n_classes != len(classes):
            raise ConfigError(f"the labeled data have {self.n_classes} classes, and the student {len(classes)}")
        table = columns_of(self.names or classes, classes)
        unnamed = not self.fixed and len(self.names) == len(classes) and all(name.isdigit() for name in classes)
        if unnamed and -1 in table:
            table = torch.arange(len(classes))  # the outputs have no names: they are in the data set's order
            taken = ", ".join(f"{number} for '{name}'" for number, name in enumerate(self.names[:4]))
            text = f"no teacher names its classes: output {taken}{', ...' * (len(classes) > 4)} (assumed)"
            warnings.warn(f"{text}; say it with classes if that is wrong", FeedingWarning, stacklevel=2)
        there = self.labels[self.labels >= 0].unique() if outputs.one_is_right else torch.arange(len(table))
        if odd := [self.names[number] for number in there if table[number] < 0]:
            allowed = f"its class '{odd[0]}' is none of the student's: {', '.join(classes[:12])}"
            raise ConfigError.at(f"{self.key}.name", self.name, allowed)
        if outputs.one_is_right:
            labels = table[self.labels.clamp_min(0)].where(self.labels >= 0, self.labels)
        else:
            missing = self.labels.new_full((len(self.labels), len(classes), *outputs.positions), torch.nan)
            labels = missing.index_copy(CHANNELS, table, self.labels)
        return replace(self, labels=labels, n_classes=len(classes), names=(), outputs=outputs)

    def some(self, size: int) -> Labeled:
        """Return some of the examples, evenly spread: a data set may be sorted by its labels."""
        chosen = torch.linspace(0, len(self.labels) - 1, min(size, len(self.labels))).long()
        return replace(self, raw=self.raw.take(chosen), labels=self.labels[chosen])

    def examples(self, preprocess: Preprocess | None) -> Examples:
        """Return the examples as a model with this preprocessing takes them."""
        outputs = one_class(self.n_classes) if self.outputs.counts_classes else self.outputs
        return Examples(self.raw.stored(preprocess), self.labels, outputs)


def as_labeled(given: Examples | Labeled, pool: RawInputs) -> Labeled:
    """Return what a program hands over as labeled inputs, which are encoded as the pool is."""
    if isinstance(given, Labeled):
        return given
    raw = RawInputs(all_rows(given.inputs.raw), pool.encode)
    return Labeled(raw, given.labels, given.n_classes, outputs=given.outputs)


def load_pool(config: FuseConfig, preprocesses: Sequence[Preprocess | None], *, trust: bool = False) -> RawInputs:
    """Return the pool of a configuration, in the largest form that some model takes, in color if some model does."""
    pool, seed = config.pool, derive(config.seed, "pool")
    if any(isinstance(one, Tokens) for one in preprocesses):
        return RawInputs(_texts(pool, config.folder, seed))
    if lines := [source.name for source in pool.sources if source.name.startswith(LINES)]:
        raise ConfigError.at("pool.sources", lines[0], "no model reads texts; name a folder of images")
    shapes = [one.shape for one in preprocesses if isinstance(one, Images)]
    table = next((one for one in preprocesses if isinstance(one, Features)), None)
    if not shapes and table is None:
        raise ConfigError("no model says how large its images are; say it with student.size")
    shape = tuple(max(sides) for sides in zip(*shapes, strict=True)) if table is None else table.shape
    dtype, columns = (torch.uint8, ()) if table is None else (torch.float32, table.columns)

    def load(name: str) -> object:
        side = shape[-1] if table is None else None
        return load_named("pool.sources", name, DataConfig(name=name, folder=config.folder, image_size=side))

    rows, views = pool_of(pool, PoolTask(shape, dtype, load, pool.size, trust=trust, columns=columns), seed)
    return RawInputs(rows, views=views, columns=columns)


def own_rows(config: FuseConfig, *, trust: bool = False) -> RawInputs:
    """Return the pool in its own form, whatever models take: texts, or inputs as its first source has them."""
    if any(source.name.startswith(LINES) or source.name in TEXTS for source in config.pool.sources):
        return RawInputs(_texts(config.pool, config.folder, derive(config.seed, "pool")))
    return load_pool(config, [assumed(pool_form(config)).preprocess], trust=trust)


def pool_form(config: FuseConfig) -> Feeding:
    """Return what the pool's first source says about inputs: the size of its images, or the columns of its table.

    Columns are standardized with the pool's own means and deviations: a student of numbers learns little without.
    """
    name = config.pool.sources[0].name
    kind, _, place = name.partition(":")
    with one_line(partial(ConfigError.at, "pool.sources", name), of=(ValueError, OSError)):
        if kind == "images":
            side = min(read_image(image_files(Path(place).expanduser())[0], None).shape[:2])
            return Feeding.said(POOL, size=(side, side), channels=3)
        if kind == "table":
            found = read_table(place)
            rows, columns = found.rows, found.columns
        elif kind in ("lines", *TEXTS) or name in SOURCES:
            return Feeding()
        else:
            data = load_dataset("pool.sources", name, DataConfig(name=name, folder=config.folder))
            rows, columns = all_rows(data.train.inputs.raw), ()
    if len(rows.shape) == 4:
        return Feeding.said(POOL, size=tuple(rows.shape[2:]), channels=rows.shape[1])
    scale = Standardized.by(rows)
    shape = tuple(rows.shape[1:])
    return Feeding.said(POOL, features=shape, mean=scale.mean, std=scale.std, columns=columns)


def load_labeled(config: LabeledConfig, key: str, pool: RawInputs | None, seed: int) -> Labeled:
    """Return the labeled examples of a configuration, in the form of the pool's; as they are if there is none."""
    rows: Tensor | tuple[str, ...]
    outputs = one_class()
    parts = ("train", "test") if config.part == "all" else (config.part,)
    if config.name.startswith("table:"):
        with one_line(partial(ConfigError.at, f"{key}.name", config.name), of=ValueError):
            table = read_table(config.name.partition(":")[2], labeled=True).taking(pool.columns if pool else ())
        rows, labels, names = table.rows, table.numbers, table.classes
    elif pool is None or isinstance(pool.rows, Tensor):
        side = pool.rows.shape[-1] if pool and isinstance(pool.rows, Tensor) and pool.rows.ndim == 4 else None
        data = DataConfig(name=config.name, folder=config.folder, image_size=side)
        found = load_dataset(f"{key}.name", config.name, data)
        rows = torch.cat([all_rows(getattr(found, part).inputs.raw) for part in parts])
        labels, names = torch.cat([getattr(found, part).labels for part in parts]), found.classes
        outputs = found.train.outputs
    else:
        read = [_dataset_texts(config.name, config.folder, f"{key}.name", part) for part in parts]
        rows, names = tuple(text for texts, _ in read for text in texts.sentences), read[0][1]
        labels = torch.cat([texts.labels for texts, _ in read])
    count = int(labels.max()) + 1 if outputs.counts_classes else outputs.channels or 0
    names = config.classes or names or tuple(str(number) for number in range(count))
    if len(names) < count:
        raise ConfigError.at(f"{key}.classes", list(names), f"it has {count} classes")
    if config.size is not None and config.size < len(labels):
        rows = choose(rows, config.size, seed) if isinstance(rows, Tensor) else _some(rows, config.size, seed)
        labels = choose(labels, config.size, seed)
    encode = pool.encode if pool else plain
    return Labeled(RawInputs(rows, encode), labels, count, names, bool(config.classes), key, config.name, outputs)


def _texts(pool: PoolConfig, folder: str | None, seed: int) -> tuple[str, ...]:
    found: tuple[str, ...] = ()
    for source in pool.sources:
        if source.name.startswith(LINES):
            with one_line(partial(ConfigError.at, "pool.sources", source.name), of=(OSError, ValueError)):
                texts = read_lines(source.name.removeprefix(LINES))
        else:
            texts = _dataset_texts(source.name, folder, "pool.sources", "train")[0].sentences
        size = source.size or (max(2, round(source.fraction * len(texts))) if source.fraction else len(texts))
        found += _some(texts, size, seed)
    found = _some(found, pool.size or len(found), derive(seed, "size"))
    if len(found) < 2:
        raise ConfigError.at("pool.sources", pool.names, f"a pool needs at least two texts, and this has {len(found)}")
    return found


def _some(texts: Sequence[str], most: int, seed: int) -> tuple[str, ...]:
    chosen = choose(torch.arange(len(texts)), min(most, len(texts)), seed)
    return tuple(texts[number] for number in chosen.tolist())


def _dataset_texts(name: str, folder: str | None, key: str, part: str) -> tuple[Texts, tuple[str, ...]]:
    if name not in TEXTS:
        raise ConfigError.at(key, name, f"the models read texts; name {', '.join(TEXTS)} or {LINES}FILE")
    train, test = (root_of(folder) / file for file in CATALOG[name].files)
    with one_line(partial(ConfigError.at, key, name), of=(OSError, ValueError)):
        return TEXTS[name].read(train if part == "train" else test), TEXTS[name].classes
