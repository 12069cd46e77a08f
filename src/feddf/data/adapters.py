"""Data sets of other libraries as a :class:`feddf.Dataset`: torch, folders of images, Hugging Face.

Everything is read once into memory. A source without a test part gives a fifth of its examples, always the same, to it.
Images of bytes keep their bytes and are normalized, each channel with the training images' mean and deviation; numbers
are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddf.config.errors import ConfigError, one_line
from feddf.config.sections import DataConfig
from feddf.data.datasets import Dataset, Part, held_out, image_folder, measured, of_parts, plain, wrong_parts

LABELS = ("label", "labels", "fine_label", "target", "class")
"""The names under which a column of labels is looked for."""


def from_torch(
    train: Any, test: Any = None, *, name: str = "own", classes: Sequence[str] = (), flips: bool = False
) -> Dataset:
    """Return a data set of torch's ``Dataset`` objects (map-style), whose items are ``(input, label)``.

    An input is a tensor, an array or a PIL image; all have one shape.

    Args:
        train: the training examples.
        test: the test examples; if there are none, a fifth of the training examples.
        name: the name of the data set.
        classes: the names of the classes, in order.
        flips: whether a mirrored image is still of its class.

    >>> from torch.utils.data import TensorDataset
    >>> data = from_torch(TensorDataset(torch.zeros(10, 3, 8, 8, dtype=torch.uint8), torch.arange(10) % 2))
    >>> len(data.train), len(data.test), data.shape
    (8, 2, (3, 8, 8))
    """
    names = tuple(classes or getattr(train, "classes", ()))
    return _dataset(name, _items(train), None if test is None else _items(test), tuple(map(str, names)), flips)


def from_image_folder(path: str | Path, *, image_size: int | None = None) -> Dataset:
    """Return the images of a folder in torchvision's ``ImageFolder`` layout: a folder for each class.

    With ``train`` and ``test`` (or ``val``) on top, those are the parts. In a configuration, ``folder:PATH`` is
    the same.

    Args:
        path: the folder.
        image_size: resize images to this height and width.
    """
    with one_line(partial(ConfigError.at, "path", str(path)), of=(ValueError, FileNotFoundError)):
        return image_folder(path, DataConfig(name=f"folder:{path}", image_size=image_size))


def from_hugging_face(
    dataset: Any,
    test: Any = None,
    *,
    column: str | None = None,
    label: str | None = None,
    name: str = "own",
    flips: bool = False,
) -> Dataset:
    """Return a data set of a Hugging Face ``datasets.Dataset``, or of a ``DatasetDict`` with the parts train and test.

    Texts have to be tokenized first: give the column of token ids.

    Args:
        dataset: the training part, or both parts.
        test: the test part; if there is none, a fifth of the training part.
        column: the column of inputs (default: the only one besides the labels, or the one of images).
        label: the column of labels (default: one with a usual name).
        name: the name of the data set.
        flips: whether a mirrored image is still of its class.
    """
    if isinstance(dataset, Mapping):
        if "train" not in dataset:
            raise ConfigError.at("dataset", sorted(dataset), "needs a part called 'train'")
        test = test if test is not None else dataset.get("test", dataset.get("validation"))
        dataset = dataset["train"]
    label = label or next((name for name in LABELS if name in dataset.column_names), None)
    if label is None:
        raise ConfigError(f"no column is called {' or '.join(LABELS)}; name it: label=...")
    column = column or _inputs_of(dataset, label)
    names = tuple(getattr(dataset.features.get(label), "names", None) or ())
    tested = None if test is None else _part(test[column], test[label])
    return _dataset(name, _part(dataset[column], dataset[label]), tested, names, flips)


def _items(dataset: Any) -> Part:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"from_torch needs a data set with a length and items, and got a {type(dataset).__name__}")
    found = [dataset[index] for index in range(len(dataset))]
    if not found or not isinstance(found[0], tuple | list) or len(found[0]) != 2:
        raise ConfigError("from_torch needs items that are (input, label)")
    return _part(*zip(*found, strict=True))


def _part(inputs: Iterable[Any], labels: Iterable[Any]) -> Part:
    tensors = [_tensor(one) for one in inputs]
    shapes = sorted({tuple(one.shape) for one in tensors})
    if len(shapes) > 1:
        raise ConfigError(f"the inputs have different shapes, for instance {shapes[0]} and {shapes[-1]}; resize them")
    return torch.stack(tensors), torch.tensor([int(one) for one in labels])


def _tensor(one: Any) -> Tensor:
    if isinstance(one, Tensor):
        return one
    if isinstance(one, str):
        raise ConfigError.at("input", one, "is text; tokenize it first, and name the column of token ids")
    is_image = hasattr(one, "getbands")  # PIL's
    array = np.array(one.convert("RGB") if is_image and one.mode not in ("L", "RGB") else one)
    if is_image:
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    elif array.dtype == np.float64:
        array = array.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(array))


def _dataset(name: str, train: Part, test: Part | None, classes: tuple[str, ...], flips: bool) -> Dataset:
    train, test = held_out(name, *train) if test is None else (train, test)
    encode = measured(train[0]) if train[0].dtype == torch.uint8 and train[0].ndim == 4 else plain
    n_classes = len(classes) or int(torch.cat([train[1], test[1]]).max()) + 1
    found = of_parts(name, train, test, encode, n_classes, flips=flips, classes=classes)
    if wrong := wrong_parts(found):
        raise ConfigError(f"the data set '{name}' has {wrong}")
    return found


def _inputs_of(dataset: Any, label: str) -> str:
    others = [name for name in dataset.column_names if name != label]
    images = [name for name in others if type(dataset.features.get(name)).__name__ == "Image"]
    if len(others) == 1 or len(images) == 1:
        return str((images or others)[0])
    raise ConfigError(f"which column holds the inputs? column=... is one of {', '.join(others)}")
