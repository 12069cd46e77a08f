"""What all peers share: the work to be done, its data, the network, and how times are reported. Plain torch."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
CLASSES = 10
LAST = "last.pt"
SHARDS = "shards.json"
"""The positions of each client's images, where not all clients have as many."""


@dataclass(frozen=True)
class Work:
    """FedAvg of ``cohort`` of ``clients`` clients a round, each with ``examples`` images, or those named in SHARDS.

    ``network`` is a name in :data:`NETWORKS`; with ``tested``, the model after the last round is tried on test images,
    and with ``kept``, those of all rounds are left behind. ``method`` is what a peer calls another method than FedAvg.
    """

    clients: int
    cohort: int
    examples: int
    rounds: int
    workers: int
    batch: int
    rate: float
    folder: str
    network: str = "resnet8"
    tested: bool = False
    kept: bool = False
    method: str = "fedavg"
    epochs: int = 1
    seed: int = 0

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


def write_cifar(folder: Path, source: Path, n: int) -> None:
    """Write n random training images of CIFAR-10 (its authors' python files), and the test images."""
    for name, files in (("", [f"data_batch_{k}" for k in range(1, 6)]), ("test-", ["test_batch"])):
        parts = [pickle.loads((source / "cifar-10-batches-py" / file).read_bytes(), encoding="bytes") for file in files]
        images = np.concatenate([part[b"data"] for part in parts]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([np.array(part[b"labels"], dtype=np.int64) for part in parts])
        order = np.random.default_rng(0).permutation(len(labels))[: None if name else n]
        np.save(folder / f"{name}images.npy", images[order])
        np.save(folder / f"{name}labels.npy", labels[order])


def shard(work: Work, client: int) -> tuple[Tensor, Tensor]:
    """Return the bytes and labels of one client."""
    rows = shards(work)[client]
    images, labels = (np.load(Path(work.folder) / name, mmap_mode="r") for name in ("images.npy", "labels.npy"))
    return torch.from_numpy(images[rows].copy()), torch.from_numpy(labels[rows].copy())


@cache
def shards(work: Work) -> list[Any]:
    """Return where each client's images are."""
    if (file := Path(work.folder) / SHARDS).exists():
        found: list[Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    return [slice(client * work.examples, (client + 1) * work.examples) for client in range(work.clients)]


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


def simple_cnn() -> nn.Sequential:
    """Return the network of pfl-research's benchmark (its ``simple_cnn``), of 1.6 million parameters."""
    layers = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, CLASSES),
    )  # fmt: skip
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return layers


def small_cnn() -> nn.Sequential:
    """Return a network of 80 thousand parameters that takes a fifth of a millisecond for an image, to train on it."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], nn.Module]] = {"resnet8": ResNet8, "simple_cnn": simple_cnn, "small_cnn": small_cnn}


def normalized(images: Tensor) -> Tensor:
    """Return bytes as a network expects them."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def tried(work: Work, file: str = LAST) -> float:
    """Return the accuracy of a model that a program left behind on the test images."""
    model = NETWORKS[work.network]().eval()
    model.load_state_dict(torch.load(Path(work.folder) / file))
    images, labels = (
        torch.from_numpy(np.load(Path(work.folder) / f"test-{name}.npy")) for name in ("images", "labels")
    )
    with torch.no_grad():
        right = sum(
            int((model(normalized(x)).argmax(1) == y).sum())
            for x, y in zip(images.split(500), labels.split(500), strict=True)
        )
    return right / len(labels)


def report(work: Work, watch: Stopwatch, state: Mapping[str, Tensor]) -> None:
    """Print the seconds of every round, as the last line, and leave the last model behind if it is to be tried."""
    if work.tested:
        torch.save(dict(state), Path(work.folder) / LAST)
    print(json.dumps({"rounds": watch.rounds, "ends": watch.ends}), flush=True)


class Stopwatch:
    """Notes when rounds begin and end."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.ends: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """A round begins."""
        self._began = time.perf_counter()

    def end(self, work: Work, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """It has ended; its model is left behind if it is to be, with the time: ``round-3-1700000000.25.pt``."""
        self.rounds.append(time.perf_counter() - self._began)
        self.ends.append(time.time())
        if work.kept:
            name = f"round-{len(self.rounds)}-{self.ends[-1]:.3f}.pt"
            torch.save(dict(state()), Path(work.folder) / f".{name}")
            (Path(work.folder) / f".{name}").rename(Path(work.folder) / name)
