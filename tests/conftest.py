"""A tiny federation that every test can afford: two architectures, one with BatchNorm, on made-up images."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import settings

from feddf.data.encode import Pixels
from feddf.engines import in_process
from feddf.evaluate import accuracy
from feddf.fusion import Kit, Schedule
from feddf.local import local_update
from feddf.models import CNN, MLP
from feddf.rounds import Federation
from feddf.states import initial
from feddf.types import Client, Examples, Inputs, LocalTrain, Prototype, ServerState

SHAPE, CLASSES = (1, 8, 8), 3

os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"  # for subprocesses: several at once must not fight for the cores
torch.set_num_threads(1)
settings.register_profile("feddf", deadline=None)  # torch warms up in the first example
settings.load_profile("feddf")


def stripes(n: int, seed: int) -> Examples:
    """Noisy 8×8 images whose class is the place of a bright band."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES
    images = torch.randint(0, 120, (n, *SHAPE), generator=generator, dtype=torch.uint8)
    for row, label in enumerate(labels):
        images[row, :, 2 * label : 2 * label + 3] += 120
    return Examples(Inputs(images, Pixels((0.4,), (0.3,))), labels, CLASSES)


@dataclass(frozen=True)
class Tiny:
    train: Examples
    test: Examples
    pool: Inputs
    prototypes: dict[str, Prototype]
    federation: Federation
    server: ServerState
    local: LocalTrain
    kit: Kit


def make_tiny(clients: int = 6, fraction: float = 0.67, seed: int = 0, norm: str = "batch") -> Tiny:
    train, test = stripes(120, 1), stripes(60, 2)
    prototypes = {
        "cnn": Prototype("cnn", partial(CNN, SHAPE, CLASSES, width=4, norm=norm)),
        "mlp": Prototype("mlp", partial(MLP, SHAPE, CLASSES, width=16)),
    }
    names = sorted(prototypes)
    members = [Client(f"c{k}", names[k % 2], torch.arange(k, 120, clients)) for k in range(clients)]
    local = partial(local_update, prototypes=prototypes, train=train, epochs=1, batch=8, rate=0.05)
    pool = stripes(48, 3).inputs
    score = partial(accuracy, examples=stripes(30, 4))
    kit = Kit(prototypes, pool, in_process, score, Schedule(steps=12, batch=16, check_every=4, patience=100))
    server = ServerState(0, {name: initial(prototype, seed) for name, prototype in prototypes.items()})
    return Tiny(train, test, pool, prototypes, Federation(members, fraction, seed), server, local, kit)


@pytest.fixture
def tiny() -> Tiny:
    return make_tiny()
