"""Augmentation of raw image batches, vectorised: one gather for a whole batch, no loop over images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def flip_crop(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Mirror each image with probability ½ and cut its size out of the zero-padded image at a random place.

    The standard augmentation for CIFAR (He et al. 2016), on raw N×C×H×W pixels, before normalisation.
    """
    n, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    top = torch.randint(0, 2 * padding + 1, (n, 1), generator=generator)
    left = torch.randint(0, 2 * padding + 1, (n, 1), generator=generator)
    flip = torch.randint(0, 2, (n, 1), generator=generator, dtype=torch.bool)
    rows = top + torch.arange(height)
    columns = torch.arange(width).expand(n, -1)
    columns = left + torch.where(flip, columns.flip(1), columns)
    return padded[
        torch.arange(n)[:, None, None, None],
        torch.arange(channels)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
