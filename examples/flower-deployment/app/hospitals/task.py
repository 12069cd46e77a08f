"""What all sites agree on: the task, and the architectures that may take part."""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from feddf import MODELS

SHAPE, CLASSES = (1, 8, 8), 10

ARCHITECTURES = {
    "mlp": partial(MODELS["mlp"], SHAPE, CLASSES, width=64),
    "wide": partial(MODELS["mlp"], SHAPE, CLASSES, width=256),
    "cnn": partial(MODELS["cnn"], SHAPE, CLASSES, width=16),
}


def read(path: str | Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of one part of a file."""
    with np.load(path, allow_pickle=False) as file:
        images, labels = file[f"{part}_images"], file[f"{part}_labels"]
    return torch.from_numpy(images), torch.from_numpy(labels)
