"""What every source of unlabeled inputs promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from feddf.runs.config import parse
from PIL import Image

from conftest import stripes
from feddf.data import Dataset
from feddf.generator import train
from feddf.runs.build import build_task
from feddf.types import Inputs


def bands() -> Dataset:
    return Dataset("bands", stripes(240, 1), stripes(60, 2))


def other() -> Dataset:
    return Dataset("other", stripes(90, 3), stripes(60, 4), classes=("a", "b", "c"))


SOURCES: dict[str, Any] = {
    "data set": f"{__name__}:other",
    "fraction": {"source": f"{__name__}:other", "fraction": 0.5},
    "classes": {"source": f"{__name__}:other", "classes": 2},
    "validation": "validation",
    "train": "train",
    "noise": "noise",
    "folder": "folder:FOLDER/pictures",
    "generator": "generator:FOLDER/generator",
    "mix": ["noise", f"{__name__}:other", "validation"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for number in range(12):
        (root / "pictures" / "class").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 10), (number * 20, 5, 9)).save(root / "pictures" / "class" / f"{number}.png")
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    train(images, root / "generator", steps=1, batch=8, width=4, checkpoint_every=1)
    return root


@pytest.fixture(params=sorted(SOURCES))
def spec(request: pytest.FixtureRequest, folder: Path) -> Any:
    given = SOURCES[request.param]
    return given.replace("FOLDER", str(folder)) if isinstance(given, str) else given


def pool_of(spec: Any, **changes: Any) -> tuple[Inputs, Any]:
    values = {"data": f"{__name__}:bands", "prototypes": ["mlp"], "clients": 4, "engine": "in-process", "pool_size": 8}
    task = build_task(parse({**values, "pool": spec, **changes}))
    assert task.pool is not None
    return task.pool, task


def test_its_inputs_have_the_form_that_the_models_expect(spec: Any) -> None:
    pool, task = pool_of(spec)
    like = task.train.inputs
    assert tuple(pool.raw.shape[1:]) == tuple(like.raw.shape[1:])
    assert pool.raw.dtype == like.raw.dtype
    assert pool.encode == like.encode
    batch = pool.batch(torch.arange(2))
    assert batch.shape == (2, *task.data.shape)
    assert batch.isfinite().all()


def test_it_has_no_labels_and_not_more_inputs_than_asked_for(spec: Any) -> None:
    pool, _ = pool_of(spec)
    assert not hasattr(pool, "labels")
    assert 2 <= len(pool) <= 8


def test_the_seed_decides(spec: Any) -> None:
    one, same = (pool_of(spec)[0] for _ in range(2))
    rows = torch.arange(len(one))
    assert torch.equal(one.raw[rows], same.raw[rows])


def test_it_leaves_validation_and_test_as_they_are(spec: Any) -> None:
    _, task = pool_of(spec)
    _, other_task = pool_of("noise")
    assert torch.equal(task.validation.labels, other_task.validation.labels)
    assert torch.equal(task.data.test.labels, other_task.data.test.labels)
