"""Rows in a file that is too large for memory: mapped, and read where they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class MappedRows:
    """The rows of a ``.npy`` file, or of a file of plain bytes whose rows have the shape ``row``; or some of them.

    ``turned`` swaps the last two axes (STL-10 stores its images column by column). What travels to another process is
    the file's name.
    """

    path: Path
    row: tuple[int, ...] | None = None
    turned: bool = False
    indices: Tensor | None = field(default=None, compare=False)

    @property
    def _array(self) -> NDArray[np.uint8]:
        if self.row is None:
            array: NDArray[np.uint8] = np.load(self.path, mmap_mode="r")
        else:
            array = np.memmap(self.path, np.uint8, "r").reshape(-1, *self.row)
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
