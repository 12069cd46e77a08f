"""Data files: images in their authors' layouts (MNIST's idx, STL-10, downsampled ImageNet) or in folders, and CSV."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from feddf.config.errors import one_line
from feddf.runtime.atomic import new_file, read_regular, text_lines

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")

MOST_PIXELS = 1 << 25  # of an image file: one of 20 kB can have so many that they take a gigabyte


def csv_rows(path: Path) -> Iterator[list[str]]:
    """Yield the rows of a CSV file."""
    with one_line(ValueError, f"{path} is not a CSV file", csv.Error):
        yield from csv.reader(text_lines(path))


def read_idx(path: Path, row: tuple[int, ...]) -> Tensor:
    """Return the rows, of a given shape, in an idx file of bytes: its head has the number of sizes, and the sizes."""
    content = read_regular(path)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of bytes")
    head = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, head, 4))
    if len(content) != head + prod(shape):
        raise ValueError(f"{path} is truncated: {len(content)} bytes, and its header says {head + prod(shape)}")
    if shape[1:] != row or not shape:
        raise ValueError(f"{path} has the sizes {shape[:8]}, and not a number of rows of {row}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(shape).copy())


def read_stl10_images(path: Path) -> MappedRows:
    """Return STL-10's 96×96 images, stored column by column; the 100,000 unlabeled ones are 2.8 GB and stay on disk."""
    one, size = 3 * 96 * 96, path.stat().st_size
    if not 0 < size <= 100_000 * one or size % one:
        raise ValueError(f"{path} is truncated: {size} bytes are not a number of images of {one} bytes")
    return MappedRows(path, row=(3, 96, 96), turned=True)


def read_stl10_labels(path: Path) -> Tensor:
    """Return STL-10's labels, which count from one."""
    return torch.from_numpy(np.frombuffer(read_regular(path), np.uint8).astype(np.int64) - 1)


def read_imagenet32(batches: Sequence[Path], cache: Path) -> tuple[MappedRows, Tensor]:
    """Return the images and labels of downsampled ImageNet's npz batches (Chrabaszcz et al. 2017).

    The first time, the batches are written one after the other into one file beside them, which is then mapped: of 1.28
    million images never more than one batch is in memory. Labels count from one in the files.
    """
    labels = [torch.from_numpy(_member(path, "labels").astype(np.int64).reshape(-1) - 1) for path in batches]
    n = sum(map(len, labels))
    if not cache.exists():
        with new_file(cache) as temporary:
            whole = open_memmap(temporary, "w+", np.uint8, (n, 3, 32, 32))
            first = 0
            for path, numbers in zip(batches, labels, strict=True):
                part = _member(path, "data").reshape(-1, 3, 32, 32)
                if len(part) != len(numbers):
                    raise ValueError(f"{path} has {len(part)} images and {len(numbers)} labels")
                whole[first : first + len(part)] = part
                first += len(part)
            whole.flush()
    rows = MappedRows(cache)
    if len(rows) != n:
        raise ValueError(f"{cache} has {len(rows)} images, and the batches {n} labels; remove it to begin anew")
    return rows, torch.cat(labels)


def _member(path: Path, name: str) -> NDArray[np.generic]:
    failed = f"{path} is not a batch of downsampled ImageNet"
    with one_line(ValueError, failed), np.load(path, allow_pickle=False) as archive:
        found: NDArray[np.generic] = archive[name]
        return found


def read_cached(path: Path, n: int, dtype: type[np.generic]) -> Tensor | None:
    """Return the n rows of a file that ``np.save`` wrote; ``None`` if there is none, or if it holds something else."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return torch.from_numpy(found) if found.ndim == 2 and len(found) == n and found.dtype == dtype else None


def read_folder(folder: Path, size: int | None = None) -> tuple[tuple[Tensor, Tensor], list[str]]:
    """Return (images as N×3×H×W bytes, labels), and the class names, of a folder with a folder for each class.

    A folder without class folders is one class. All images must have one size, unless ``size`` is given to which each
    is resized (its shorter side cut to a square first).
    """
    names = sorted(entry.name for entry in folder.glob("*") if entry.is_dir())
    found = [image_files(folder / name) for name in names] or [image_files(folder)]
    labels = torch.tensor([number for number, paths in enumerate(found) for _ in paths])
    return (_read_images([path for paths in found for path in paths], size), labels), names or [folder.name]


def read_all_images(folder: Path, size: int | None = None) -> Tensor:
    """Return every image in a folder and the folders below it, in the order of their paths; sizes as above."""
    return _read_images(image_files(folder), size)


def image_files(path: Path) -> list[Path]:
    """Return a file, or the images in a folder and the folders below it."""
    if not path.is_dir() and not path.is_file():
        raise FileNotFoundError(f"there is no image file or folder {path}")
    found = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.suffix.lower() in SUFFIXES)
    if not (files := [one for one in found if one.is_file()]):
        raise ValueError(f"{path} holds no image; known are files that end in {', '.join(SUFFIXES)}")
    return files


def _read_images(paths: Sequence[Path], size: int | None) -> Tensor:
    images: list[NDArray[np.uint8]] = []
    for path in paths:
        images.append(read_image(path, size))
        if images[-1].shape != images[0].shape:
            odd, first = (f"{image.shape[1]}×{image.shape[0]}" for image in (images[-1], images[0]))
            raise ValueError(f"{path} is {odd}, and the images before it are {first}; set image_size")
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def read_image(path: Path, size: int | None) -> NDArray[np.uint8]:
    """Return one image as H×W×3 bytes; with a size, cut to a square and resized to it."""
    with one_line(ValueError, "reading image files needs Pillow: pip install 'feddf[images]'", ImportError):
        from PIL import Image, ImageOps
    failed, quiet = one_line(ValueError, f"{path} cannot be read as an image"), warnings.catch_warnings(action="ignore")
    with failed, quiet, Image.open(path) as opened:  # this reads its head alone
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError(f"it has {opened.width}×{opened.height} pixels, and at most {MOST_PIXELS} are decoded")
        image = opened.convert("RGB")
        if size is not None:
            image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
        return np.asarray(image)


@dataclass(frozen=True)
class MappedRows:
    """Rows in a file that is too large for memory, or some of them.

    It is a ``.npy`` file, or one of plain bytes whose rows have the shape ``row``. ``turned`` swaps the last two axes
    (STL-10 stores its images column by column). What travels to another process is the file's name.
    """

    path: Path
    row: tuple[int, ...] | None = None
    turned: bool = False
    indices: Tensor | None = field(default=None, compare=False)

    @property
    def _array(self) -> NDArray[np.uint8]:
        plain = self.row is not None
        whole: NDArray[np.uint8] = np.memmap(self.path, np.uint8, "r") if plain else np.load(self.path, mmap_mode="r")
        array = whole.reshape(-1, *self.row) if self.row is not None else whole
        return array.swapaxes(-1, -2) if self.turned else array

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, then the shape of one."""
        whole = self._array.shape
        return whole if self.indices is None else (len(self.indices), *whole[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The type of a value."""
        return torch.from_numpy(self._array[:0].copy()).dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Tensor, /) -> Tensor:
        inside = indices if self.indices is None else self.indices[indices]
        return torch.from_numpy(np.ascontiguousarray(self._array[inside.numpy()]))

    def view_of(self, indices: Tensor) -> MappedRows:
        """Return some of the rows, without reading any."""
        return replace(self, indices=indices if self.indices is None else self.indices[indices])
