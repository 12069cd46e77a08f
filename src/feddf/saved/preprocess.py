"""From what people have (image files, texts, bytes) to what a model expects. Values that are written down as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from feddf.config.errors import FeddfError
from feddf.data.datasets import Pixels, plain
from feddf.data.files import read_image
from feddf.data.text import Tokenizer, tokenizer, widened
from feddf.data.unlabeled import resize
from feddf.types import Inputs, Rows


class InputError(FeddfError):
    """What a model is given is nothing that it takes; one line says what it is."""

    exit_code = 2


@dataclass(frozen=True)
class Images:
    """Bytes, resized to ``shape`` (channels, height, width), in an order of colors: (x / 255 − mean) / std.

    >>> Images((1, 2, 2), (0.5,), (0.5,))(torch.zeros((1, 1, 2, 2), dtype=torch.uint8)).flatten()
    tensor([-1., -1., -1., -1.])
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    order: Literal["RGB", "BGR"] = "RGB"

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError(
                f"{len(self.mean)} means and {len(self.std)} deviations do not fit {self.shape[0]} channels"
            )
        if min(self.std) <= 0:
            raise ValueError(f"deviations must be above 0, and are {self.std}")

    def __call__(self, raw: Tensor) -> Tensor:
        """Encode an N×C×H×W batch of bytes of any size."""
        pixels = self.resized(raw)
        return Pixels(self.mean, self.std)(pixels.flip(1) if self.order == "BGR" else pixels)

    def resized(self, raw: Tensor) -> Tensor:
        """Return images as bytes at the model's own size."""
        return resize(raw, self.shape)

    def read(self, given: Sequence[Any]) -> Tensor:
        """Return image files (or arrays of H×W or H×W×C bytes) as one batch of bytes at the model's own size."""
        _, height, width = self.shape
        side = height if height == width else None
        return torch.cat([self.resized(_pixels(one, side)) for one in given])


@dataclass(frozen=True)
class Tokens:
    """Texts, as rows of ``length`` token numbers."""

    tokenizer: str
    length: int

    @cached_property
    def _found(self) -> Tokenizer:
        return tokenizer(self.tokenizer, self.length)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one encoded text."""
        return (self.length,)

    @property
    def padding(self) -> int:
        """The number of the token that fills a row."""
        return self._found.padding

    def __call__(self, raw: Tensor) -> Tensor:
        """Encode rows of token numbers."""
        return widened(raw)

    def read(self, given: Sequence[Any]) -> Tensor:
        """Return texts as rows of token numbers."""
        return self._found.tokenize([str(one) for one in given])


@dataclass(frozen=True)
class Features:
    """Numbers that a model takes as they are."""

    shape: tuple[int, ...]

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the numbers."""
        return raw

    def read(self, given: Sequence[Any]) -> Tensor:
        """Return rows of numbers as one batch."""
        rows = torch.tensor(np.asarray(given, dtype=np.float32))
        if tuple(rows.shape[1:]) != self.shape:
            raise InputError(f"the model takes inputs of shape {self.shape}, and was given {tuple(rows.shape[1:])}")
        return rows


Preprocess = Images | Tokens | Features
KINDS: dict[str, type[Preprocess]] = {"images": Images, "tokens": Tokens, "features": Features}


def described(preprocess: Preprocess) -> dict[str, Any]:
    """Return a preprocessing as JSON."""
    kind = next(name for name, found in KINDS.items() if isinstance(preprocess, found))
    return {"kind": kind, **asdict(preprocess)}


def from_description(values: dict[str, Any]) -> Preprocess:
    """Return a preprocessing from its JSON; :class:`ValueError` says what is wrong with it."""
    kind = KINDS.get(str(values.get("kind")))
    if kind is None:
        raise ValueError(f"a preprocessing is one of {', '.join(KINDS)}, not {values.get('kind')!r}")
    known = {field.name for field in fields(kind)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if name in known}
    try:
        return kind(**chosen)
    except TypeError as error:
        raise ValueError(f"a preprocessing of {values['kind']} lacks something: {error}") from None


def of_inputs(inputs: Inputs, tokenizer: str | None = None) -> Preprocess | None:
    """Return how a data set's inputs are encoded, or ``None`` for a user's own function, which no file can hold."""
    shape = tuple(inputs.raw.shape[1:])
    if isinstance(inputs.encode, Pixels) and len(shape) == 3:
        return Images((shape[0], shape[1], shape[2]), inputs.encode.mean, inputs.encode.std)
    if inputs.encode is widened and tokenizer is not None:
        return Tokens(tokenizer, shape[0])
    return Features(shape) if inputs.encode is plain else None


def _pixels(given: Any, side: int | None) -> Tensor:
    """Return one image as a batch; a file is cut to a square and resized as those of a folder of images are."""
    if isinstance(given, str | Path):
        if not Path(given).is_file():
            raise InputError(f"there is no image file {given}")
        try:
            given = read_image(Path(given), side)
        except ValueError as error:
            raise InputError(str(error)) from error
    if isinstance(given, Tensor):
        return given[None] if given.ndim == 3 else given
    array = np.array(given)  # a copy: what Pillow gives is not writable
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise InputError(f"an image is H×W or H×W×C bytes, and this is {array.shape} of {array.dtype}")
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)[None]


def rows_of(rows: Rows) -> Tensor:
    """Return raw storage as one tensor."""
    return rows if isinstance(rows, Tensor) else rows[torch.arange(len(rows))]
