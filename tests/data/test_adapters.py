from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from feddf import Dataset, from_hugging_face, from_image_folder, from_torch
from feddf.config import ConfigError


class Photos(torch.utils.data.Dataset[tuple[Any, int]]):
    classes = ("cat", "dog")

    def __init__(self, n: int, side: int = 6, mode: str = "RGB") -> None:
        self.n, self.side, self.mode = n, side, mode

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return Image.new(self.mode, (self.side, self.side), index if self.mode == "L" else (index, 0, 0)), index % 2


def batch(data: Dataset) -> Tensor:
    return data.train.inputs.batch(torch.arange(len(data.train)))


def test_pictures_of_a_torch_data_set_keep_their_bytes_and_are_normalized() -> None:
    data = from_torch(Photos(20), Photos(5))
    assert (len(data.train), len(data.test), data.shape, data.classes) == (20, 5, (3, 6, 6), ("cat", "dog"))
    assert data.train.inputs.raw.dtype == torch.uint8
    assert data.train.inputs.raw[torch.tensor([7])][0, 0, 0, 0] == 7  # the red channel is the first
    assert batch(data)[:, 0].mean().abs() < 1e-4
    assert data.train.labels.tolist() == [0, 1] * 10
    assert from_torch(Photos(20, mode="L")).shape == (1, 6, 6)


def test_without_a_test_part_a_fifth_is_held_out_always_the_same() -> None:
    data = [from_torch(Photos(20)) for _ in range(2)]
    assert [len(data[0].train), len(data[0].test)] == [16, 4]
    held_out = {int(row[0, 0, 0]) for row in data[0].test.inputs.raw[torch.arange(4)]}
    trained = {int(row[0, 0, 0]) for row in data[0].train.inputs.raw[torch.arange(16)]}
    assert held_out | trained == set(range(20))
    assert torch.equal(data[0].test.labels, data[1].test.labels)


def test_numbers_are_taken_as_they_are() -> None:
    features = torch.randn(10, 4)
    data = from_torch(torch.utils.data.TensorDataset(features, torch.arange(10) % 3), name="points")
    assert data.train.n_classes == 3
    assert {tuple(row.tolist()) for row in batch(data)} <= {tuple(row.tolist()) for row in features}


class Table:
    """What a Hugging Face data set offers of itself."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any]) -> None:
        self.columns, self.features = columns, features

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


class ClassLabel:
    names = ("no", "yes")


def table(n: int, **more: list[Any]) -> Table:
    columns = {"picture": [Image.new("L", (4, 4), i) for i in range(n)], "label": [i % 2 for i in range(n)], **more}
    kinds = {"picture": type("Image", (), {})(), "label": ClassLabel()}
    return Table(columns, {name: kinds.get(name) for name in columns})


def test_a_hugging_face_data_set_finds_its_columns_and_parts() -> None:
    data = from_hugging_face({"train": table(10, id=list(range(10))), "test": table(4)})
    assert (len(data.train), len(data.test), data.shape, data.classes) == (10, 4, (1, 4, 4), ("no", "yes"))
    vectors = from_hugging_face(table(10, x=[[float(i), 0.0] for i in range(10)]), column="x")
    assert (vectors.shape, vectors.train.inputs.raw.dtype) == ((2,), torch.float32)


def test_a_folder_in_the_layout_of_torchvision(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / name / f"{number}.png")
    data = from_image_folder(tmp_path, image_size=4)
    assert (len(data.train), len(data.test), data.shape, data.classes) == (8, 2, (3, 4, 4), ("cat", "dog"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: from_torch([Photos(3)[0], Photos(3, 7)[1]]), r"different shapes, .*\(3, 6, 6\) and \(3, 7, 7\)"),
        (lambda: from_torch([1, 2, 3]), r"items that are \(input, label\)"),
        (lambda: from_torch(iter([])), "needs a data set with a length and items, and got a list_iterator"),
        (lambda: from_torch([(torch.zeros(2), -1)] * 10), r"labels from -1 to -1"),
        (lambda: from_hugging_face({"test": table(3)}), "needs a part called 'train'"),
        (lambda: from_hugging_face(Table({"a": [1], "b": [2]}, {})), "no column is called label or labels"),
        (lambda: from_hugging_face(Table({"a": [1], "b": [2], "label": [0]}, dict.fromkeys("ab"))), "one of a, b"),
        (lambda: from_hugging_face(Table({"text": ["hi"], "label": [0]}, {"label": None})), "is text; tokenize it"),
        (lambda: from_image_folder("nowhere"), "path = 'nowhere'"),
    ],
)
def test_what_does_not_fit_is_one_line(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        make()
    assert "\n" not in str(error.value)
