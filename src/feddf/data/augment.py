"""Augmentation of raw image batches, vectorized: one gather for a whole batch, no loop over images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf.runtime.device import moved


def shifted(images: Tensor, generator: torch.Generator, flips: bool) -> Tensor:
    """Return each image moved by up to a quarter of its sides, and with ``flips`` mirrored with probability ½.

    What moves in at an edge is reflected, so that no pixel has a value that images do not have.
    """
    n, _, height, width = images.shape
    rows, columns = (_reflected(n, size, generator) for size in (height, width))
    moved_down = images.gather(2, rows.view(n, 1, height, 1).expand_as(images))
    found = moved_down.gather(3, columns.view(n, 1, 1, width).expand_as(images))
    if not flips:
        return found
    mirrored = torch.rand((n, 1, 1, 1), generator=generator) < 0.5
    return torch.where(mirrored, found.flip(3), found)


def _reflected(n: int, size: int, generator: torch.Generator) -> Tensor:
    """Return for n images which row (or column) moves to each place."""
    reach = size // 4
    places = torch.arange(size) + torch.randint(-reach, reach + 1, (n, 1), generator=generator)
    return (size - 1) - ((size - 1) - places.abs()).abs()


def flip_crop(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Mirror each image with probability ½ and cut its size out of the zero-padded image at a random place.

    The standard augmentation for CIFAR (He et al. 2016), on raw N×C×H×W pixels, before normalization. Places are drawn
    on the CPU, so that they are the same on every device; the images stay where they are.
    """
    n, _, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    top, left = (torch.randint(0, 2 * padding + 1, (n,), generator=generator) for _ in range(2))
    flip = torch.randint(0, 2, (n, 1, 1, 1), generator=generator, dtype=torch.bool)
    top, left, flip = (moved(drawn, images.device) for drawn in (top, left, flip))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: N, C, top, left, height, width
    cropped = windows[torch.arange(n, device=images.device), :, top, left]
    return torch.where(flip, cropped.flip(3), cropped)
