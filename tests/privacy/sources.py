"""Sources of bytes that a test can repeat."""

from __future__ import annotations

import hashlib
from itertools import count

import numpy as np


class Counted:
    """SHA-256 of a counter: the same bytes for every one that is made."""

    def __init__(self, name: str = "") -> None:
        self._name, self._numbers = name, count()

    def __call__(self, n: int) -> bytes:
        found = b""
        while len(found) < n:
            found += hashlib.sha256(f"{self._name} {next(self._numbers)}".encode()).digest()
        return found[:n]


def half(n: int) -> bytes:
    """Bytes for which every uniform number is 1/2, so that pairs of normal numbers are −1.177 and nearly 0."""
    return np.full(n // 8, 2**63, dtype=np.uint64).tobytes()
