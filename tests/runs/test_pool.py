"""Every source of unlabeled inputs, from its name in a configuration to what the student learns on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import stripes
from feddf.config import ConfigError, DataConfig, parse
from feddf.config.keys import nested
from feddf.data.datasets import Dataset
from feddf.runs.build import Task, build, build_task
from feddf.types import Inputs

NAMES = ("oak tree", "Trucks", "sea fish")


def bands(data: DataConfig) -> Dataset:
    return Dataset("bands", stripes(240, 1), stripes(60, 2), classes=("maple", "lorry", "fish"))


def other(data: DataConfig | None = None) -> Dataset:
    return Dataset("other", stripes(90, 3), stripes(60, 4), classes=NAMES)


def nameless(data: DataConfig) -> Dataset:
    return replace(other(), classes=())


def with_unlabeled(data: DataConfig) -> Dataset:
    gray = torch.full((30, 1, 8, 8), 9, dtype=torch.uint8)
    return replace(other(), unlabeled=Inputs(gray, stripes(3, 0).inputs.encode))


class Painter(nn.Module):
    """A user's own generator: the brightness of an image is its first latent."""

    def forward(self, latents: Tensor) -> Tensor:
        return latents[:, :1].tanh()[:, :, None, None].expand(-1, 1, 8, 8)


def painter(data: DataConfig) -> nn.Module:
    return Painter()


def numbers(data: DataConfig) -> int:
    return 3


BASE: dict[str, Any] = {
    "data": {"name": f"{__name__}:bands", "validation": 0.1}, "prototypes": ["mlp"], "clients": {"total": 4},
    "run": {"engine": "in-process"},
}  # fmt: skip
HERE = f"{__name__}:"


def task_with(sources: Any, changes: dict[str, Any] | None = None, /, trust: bool = False, **pool: Any) -> Task:
    """Return the task with these sources of the pool; one needs no list."""
    return build_task(parse(nested(BASE, {"pool": {"sources": sources, **pool}, **(changes or {})})), trust=trust)


def pixels(pool: Inputs) -> Tensor:
    return pool.raw[torch.arange(len(pool))]


