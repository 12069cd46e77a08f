"""How jobs and results become bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class _PlainPickler(pickle.Pickler):
    """Pickles tensors as NumPy arrays, ten times as fast as torch does: a state has dozens of small ones."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor and thing.dtype in _NUMPY and thing.is_contiguous() and not thing.requires_grad:
            return torch.from_numpy, (thing.numpy(),)
        return NotImplemented


_NUMPY = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool}


def packed(thing: Any) -> bytes:
    """Return a thing as bytes; whoever reads them must trust who wrote them."""
    buffer = io.BytesIO()
    _PlainPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()
