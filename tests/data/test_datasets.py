from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from feddf.config import DataConfig
from feddf.config.names import DATASETS
from feddf.data.cifar import read
from feddf.data.datasets import Dataset, MissingDataError


def loaded(name: str, folder: Path | None = None) -> Dataset:
    return DATASETS[name](DataConfig(name=name, folder=str(folder) if folder else None))


def write_cifar10(root: Path, n: int = 20) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        data = random.integers(0, 256, (n, 3072), dtype=np.uint8)
        data[0] = number
        (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": [i % 10 for i in range(n)]}, 2))


def test_cifar10_reads_its_authors_layout(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    data = loaded("cifar10", tmp_path)
    assert (len(data.train), len(data.test), data.train.n_classes, data.flips) == (100, 20, 10, True)
    assert data.shape == (3, 32, 32)
    assert [int(data.train.inputs.raw[20 * batch].float().mean()) for batch in range(5)] == [0, 1, 2, 3, 4]
    assert data.train.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_cifar100_has_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        content = {
            b"data": np.zeros((4, 3072), dtype=np.uint8),
            b"fine_labels": [99, 0, 5, 7],
            b"coarse_labels": [1] * 4,
        }
        (folder / name).write_bytes(pickle.dumps(content, 2))
    data = loaded("cifar100", tmp_path)
    assert data.train.labels.tolist() == [99, 0, 5, 7]
    assert data.train.n_classes == 100


def test_the_folder_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path)
    monkeypatch.setenv("FEDDF_DATA", str(tmp_path))
    assert len(loaded("cifar10").test) == 20


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(MissingDataError, match=r"no file cifar-10-batches-py/data_batch_3.*FEDDF_DATA"):
        loaded("cifar10", tmp_path)


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.canary),)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    path, canary = tmp_path / "batch", tmp_path / "canary"
    path.write_bytes(pickle.dumps({b"data": Bomb(canary), b"labels": []}))
    with pytest.raises(ValueError, match="is not a CIFAR batch file: it has no images"):
        read(path, "labels")
    assert not canary.exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 5000])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, keep: int) -> None:
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="data_batch_1 is not a CIFAR batch file"):
        loaded("cifar10", tmp_path)


@pytest.mark.parametrize(("name", "shape", "n"), [("mnist-5k", (1, 28, 28), 5000), ("digits", (1, 12, 12), 1797)])
def test_embedded_digits(name: str, shape: tuple[int, ...], n: int) -> None:
    data = loaded(name)
    assert data.shape == shape
    assert len(data.train) + len(data.test) == n
    assert sorted(set(data.train.labels.tolist())) == list(range(10))
    encoded = data.train.inputs.batch(torch.arange(len(data.train)))
    assert abs(float(encoded.mean())) < 0.3
    assert 0.7 < float(encoded.std()) < 1.3
    assert torch.equal(loaded(name).test.labels, data.test.labels)


def test_the_toy_lies_inside_the_square_of_its_pool() -> None:
    data = loaded("toy")
    assert float(data.train.inputs.raw.abs().max()) < 3
    assert np.bincount(data.train.labels).tolist() == [200, 200, 200]
