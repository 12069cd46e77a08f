"""Raw inputs that every model sees in its own way: unlabeled ones to distil on, and labelled ones to measure with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import FuseConfig, LabelledConfig
from feddf.config.sections import DataConfig, PoolConfig, SourceConfig
from feddf.data.catalogue import root_of
from feddf.data.encode import plain
from feddf.data.text import TEXTS, Texts
from feddf.data.unlabeled import choose
from feddf.oneshot.classes import places, same
from feddf.outputs import classes
from feddf.runs.loading import load_dataset
from feddf.runs.pool import PoolTask, pool_of
from feddf.saved.preprocess import Features, Images, Preprocess, Tokens, rows_of
from feddf.seeds import derive, numpy_generator
from feddf.types import Examples, Inputs

LINES = "lines:"
"""A source of texts: a file with one text in each line."""


@dataclass(frozen=True)
class Raw:
    """Inputs as they are before any model's preprocessing: a tensor, or texts.

    ``encode`` is what models without a preprocessing of their own are fed with; ``views`` as in :class:`Inputs`.
    """

    rows: Tensor | tuple[str, ...]
    encode: Callable[[Tensor], Tensor] = plain
    views: int = 1

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_plain(self) -> bool:
        """Whether the inputs are numbers that a model takes as they are."""
        return isinstance(self.rows, Tensor) and self.encode is plain

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the inputs' content."""
        if isinstance(self.rows, Tensor):
            sha = hashlib.sha256(repr((str(self.rows.dtype), tuple(self.rows.shape))).encode())
            sha.update(self.rows.contiguous().view(torch.uint8).numpy().data)
        else:
            sha = hashlib.sha256("\0".join(self.rows).encode())
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
        if isinstance(preprocess, Images) and tuple(inputs.raw.shape[1:]) != preprocess.shape:
            return replace(inputs, raw=preprocess.resized(rows_of(inputs.raw)))
        return inputs


@dataclass(frozen=True)
class Labelled:
    """Raw inputs with labels, which are numbers of the student's classes."""

    raw: Raw
    labels: Tensor
    n_classes: int

    def examples(self, preprocess: Preprocess | None) -> Examples:
        """Return the examples as a model with this preprocessing takes them."""
        return Examples(self.raw.stored(preprocess), self.labels, classes(self.n_classes))


Given = Callable[[tuple[str, ...]], Labelled]
"""(the student's classes) -> labelled examples."""


def unlabeled(config: FuseConfig, preprocesses: Sequence[Preprocess | None], *, trust: bool = False) -> Raw:
    """Return the pool of a configuration, in the largest form that some model takes."""
    seed = derive(config.seed, "pool")
    if any(isinstance(one, Tokens) for one in preprocesses):
        return Raw(_texts(config.pool, config.folder, seed))
    for source in config.pool.sources:
        if source.name in ("train", "validation"):
            raise ConfigError.at("pool.sources", source.name, "there are no clients here; name other unlabeled inputs")
        if source.name.startswith(LINES):
            raise ConfigError.at("pool.sources", source.name, "no model reads texts; name a folder of images")
    images = _images(config.pool, config.folder, largest(preprocesses), seed, trust)
    return Raw(rows_of(images.raw), views=images.views)


def _images(pool: PoolConfig, folder: str | None, shape: tuple[int, int, int], seed: int, trust: bool) -> Inputs:
    like = Inputs(torch.zeros((0, *shape), dtype=torch.uint8), plain)
    data = DataConfig(name=pool.sources[0].name, folder=folder, image_size=shape[-1])
    found = pool_of(pool, PoolTask(like, like, like, data, pool.size, trust=trust), seed)
    assert found is not None, "there are sources"
    return found


def largest(preprocesses: Sequence[Preprocess | None]) -> tuple[int, int, int]:
    """Return the form in which images are kept: that of the largest model, in colour if some model takes colours."""
    shapes = [one.shape for one in preprocesses if isinstance(one, Images)]
    if not shapes:
        raise ConfigError("no model says how large its images are; say it with student.size")
    channels, height, width = (max(sides) for sides in zip(*shapes, strict=True))
    return channels, height, width


