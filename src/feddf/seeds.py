"""Every random choice has a name, and its seed follows from that name; so no generator state is ever saved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, *path: str | int) -> int:
    """Return the seed of the random choice called ``path`` in the experiment seeded ``seed``.

    Different paths give independent seeds, the same path always the same one, on any machine:

    >>> derive(0, "sample", 3) == derive(0, "sample", 3) != derive(0, "sample", 4)
    True
    """
    name = repr((seed, *path)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1  # torch wants < 2⁶³


def torch_generator(seed: int) -> torch.Generator:
    """Return a torch generator that starts at ``seed``."""
    return torch.Generator().manual_seed(seed)


def numpy_generator(seed: int) -> np.random.Generator:
    """Return a NumPy generator that starts at ``seed``."""
    return np.random.default_rng(seed)


@contextmanager
def seed_torch(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generators (initial weights, dropout) inside the block, and restore them after.

    Torch cannot save the state of Apple's generator, so that one is not restored.
    """
    there = device is not None and device.type in ("cuda", "xpu")
    with torch.random.fork_rng([device] if there else [], device_type=device.type if device and there else "cuda"):
        if device is None or device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # that of no other device, which takes a millisecond
        else:
            torch.manual_seed(seed)
        yield
