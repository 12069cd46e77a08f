"""Secret randomness: Gaussian noise and uniform numbers, made of bytes of the operating system and never of a seed.

A seed can be read in a run's configuration; with it the noise could be subtracted. So no key can set these bytes: a
test hands in another :data:`Source`. The noise is made of floating-point numbers, whose gaps an attacker who sees all
bits of a release could use (Mironov 2012); that is not defended against.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

Source = Callable[[int], bytes]
"""(number of bytes) -> so many bytes that cannot be predicted. It travels to workers: a function of a module."""


def uniform(n: int, source: Source = os.urandom) -> Tensor:
    """Return n numbers above 0 and at most 1, with 53 random bits each, as float64."""
    bits = np.frombuffer(source(8 * n), dtype=np.uint64) >> np.uint64(11)
    return torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53)


def normal(shape: Sequence[int], source: Source = os.urandom) -> Tensor:
    """Return standard normal numbers (Box and Muller 1958): √(−2 ln u) cos 2πv and √(−2 ln u) sin 2πv, as float64."""
    n = prod(shape)
    half = (n + 1) // 2
    u, v = uniform(2 * half, source).reshape(2, half)
    radius, angle = (-2 * u.log()).sqrt(), 2 * torch.pi * v
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:n].reshape(tuple(shape))


@dataclass(frozen=True)
class Noise:
    """Gaussian noise whose deviation is ``multiplier`` (z) times what it is to hide, and where its bytes are from."""

    multiplier: float
    source: Source = os.urandom

    def __call__(self, shape: Sequence[int], sensitivity: float = 1.0) -> Tensor:
        """Return noise that hides whatever moves a sum by the sensitivity at the most."""
        return self.multiplier * sensitivity * normal(shape, self.source)
