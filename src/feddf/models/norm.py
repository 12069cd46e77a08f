"""Normalisation layers by name: the paper compares BatchNorm with GroupNorm (Table 2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

Norm = Literal["batch", "group", "none"]


def normaliser(norm: Norm, groups: int) -> Callable[[int], nn.Module]:
    """Return a function from a number of channels to the layer that normalises them."""
    if norm == "batch":
        return nn.BatchNorm2d
    if norm == "group":
        return partial(nn.GroupNorm, groups)
    if norm == "none":
        return lambda channels: nn.Identity()
    raise ValueError(f"norm must be 'batch', 'group' or 'none', got {norm!r}")
