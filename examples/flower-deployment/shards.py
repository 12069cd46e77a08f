"""Private data for three sites, and what the server has: real digits, split so that each site knows but a few kinds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def share_digits(folder: Path, sites: Sequence[str]) -> None:
    """Write SITE.npz for each site, with mostly its own kinds of digits, and server.npz with none of theirs."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = labels[order].astype(np.int64)
    server, private = np.arange(800), np.arange(800, len(labels))
    _write(folder / "server.npz", images, labels, pool=server[:300], validation=server[300:400], test=server[400:])
    for number, site in enumerate(sites):
        kinds = labels[private] % len(sites) == number
        few = private % 20 == number
        own = private[kinds | few]
        _write(folder / f"{site}.npz", images, labels, train=own[:-50], test=own[-50:])


def _write(path: Path, images: np.ndarray, labels: np.ndarray, **parts: np.ndarray) -> None:
    kept = {f"{part}_images": images[rows] for part, rows in parts.items()}
    np.savez(path, **kept, **{f"{part}_labels": labels[rows] for part, rows in parts.items()})
