"""Real data from packages whose answer is no single class: several digits in a picture, or on a photograph; diabetes.

Pictures are composed, always the same, of MNIST's digits. Those of the test set are composed of digits and of parts of
photographs that no training picture has.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf.config.sections import DataConfig
from feddf.data.datasets import Dataset, Part, Pixels, held_out, mnist_5k, package_for, plain
from feddf.outputs import classes, labels, values
from feddf.seeds import derive, torch_generator
from feddf.types import Examples, Inputs

TRAIN, TEST = 8_000, 2_000  # pictures
DIGITS = 6  # of the ten, those in scenes: class c + 1 is the digit c, and class 0 whatever is none
SITES = ((0, 1, 2), (0, 3, 4), (0, 5, 6))  # which classes each of three sites labels


def diabetes(data: DataConfig) -> Dataset:
    """442 patients, ten measurements each, and the progression of their disease after a year (Efron et al. 2004).

    It comes with scikit-learn. The groups are fifths by body mass index.
    """
    with package_for("diabetes", "scikit-learn"):
        from sklearn.datasets import load_diabetes
    found = load_diabetes()
    inputs = torch.from_numpy(found.data * len(found.data) ** 0.5).float()
    parts = held_out("diabetes", inputs, torch.from_numpy(found.target).float().unsqueeze(1))
    by_mass = [raw[:, 2].argsort().argsort() * 5 // len(raw) for raw, _ in parts]
    train, test = (
        Examples(Inputs(raw, plain), wanted, values(1), groups)
        for (raw, wanted), groups in zip(parts, by_mass, strict=True)
    )
    return Dataset("diabetes", train, test, classes=("progression",))


def digit_grid(data: DataConfig) -> Dataset:
    """Pictures of up to four MNIST digits, each in a quarter of 28×28 pixels; the labels are which digits are there."""
    name, source, encode = "digit-grid", mnist_5k(data), Pixels((0.13,), (0.28,))

    def part(which: str, examples: Examples, n: int) -> Examples:
        shown, numbers, there = _cells(name, which, _small(examples, 14), n)
        occurs = (F.one_hot(numbers, 10) * there.unsqueeze(2)).amax(dim=1).float()
        return Examples(Inputs(_joined(shown * there[:, :, None, None]).unsqueeze(1), encode), occurs, labels(10))

    train, test = part("train", source.train, TRAIN), part("test", source.test, TEST)
    return Dataset(name, train, test, classes=tuple("0123456789"))


def digit_scenes(data: DataConfig) -> Dataset:
    """MNIST digits on photographs of scikit-learn, 32×32 pixels; the labels are masks: which digit each pixel is of.

    There are three groups of pictures, sites that know two of the six digits each: to the others they are background.
    """
    name, source, encode = "digit-scenes", mnist_5k(data), Pixels((0.45,) * 3, (0.27,) * 3)
    outputs = classes(DIGITS + 1, (32, 32), background=0)

    def part(which: str, examples: Examples, n: int) -> Examples:
        raw, numbers = _small(examples, 14)
        few = numbers < DIGITS
        shown, numbers, there = _cells(name, which, (F.pad(raw[few], (1, 1, 1, 1)), numbers[few]), n)
        random = torch_generator(derive(0, name, which, "scene"))
        ink = _joined(shown * there[:, :, None, None]).unsqueeze(1).float() / 255
        color = torch.randint(128, 256, (n, 3, 1, 1), generator=random)
        pictures = (_photographs(which, n, random) * (1 - ink) + color * ink).round().to(torch.uint8)
        near = F.max_pool2d(shown.float(), 3, stride=1, padding=1) > 100  # a digit's strokes and what is beside them
        mask = _joined(near * there[:, :, None, None] * (numbers + 1)[:, :, None, None])
        return Examples(Inputs(pictures, encode), mask, outputs, torch.arange(n) % len(SITES))

    train, test = part("train", source.train, TRAIN), part("test", source.test, TEST)
    names = ("background", *map(str, range(DIGITS)))
    return Dataset(name, train, test, classes=names, known=SITES)


def _small(examples: Examples, side: int) -> Part:
    """Return digits at a size, and which they are."""
    raw = examples.inputs.raw[torch.arange(len(examples))]
    return F.interpolate(raw.float(), size=(side, side), mode="area").squeeze(1).round().to(
        torch.uint8
    ), examples.labels


def _cells(name: str, which: str, source: Part, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for n pictures four digits each, which they are, and whether each is there: half are, one at least."""
    random = torch_generator(derive(0, name, which))
    chosen = torch.randint(0, len(source[1]), (n, 4), generator=random)
    there = torch.rand((n, 4), generator=random) < 0.5
    there |= F.one_hot(torch.randint(0, 4, (n,), generator=random), 4).bool()
    return source[0][chosen], source[1][chosen], there


def _joined(cells: Tensor) -> Tensor:
    """Return n × 4 × h × w cells as n × 2h × 2w pictures."""
    n, _, height, width = cells.shape
    return cells.view(n, 2, 2, height, width).transpose(2, 3).reshape(n, 2 * height, 2 * width)


def _photographs(which: str, n: int, random: torch.Generator) -> Tensor:
    """Return n pieces of two photographs, 32×32: of their left parts to train on, of the right ones to test with."""
    photographs = _sample_images()
    half = photographs.shape[3] // 2
    first = 0 if which == "train" else half
    image = torch.randint(0, len(photographs), (n,), generator=random)
    top = torch.randint(0, photographs.shape[2] - 32, (n,), generator=random)
    left = torch.randint(first, first + half - 32, (n,), generator=random)
    windows = photographs.unfold(2, 32, 1).unfold(3, 32, 1)
    return windows[image, :, top, left].float()


@cache
def _sample_images() -> Tensor:
    with package_for("digit-scenes", "scikit-learn, and Pillow", "demo,images"):
        from sklearn.datasets import load_sample_images

        found = load_sample_images().images
    return torch.stack([torch.tensor(one).permute(2, 0, 1) for one in found])
