"""From raw storage to what the models expect, a batch at a time. Values, so that they travel between processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """Bytes to floats, each channel normalised: (x / 255 − mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, raw: Tensor) -> Tensor:
        """Encode an N×C×H×W batch."""
        scale = torch.tensor([1 / (255 * std) for std in self.std])
        shift = torch.tensor([-mean / std for mean, std in zip(self.mean, self.std, strict=True)])
        return torch.addcmul(shift.view(-1, 1, 1), raw.to(torch.float32), scale.view(-1, 1, 1))


def plain(raw: Tensor) -> Tensor:
    """Return features that need no encoding."""
    return raw