def labelled(config: LabelledConfig, key: str, classes: Sequence[str], like: Raw, seed: int) -> Labelled:
    """Return the labelled examples of a configuration, in the form of the pool's; labels are matched by class name."""
    rows, labels, names = _labelled(config, key, like)
    names = config.classes or names or [str(number) for number in range(int(labels.max()) + 1)]
    if len(names) <= int(labels.max()):
        raise ConfigError.at(f"{key}.classes", list(names), f"it has {int(labels.max()) + 1} classes")
    if places(names, classes) is None and not config.classes and len(names) == len(classes) and numbered(classes):
        names = list(classes)  # nobody named the outputs: they are taken to be in the data set's order
    used = [names[int(number)] for number in labels.unique()]
    known = {same(name): number for number, name in enumerate(classes)}
    if odd := [name for name in used if same(name) not in known]:
        allowed = f"its class '{odd[0]}' is none of the student's: {', '.join(classes[:12])}"
        raise ConfigError.at(f"{key}.name", config.name, allowed)
    table = torch.tensor([known.get(same(name), -1) for name in names])
    labels = table[labels]
    if config.size is not None and config.size < len(labels):
        chosen = torch.from_numpy(numpy_generator(seed).choice(len(labels), config.size, replace=False)).sort().values
        labels = labels[chosen]
        rows = rows[chosen] if isinstance(rows, Tensor) else tuple(rows[int(number)] for number in chosen)
    return Labelled(Raw(rows, like.encode), labels, len(classes))


def numbered(classes: Sequence[str]) -> bool:
    """Say whether classes are just numbers."""
    return all(name.isdigit() for name in classes)


def _labelled(config: LabelledConfig, key: str, like: Raw) -> tuple[Tensor | tuple[str, ...], Tensor, Sequence[str]]:
    if not isinstance(like.rows, Tensor):
        texts, names = _dataset_texts(config.name, config.folder, f"{key}.name", config.part)
        return tuple(texts.sentences), texts.labels, names
    shape = tuple(like.rows.shape[1:])
    data = DataConfig(name=config.name, folder=config.folder, image_size=shape[-1] if len(shape) == 3 else None)
    found = load_dataset(f"{key}.name", config.name, data)
    examples = found.train if config.part == "train" else found.test
    return rows_of(examples.inputs.raw), examples.labels, found.classes


def _texts(pool: PoolConfig, folder: str | None, seed: int) -> tuple[str, ...]:
    found: list[str] = []
    for source in pool.sources:
        texts = _source_texts(source, folder)
        size = source.size or (max(2, round(source.fraction * len(texts))) if source.fraction else None)
        found += _some(texts, size, seed)
    found = _some(found, pool.size, derive(seed, "size"))
    if len(found) < 2:
        raise ConfigError.at("pool.sources", pool.names, f"a pool needs at least two texts, and this has {len(found)}")
    return tuple(found)


def _some(texts: list[str], size: int | None, seed: int) -> list[str]:
    if size is None or size >= len(texts):
        return texts
    return [texts[int(number)] for number in choose(torch.arange(len(texts)), size, seed)]


def _source_texts(source: SourceConfig, folder: str | None) -> list[str]:
    if source.name.startswith(LINES):
        path = Path(source.name.removeprefix(LINES)).expanduser()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError.at("pool.sources", source.name, f"cannot be read: {error}") from None
        return [line.strip() for line in lines if line.strip()]
    return _dataset_texts(source.name, folder, "pool.sources", "train")[0].sentences


def _dataset_texts(name: str, folder: str | None, key: str, part: str) -> tuple[Texts, Sequence[str]]:
    if name not in TEXTS:
        raise ConfigError.at(key, name, f"the models read texts; name {', '.join(TEXTS)} or {LINES}FILE")
    source = TEXTS[name]
    path = root_of(folder) / source.folder / (source.train if part == "train" else source.test)
    try:
        return source.read(path), source.classes
    except (OSError, ValueError) as error:
        raise ConfigError.at(key, name, str(error)) from None
