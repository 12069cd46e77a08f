"""From raw storage to what the models expect, a batch at a time. Values, so that they travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """Bytes to floats, each channel normalized: (x / 255 − mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, raw: Tensor) -> Tensor:
        """Encode an N×C×H×W batch."""
        scale, shift = _constants(self, raw.device)
        return torch.addcmul(shift, raw.to(torch.float32), scale)


@lru_cache(maxsize=64)
def _constants(pixels: Pixels, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each channel's factor and summand where the batches are; they are sent there once."""
    scale = [1 / (255 * std) for std in pixels.std]
    shift = [-mean / std for mean, std in zip(pixels.mean, pixels.std, strict=True)]
    with torch.inference_mode(mode=False):  # they outlast the block in which they are first needed
        return tuple(torch.tensor(values).view(-1, 1, 1).to(device) for values in (scale, shift))  # type: ignore[return-value]


def plain(raw: Tensor) -> Tensor:
    """Return features that need no encoding."""
    return raw
