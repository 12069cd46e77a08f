"""What all peers share: the work to be done, its data, the network, and how times are reported. Plain torch."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
CLASSES = 10


@dataclass(frozen=True)
class Work:
    """FedAvg of ``cohort`` of ``clients`` clients a round, each with ``examples`` images, for one epoch."""

    clients: int
    cohort: int
    examples: int
    rounds: int
    workers: int
    batch: int
    rate: float
    folder: str

    @classmethod
    def given(cls) -> Work:
        """Return the work that the command line describes, or the environment: Flower's clients have nothing else."""
        text = os.environ.get("PEERS_WORK") or sys.argv[1]
        os.environ["PEERS_WORK"] = text
        return cls(**json.loads(text))


def write_data(folder: Path, n: int) -> None:
    """Write n CIFAR-shaped images and labels that say nothing about one another: only the work matters here."""
    random = np.random.default_rng(0)
    np.save(folder / "images.npy", random.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8))
    np.save(folder / "labels.npy", random.integers(0, CLASSES, n))


def shard(work: Work, client: int) -> tuple[Tensor, Tensor]:
    """Return the bytes and labels of one client."""
    rows = slice(client * work.examples, (client + 1) * work.examples)
    images, labels = (np.load(Path(work.folder) / name, mmap_mode="r") for name in ("images.npy", "labels.npy"))
    return torch.from_numpy(images[rows].copy()), torch.from_numpy(labels[rows].copy())


class Block(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(inputs)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(inputs))


class ResNet8(nn.Module):
    """ResNet-8 for 32×32 images, of 78 thousand parameters, as one writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.classifier = nn.Linear(64, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.blocks(self.stem(inputs)).mean(dim=(2, 3)))
        return logits


def report(rounds: list[float]) -> None:
    """Print the seconds of every round, as the last line."""
    print(json.dumps({"rounds": rounds}), flush=True)


class Stopwatch:
    """Notes when rounds begin and end."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """A round begins."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """It has ended."""
        self.rounds.append(time.perf_counter() - self._began)
