"""Data in their authors' layouts, made up here byte by byte; and what is said about files that are broken."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from feddf.config import DataConfig
from feddf.config.names import DATASETS
from feddf.data.datasets import Dataset, MissingDataError
from feddf.data.files import MappedRows, read_folder, read_idx, read_imagenet32


def loaded(name: str, folder: Path) -> Dataset:
    return DATASETS[name](DataConfig(name=name, folder=str(folder)))


def image_folder(folder: Path) -> Dataset:
    name = f"folder:{folder}"
    return DATASETS[name](DataConfig(name=name))


def idx(array: np.ndarray) -> bytes:
    head = b"\x00\x00\x08" + bytes([array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True)
    for part, n in (("train", 30), ("t10k", 10)):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(np.arange(n * 784).reshape(n, 28, 28) % 256))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(n) % 10))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read(tmp_path: Path, name: str) -> None:
    write_mnist(tmp_path / name)
    data = loaded(name, tmp_path)
    assert (len(data.train), len(data.test), data.shape, len(data.classes)) == (30, 10, (1, 28, 28), 10)
    assert data.train.inputs.raw[torch.tensor([1])][0, 0, 0, :3].tolist() == [16, 17, 18]
    assert data.train.labels[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not an idx file"),
        (b"\x89PNG....", "is not an idx file"),
        (idx(np.zeros((3, 4)))[:-1], "is truncated: 23 bytes, and its header says 24"),
        (idx(np.zeros((3, 4))) + b"x", "25 bytes, and its header says 24"),
    ],
)
def test_a_broken_idx_file_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_idx(tmp_path / "a")


def write_stl10(root: Path) -> np.ndarray:
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 96, 96), dtype=np.uint8)
    for part, n in (("train", 4), ("test", 2), ("unlabeled", 6)):
        images[:n].swapaxes(-1, -2).tofile(folder / f"{part}_X.bin")  # column by column
        if part != "unlabeled":
            (np.arange(n, dtype=np.uint8) % 10 + 1).tofile(folder / f"{part}_y.bin")  # from one
    return images


def test_stl10_is_turned_and_its_labels_count_from_zero(tmp_path: Path) -> None:
    images = write_stl10(tmp_path)
    data = loaded("stl10", tmp_path)
    assert data.train.labels.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(data.train.inputs.raw[torch.arange(4)].numpy(), images[:4])
    assert data.unlabeled is not None
    assert len(data.unlabeled) == 6
    np.testing.assert_array_equal(data.unlabeled.raw[torch.tensor([5, 0])].numpy(), images[[5, 0]])
    (tmp_path / "stl10_binary" / "unlabeled_X.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"unlabeled_X.bin is truncated: 3 bytes are not a number of images of 27648"):
        loaded("stl10", tmp_path)


def write_imagenet32(folder: Path, batches: int = 3, compressed: bool = False) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    whole = random.integers(0, 256, (batches * 5, 3072), dtype=np.uint8)
    for number in range(batches):
        save = np.savez_compressed if compressed else np.savez
        part = slice(5 * number, 5 * number + 5)
        save(folder / f"batch_{number}.npz", data=whole[part], labels=np.arange(1, 6) + 5 * number, mean=whole[0])
    return whole.reshape(-1, 3, 32, 32)


@pytest.mark.parametrize("compressed", [False, True])
def test_imagenet_batches_become_one_mapped_file(tmp_path: Path, compressed: bool) -> None:
    whole = write_imagenet32(tmp_path, compressed=compressed)
    paths = sorted(tmp_path.glob("*.npz"))
    rows, labels = read_imagenet32(paths, tmp_path / "cache.npy")
    assert isinstance(rows, MappedRows)
    assert (rows.shape, rows.dtype, labels.tolist()) == ((15, 3, 32, 32), torch.uint8, list(range(15)))
    np.testing.assert_array_equal(rows[torch.tensor([14, 3])].numpy(), whole[[14, 3]])
    stamp = (tmp_path / "cache.npy").stat().st_mtime_ns
    read_imagenet32(paths, tmp_path / "cache.npy")
    assert (tmp_path / "cache.npy").stat().st_mtime_ns == stamp  # written once


def test_a_damaged_batch_leaves_no_half_a_cache(tmp_path: Path) -> None:
    write_imagenet32(tmp_path)
    paths = sorted(tmp_path.glob("*.npz"))
    paths[2].write_bytes(paths[2].read_bytes()[:200])
    with pytest.raises(ValueError, match=r"batch_2.npz is not a batch of downsampled ImageNet"):
        read_imagenet32(paths, tmp_path / "cache.npy")
    assert not list(tmp_path.glob("*.npy"))
    with pytest.raises(MissingDataError, match=r"no file Imagenet32_train_npz/train_data_batch_1.npz"):
        loaded("imagenet32", tmp_path)


def test_mapped_rows_travel_as_the_name_of_their_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(4000).reshape(1000, 4).astype(np.uint8))
    rows = MappedRows(tmp_path / "a.npy")
    some = rows.view_of(torch.tensor([5, 9, 7]))
    assert len(pickle.dumps(rows)) < 400
    again: MappedRows = pickle.loads(pickle.dumps(some))
    assert again.shape == (3, 4)
    assert torch.equal(again[torch.tensor([2])], rows[torch.tensor([7])])
    assert torch.equal(some.view_of(torch.tensor([1]))[torch.tensor([0])], rows[torch.tensor([9])])


def picture(path: Path, size: tuple[int, int] = (8, 8), color: tuple[int, int, int] = (10, 20, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def test_a_folder_of_class_folders(tmp_path: Path) -> None:
    for number, name in enumerate(("cat", "dog", "emu")):
        for index in range(5):
            picture(tmp_path / name / f"{index}.png", color=(100 * number, index, 7))
    (pixels, labels), names = read_folder(tmp_path)
    assert (names, labels.tolist()) == (["cat", "dog", "emu"], [0] * 5 + [1] * 5 + [2] * 5)
    assert pixels.shape == (15, 3, 8, 8)
    assert pixels[6, :, 0, 0].tolist() == [100, 1, 7]
    data = image_folder(tmp_path)
    assert (len(data.train), len(data.test), data.train.n_classes) == (12, 3, 3)


def test_a_folder_with_parts_of_its_own(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in ("a", "b"):
            picture(tmp_path / part / name / "0.png")
    data = image_folder(tmp_path)
    assert (len(data.train), len(data.test)) == (2, 2)
    picture(tmp_path / "val" / "c" / "0.png")
    with pytest.raises(ValueError, match="must have the same classes; only one has 'c'"):
        image_folder(tmp_path)


def test_an_image_of_another_size_is_named_unless_a_size_is_asked_for(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "0.png")
    picture(tmp_path / "a" / "1.png", size=(12, 9))
    with pytest.raises(ValueError, match=r"1.png is 12×9, and the images before it are 8×8; set image_size"):
        read_folder(tmp_path)
    assert read_folder(tmp_path, size=6)[0][0].shape == (2, 3, 6, 6)


def test_an_empty_class_folder_and_a_file_that_is_no_image_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "0.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match=r"b holds no image"):
        read_folder(tmp_path)
    (tmp_path / "b" / "x.png").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=r"x.png cannot be read as an image"):
        read_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no image file or folder"):
        read_folder(tmp_path / "nowhere")
