"""What every source of unlabeled inputs promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from conftest import stripes
from feddf.config import DataConfig, parse
from feddf.config.keys import nested
from feddf.config.names import SOURCES
from feddf.data.datasets import Dataset
from feddf.runs.build import Task, build_task
from feddf.types import Inputs


def bands(data: DataConfig) -> Dataset:
    return Dataset("bands", stripes(240, 1), stripes(60, 2))


def other(data: DataConfig) -> Dataset:
    return Dataset("other", stripes(90, 3), stripes(60, 4), classes=("a", "b", "c"))


POOLS: dict[str, list[Any]] = {
    **{name: [f"{name}FOLDER/{name[:-1]}" if name.endswith(":") else name] for name in SOURCES},
    "generator:": ["generator:FOLDER/generator.pt2"],
    "data set": [f"{__name__}:other"],
    "fraction": [{"name": f"{__name__}:other", "fraction": 0.5}],
    "classes": [{"name": f"{__name__}:other", "classes": 2}],
    "folder:": ["folder:FOLDER/folder"],
    "table:": ["table:FOLDER/table.csv"],
    "mix": ["noise", f"{__name__}:other", "validation"],
}
"""Every kind of source by its name, and any data set, or a part of one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for number in range(12):
        for name in ("folder", "images"):
            (root / name / "class").mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (10, 10), (number * 20, 5, 9)).save(root / name / "class" / f"{number}.png")
    rows = [f"{number / 7},{-number},{number % 3}" for number in range(40)]
    (root / "table.csv").write_text("\n".join(["x,y,label", *rows]))
    paint = nn.Sequential(nn.Linear(5, 3 * 32 * 32), nn.Tanh(), nn.Unflatten(1, (3, 32, 32)))
    torch.export.save(torch.export.export(paint, (torch.zeros(8, 5),)), root / "generator.pt2")
    return root


@pytest.fixture(params=sorted(POOLS))
def sources(request: pytest.FixtureRequest, folder: Path) -> list[Any]:
    given = POOLS[request.param]
    return [one.replace("FOLDER", str(folder)) if isinstance(one, str) else one for one in given]


def pool_of(sources: list[Any], data: str) -> tuple[Inputs, Task]:
    values = {
        "data.name": data, "prototypes": ["mlp"], "clients.total": 4, "run.engine": "in-process", "pool.size": 8,
        "pool.sources": sources,
    }  # fmt: skip
    task = build_task(parse(nested({}, values)), trust=True)
    assert task.pool is not None
    return task.pool, task


@pytest.fixture
def data(sources: list[Any]) -> str:
    points = str(sources[0]).startswith(("plane", "table:"))  # which stand in for points only
    return "toy" if points else f"{__name__}:bands"


def test_its_inputs_have_the_form_that_the_models_expect(sources: list[Any], data: str) -> None:
    pool, task = pool_of(sources, data)
    like = task.train.inputs
    assert tuple(pool.raw.shape[1:]) == tuple(like.raw.shape[1:])
    assert pool.raw.dtype == like.raw.dtype
    assert pool.encode == like.encode
    batch = pool.batch(torch.arange(2))
    assert batch.shape == (2, *task.data.shape)
    assert batch.isfinite().all()


def test_it_has_no_labels_and_not_more_inputs_than_asked_for(sources: list[Any], data: str) -> None:
    pool, _ = pool_of(sources, data)
    assert not hasattr(pool, "labels")
    assert 2 <= len(pool) <= 8


def test_the_seed_decides(sources: list[Any], data: str) -> None:
    one, same = (pool_of(sources, data)[0] for _ in range(2))
    rows = torch.arange(len(one))
    assert torch.equal(one.raw[rows], same.raw[rows])


def test_it_leaves_validation_and_test_as_they_are(sources: list[Any], data: str) -> None:
    _, task = pool_of(sources, data)
    _, other_task = pool_of(["noise"], data)
    assert torch.equal(task.validation.labels, other_task.validation.labels)
    assert torch.equal(task.data.test.labels, other_task.data.test.labels)
