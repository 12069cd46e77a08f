"""CIFAR-10 and CIFAR-100 from their authors' python files, read without running anything that they contain."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddf.config.errors import first_line

_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class _ArraysOnly(pickle.Unpickler):
    """Builds arrays, lists, dicts and strings; refuses every other global, so no code of the file's runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read(path: Path, label_key: str) -> tuple[Tensor, Tensor]:
    """Return (N×3×32×32 bytes, N labels) of one batch file."""
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        data, labels = content[b"data"], content[label_key.encode()]
        images = torch.from_numpy(np.array(data, dtype=np.uint8).reshape(-1, 3, 32, 32))
        numbers = torch.tensor(labels, dtype=torch.int64)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(f"{path} is not a CIFAR batch file: {first_line(error)}") from error
    if len(images) != len(numbers):
        raise ValueError(f"{path} has {len(images)} images and {len(numbers)} labels")
    return images, numbers


def read_all(paths: list[Path], label_key: str) -> tuple[Tensor, Tensor]:
    """Return the batch files one after the other."""
    batches = [read(path, label_key) for path in paths]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def names(path: Path) -> tuple[str, ...]:
    """Return CIFAR-100's fine class names from its ``meta`` file; none if there is no such file."""
    if not path.is_file():
        return ()
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        return tuple(name.decode() for name in content[b"fine_label_names"])
    except Exception as error:
        raise ValueError(f"{path} is not CIFAR's file of class names: {error}") from error
