"""The server's unlabeled pool: inputs from another source, in the form that the federation's models expect."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf.seeds import numpy_generator, torch_generator
from feddf.types import Inputs


def adapt(source: Tensor, like: Inputs) -> Inputs:
    """Return ``source``'s images in the shape of ``like``'s, encoded as ``like``'s are.

    Images are resized bilinearly; grey ones become coloured by repetition and coloured ones grey by their
    mean. The models' own normalisation is used, not that of the source: the pool stands in for the inputs
    that the models will see. (The released code normalises the pool with its own statistics.)
    """
    wanted = tuple(like.raw.shape[1:])
    if source.dtype != like.raw.dtype:
        raise ValueError(f"inputs of type {source.dtype} cannot stand in for inputs of type {like.raw.dtype}")
    if tuple(source.shape[1:]) == wanted:
        return Inputs(source, like.encode)
    if source.ndim != 4 or like.raw.ndim != 4:
        raise ValueError(f"inputs of shape {tuple(source.shape[1:])} cannot stand in for inputs of shape {wanted}")
    channels = wanted[0]
    pixels = source.to(torch.float32)
    if channels == 1:
        pixels = pixels.mean(dim=1, keepdim=True)
    elif pixels.shape[1] == 1:
        pixels = pixels.expand(-1, channels, -1, -1)
    if pixels.shape[1] != channels:
        raise ValueError(f"images of {source.shape[1]} channels cannot stand in for images of {channels}")
    resized = F.interpolate(pixels, size=wanted[1:], mode="bilinear", align_corners=False, antialias=True)
    if like.raw.dtype == torch.uint8:
        resized = resized.round().clamp(0, 255)
    return Inputs(resized.to(like.raw.dtype), like.encode)


def choose(source: Tensor, size: int | None, seed: int) -> Tensor:
    """Return ``size`` of the source's inputs, chosen at random without repetition (all of them for ``None``)."""
    if size is None or size == len(source):
        return source
    if size > len(source):
        raise ValueError(f"{size} inputs were asked for, and the source has {len(source)}")
    chosen = numpy_generator(seed).choice(len(source), size, replace=False)
    return source[torch.from_numpy(chosen).sort().values]


def uniform(shape: tuple[int, ...], size: int, low: float, high: float, seed: int) -> Tensor:
    """Return features drawn uniformly from (low, high): the pool of the paper's toy is 60 points in (−3, 3)²."""
    return low + (high - low) * torch.rand((size, *shape), generator=torch_generator(seed))
