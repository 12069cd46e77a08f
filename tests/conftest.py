"""A tiny federation that every test can afford: two architectures, one with BatchNorm, on made-up images."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import settings as hypothesis_settings

from feddf.client import local_update
from feddf.config import ClientsConfig, DistillConfig, LocalConfig, Settings
from feddf.data.datasets import Pixels
from feddf.models.small import CNN, MLP
from feddf.outputs import classes
from feddf.rounds import Federation
from feddf.states import init_state
from feddf.types import Client, Examples, Inputs, LocalTrain, Part, Prototype, Reply, Resources, ServerState, Update
from pretend_device import registered

SHAPE, CLASSES = (1, 8, 8), 3

os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="feddf-state-")  # nor the key of whoever runs them
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"  # for subprocesses: several at once must not fight for the cores
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what the tests compare bit by bit is the CPU's
torch.set_num_threads(1)
registered()  # before the first backward pass, in which torch makes a queue for each device that it knows
hypothesis_settings.register_profile("feddf", deadline=None)  # torch warms up in the first example
hypothesis_settings.load_profile("feddf")


def stripes(n: int, seed: int) -> Examples:
    """Noisy 8×8 images whose class is the place of a bright band."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES
    images = torch.randint(0, 120, (n, *SHAPE), generator=generator, dtype=torch.uint8)
    for row, label in enumerate(labels):
        images[row, :, 2 * label : 2 * label + 3] += 120
    return Examples(Inputs(images, Pixels((0.4,), (0.3,))), labels, classes(CLASSES))


@dataclass(frozen=True)
class Tiny:
    train: Examples
    test: Examples
    pool: Inputs
    prototypes: dict[str, Prototype]
    federation: Federation
    server: ServerState
    local: LocalTrain
    resources: Resources
    settings: Settings
    parts: tuple[Part, ...] = ()


def update_of(reply: Reply) -> Update:
    """Return the update that a good reply becomes at the gate."""
    known = reply.client_id, reply.prototype, reply.round, reply.state, reply.n_examples
    return Update(*known, reply.metrics, reply.payload)


def make_tiny(clients: int = 6, fraction: float = 0.67, seed: int = 0, norm: str = "batch") -> Tiny:
    train, test = stripes(120, 1), stripes(60, 2)
    prototypes = {
        "cnn": Prototype("cnn", partial(CNN, SHAPE, CLASSES, width=4, norm=norm)),
        "mlp": Prototype("mlp", partial(MLP, SHAPE, CLASSES, width=16)),
    }
    names = sorted(prototypes)
    members = [Client(f"c{k}", names[k % 2], torch.arange(k, 120, clients)) for k in range(clients)]
    config = LocalConfig(epochs=1, batch_size=8, lr=0.05)
    local = partial(local_update, prototypes=prototypes, train=train, local=config)
    pool = stripes(48, 3).inputs
    settings = Settings(
        clients=ClientsConfig(total=clients, fraction=fraction),
        local=config,
        distill=DistillConfig(steps=12, batch_size=16, eval_every=4, patience=100),
    )
    return Tiny(
        train,
        test,
        pool,
        prototypes,
        Federation(members, settings.clients, seed),
        ServerState(0, {name: init_state(prototype, seed) for name, prototype in prototypes.items()}),
        local,
        Resources(prototypes, pool, stripes(30, 4), outputs=classes(CLASSES)),
        settings,
    )


@pytest.fixture
def tiny() -> Tiny:
    return make_tiny()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin long tests, and those that one process runs one after the other, first: no core is to idle at the end."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("xdist_group", "long")))