def rows(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_another_data_set_and_a_part_of_it() -> None:
    whole = pixels(task_with(HERE + "other").pool)
    assert len(whole) == 90
    assert len(pixels(task_with(HERE + "other", size=20).pool)) == 20
    part = pixels(task_with({"name": HERE + "other", "fraction": 0.1}).pool)
    assert len(part) == 9
    assert rows(part) <= rows(whole)


def test_the_unlabeled_part_is_preferred() -> None:
    assert set(pixels(task_with(HERE + "with_unlabeled").pool).flatten().tolist()) == {9}


def test_classes_by_number_or_name() -> None:
    labels = other().train.labels
    images = pixels(other().train.inputs)
    named = pixels(task_with({"name": HERE + "other", "classes": ["oak tree"]}).pool)
    assert rows(named) == rows(images[labels == 0])
    two = pixels(task_with({"name": HERE + "other", "classes": 2}).pool)
    assert len(two) == 60
    numbered = pixels(task_with({"name": HERE + "nameless", "classes": [2]}).pool)
    assert rows(numbered) == rows(images[labels == 2])
    assert len(pixels(task_with({"name": HERE + "nameless", "classes": 1}).pool)) == 30


def test_classes_that_overlap_are_avoided() -> None:
    labels, images = other().train.labels, pixels(other().train.inputs)
    free = pixels(task_with({"name": HERE + "other", "avoid": ["truck", "Tree"]}).pool)
    assert rows(free) == rows(images[labels == 2])
    by_data = pixels(task_with({"name": HERE + "other", "avoid": HERE + "bands"}).pool)  # a fish is among its classes
    assert rows(by_data) == rows(images[labels != 2])


def test_an_image_has_as_many_views_as_the_configuration_says() -> None:
    one, three = task_with(HERE + "other", size=20).pool, task_with(HERE + "other", size=20, views=3).pool
    assert (len(three), three.views) == (60, 3)
    assert torch.equal(pixels(three)[:20], pixels(one)), "the inputs themselves come first"
    assert len(rows(pixels(three))) > 50, "the others are different"
    points = task_with("plane", {"data.name": "toy"}, views=3).pool
    assert (len(points), points.views) == (60, 1), "points have no views"


def test_noise_is_uniform_bytes() -> None:
    noise = pixels(task_with("noise", size=400).pool).double()
    assert noise.shape == (400, 1, 8, 8)
    assert float(noise.mean()) == pytest.approx(127.5, abs=2)
    assert float(noise.std()) == pytest.approx(256 / 12**0.5, abs=2)
    assert len(task_with("noise").pool) == 10_000


def test_the_servers_validation_inputs() -> None:
    task = task_with("validation")
    assert rows(pixels(task.pool)) == rows(pixels(task.validation.inputs))
    assert len(task_with("validation", size=5).pool) == 5
    assert len(task_with("validation", size=5000).pool) == 24


@pytest.mark.parametrize(("source", "share"), [("train", 0.5), ({"name": "train", "fraction": 0.25}, 0.25)])
def test_a_share_of_the_training_data_is_set_apart_from_all_clients(source: Any, share: float) -> None:
    task = task_with(source)
    assert len(task.pool) == round(share * 216)
    assert len(task.train) == 216 - len(task.pool)
    assert not rows(pixels(task.pool)) & rows(pixels(task.train.inputs))
    assert not rows(pixels(task.pool)) & rows(pixels(task.validation.inputs))
    assert sum(len(shard) for shard in task.shards) == len(task.train)


def test_a_mix_of_several() -> None:
    sources = [{"name": HERE + "other", "size": 10}, {"name": "noise", "size": 7}, "validation"]
    assert len(task_with(sources).pool) == 10 + 7 + 24
    assert len(task_with(sources, size=12).pool) == 12


def test_images_of_a_frozen_generator(tmp_path: Path) -> None:
    paint = nn.Sequential(nn.Linear(5, 3 * 32 * 32), nn.Tanh(), nn.Unflatten(1, (3, 32, 32)))
    torch.export.save(torch.export.export(paint, (torch.zeros(8, 5),)), tmp_path / "made.pt2")
    pools = [pixels(task_with(f"generator:{tmp_path / 'made.pt2'}", size=20, trust=True).pool) for _ in range(2)]
    assert pools[0].shape == (20, 1, 8, 8)  # made gray and small, as the models expect
    assert torch.equal(*pools)


def test_a_users_own_generator() -> None:
    made, other_seed = (pixels(task_with(HERE + "painter", {"seed": seed}, size=50).pool) for seed in (0, 1))
    assert not torch.equal(made, other_seed)
    assert made.shape == (50, 1, 8, 8)
    assert len(made[:, 0, 0, 0].unique()) > 10


MISTAKES: dict[str, tuple[Any, str]] = {
    "too few": ({"name": "noise", "size": 1}, "greater than or equal to 2"),
    "too many": ({"name": HERE + "other", "size": 91}, "91 inputs were asked for, and the source has 90"),
    "too many classes": ({"name": HERE + "other", "classes": 4}, "4 classes were asked for, and 3 have no word"),
    "no such class": ({"name": HERE + "other", "classes": ["emu"]}, "no class 'emu'; it has oak tree"),
    "all avoided": ({"name": HERE + "other", "avoid": ["tree", "truck", "fish"]}, "no class is left"),
    "no names": ({"name": HERE + "nameless", "classes": ["oak tree"]}, "its classes have no names"),
    "neither data nor generator": (HERE + "numbers", "must give a feddf.Dataset or a generator, and gave a int"),
    "no such folder": ("folder:/nowhere", "there is no image file or folder /nowhere"),
    "no such generator": ("generator:/nowhere", "/nowhere"),
    "no such data": ("cifar11", "did you mean 'cifar10"),
    "the clients' own": (HERE + "bands", "the source 'train' takes a share of them"),
    "a wrong word": (
        {"name": "noise", "brightness": 3},
        "unknown key 'pool.sources.0.brightness'; the keys of [pool.sources] are: name,",
    ),
    "classes of noise": ({"name": "noise", "classes": 3}, "pool.sources = 'noise': it has no classes to choose from"),
    "classes of train": ({"name": "train", "avoid": ["x"]}, "pool.sources = 'train': it has no classes to choose from"),
    "fraction of noise": ({"name": "noise", "fraction": 0.1}, "give it a size, not a fraction"),
    "size and fraction": ({"name": HERE + "other", "size": 5, "fraction": 0.1}, "a size or a fraction, not both"),
    "train twice": (["train", {"name": "train", "fraction": 0.1}], "'train' is named twice"),
    "everything": ({"name": "train", "fraction": 1.0}, "nothing would be left to train on"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str) -> None:
    sources, said = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        task_with(sources)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"data.name": "toy", "pool.sources": "plane", "pool.augment": True, "ensemble.cache": False},
            "'toy' are not images",
        ),
        (
            {"pool.sources": {"name": "noise", "size": 3}, "distill.early_stopping": "held-out-loss"},
            "a pool of 3 is too small",
        ),
        (
            {"prototypes": [{"model": "cnn", "depth": 1}], "local.binary": "error-feedback"},
            "no layer between",
        ),
    ],
)
def test_what_would_fail_later_is_said_before_training(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(parse(nested(BASE, {"pool.sources": "noise", **changes})))


def test_without_validation_there_is_nothing_to_distil_on() -> None:
    with pytest.raises(ConfigError, match="no validation inputs to distill on"):
        task_with("validation", {"data.validation": 0.0, "distill.early_stopping": "none"})
