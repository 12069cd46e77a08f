"""Work is counted, where a clock would measure the machine: a change that does more of it is noticed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from feddf import (
    MODELS,
    Client,
    DistillConfig,
    Examples,
    Inputs,
    Job,
    LocalConfig,
    Prototype,
    Resources,
    ServerState,
    Settings,
    Update,
    in_process,
    init_state,
)
from feddf.admit import admit
from feddf.client import local_update
from feddf.config import load
from feddf.data.datasets import Pixels
from feddf.engines.jobs import SharedStates, packed
from feddf.outputs import classes
from feddf.runs.build import build
from feddf.runs.methods import feddf
from feddf.runs.run import run_experiment
from feddf.runs.spool import DiskSpool
from feddf.runs.store import RunFolder
from feddf.states import n_bytes

CLIENTS, EXAMPLES = 6, 25


class Copies(TorchDispatchMode):
    """Counts the values that torch copies, and its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.operations = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if func.overloadpacket.__name__ in ("clone", "_to_copy", "copy_", "contiguous"):
            self.values += args[0].numel()
        return func(*args, **(kwargs or {}))


@contextmanager
def forward_passes() -> Iterator[Counter[str]]:
    """Count how often modules are called, by their classes."""
    found: Counter[str] = Counter()
    handle = register_module_forward_pre_hook(lambda module, inputs: found.update([type(module).__name__]))
    try:
        yield found
    finally:
        handle.remove()


@pytest.fixture
def built() -> list[int]:
    return []


@pytest.fixture
def prototypes(built: list[int]) -> dict[str, Prototype]:
    def build() -> nn.Module:
        built.append(1)
        return MODELS["resnet8"]((3, 16, 16), 10)

    return {"resnet8": Prototype("resnet8", build)}


@pytest.fixture
def train() -> Examples:
    raw = torch.randint(0, 256, (CLIENTS * EXAMPLES, 3, 16, 16), dtype=torch.uint8)
    return Examples(Inputs(raw, Pixels((0.5,) * 3, (0.25,) * 3)), torch.arange(len(raw)) % 10, classes(10))


@pytest.fixture
def jobs(prototypes: dict[str, Prototype], built: list[int]) -> list[Job]:
    state = init_state(prototypes["resnet8"], 0)
    built.clear()
    shards = torch.arange(CLIENTS * EXAMPLES).split(EXAMPLES)
    return [Job(Client(f"{k}", "resnet8", shard), 1, state, k) for k, shard in enumerate(shards)]


@pytest.fixture
def work(prototypes: dict[str, Prototype], train: Examples) -> Callable[[Job], Any]:
    local = LocalConfig(epochs=2, batch_size=10, lr=0.1)
    return partial(local_update, prototypes=prototypes, train=train, local=local)


def test_a_network_is_built_once_for_all_clients(work: Any, jobs: list[Job], built: list[int]) -> None:
    for job in jobs:
        work(job)
    assert len(built) == 1


def test_a_client_computes_what_its_batches_need_and_copies_its_weights_three_times(work: Any, jobs: list[Job]) -> None:
    work(jobs[0])
    with forward_passes() as calls, Copies() as counted:
        work(jobs[1])
    steps = 2 * 3  # epochs × batches
    weights = sum(tensor.numel() for tensor in jobs[0].state.values())
    images = 2 * EXAMPLES * 3 * 16 * 16  # each is decoded in every epoch
    assert calls["ResNet"] == steps
    assert calls["Conv2d"] == 9 * steps
    assert counted.values <= 3 * weights + images  # into the module, into channels last, and out of it
    assert counted.operations <= 250 + steps * 190


def test_weights_travel_once_to_a_worker_and_once_from_a_client(work: Any, jobs: list[Job]) -> None:
    sent = list[int]()

    def put(content: bytes) -> bytes:
        sent.append(len(content))
        return content

    states, size = SharedStates(jobs, put), n_bytes(jobs[0].state)
    rest = [len(states.apart(job)[0]) for job in jobs]
    for job in jobs:
        states.of(job)
    assert (len(sent), sent[0] <= size + 4_000) == (1, True)
    assert max(rest) <= 2_000
    assert len(packed(work(jobs[0]))) <= size + 4_000


def test_an_update_is_admitted_and_kept_without_a_copy(work: Any, jobs: list[Job], tmp_path: Path) -> None:
    spool, asked, replies = DiskSpool(tmp_path / "spool"), {job.id: job for job in jobs}, list(map(work, jobs))
    with Copies() as counted:
        for job, reply in zip(jobs, replies, strict=True):
            update = admit(reply, asked)
            assert isinstance(update, Update)
            spool.keep(job, update)
    assert counted.values == 0
    files = [path.stat().st_size for path in (tmp_path / "spool").iterdir()]
    assert len(files) == CLIENTS
    assert max(files) <= n_bytes(jobs[0].state) + 12_000


def test_nothing_of_a_round_is_left_after_the_next_one(tmp_path: Path) -> None:
    """A run's memory does not grow with its rounds: as many tensors are alive after the fifth as after the second."""
    few = ["rounds=5", "local.epochs=1", "fusion.method=fedavg", "data.train_size=200", "data.test_size=20"]
    parts = build(load("demo", [*few, "clients.total=4", "run.engine=in-process", "pool.size=20"]))
    first = next(iter(parts.server.models["cnn-wide"].values())).shape
    alive = []
    for _ in run_experiment(parts, RunFolder.create(tmp_path / "run", parts.experiment)):
        gc.collect()
        alive.append(sum(type(thing) is torch.Tensor and thing.shape == first for thing in gc.get_objects()))
    assert alive[4] <= alive[1]


def test_a_fusion_asks_each_teacher_once_about_each_input(prototypes: dict[str, Prototype], jobs: list[Job]) -> None:
    state, size, steps = jobs[0].state, 200, 7
    pool = Inputs(torch.randint(0, 256, (size, 3, 16, 16), dtype=torch.uint8), Pixels((0.5,) * 3, (0.25,) * 3))
    updates = [Update(job.id, "resnet8", 1, dict(state), EXAMPLES) for job in jobs]
    settings = Settings(distill=DistillConfig(steps=steps, batch_size=32, early_stopping="none"))
    fuse = feddf(Resources(prototypes, pool), settings, in_process)
    rows = Counter[str]()

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.__class__.__name__ == "Linear" and module.out_features == 10:  # every network's last layer
            rows["training" if module.training else "asking"] += len(inputs[0])

    handle = register_module_forward_pre_hook(count)
    try:
        fuse(ServerState(0, {"resnet8": state}), updates, 0)
    finally:
        handle.remove()
    assert rows["asking"] == CLIENTS * size
    assert rows["training"] == steps * 32


def test_copies_share_nothing(prototypes: dict[str, Prototype], work: Any, jobs: list[Job]) -> None:
    """No state of a model reaches the next: buffers, what is learned, hooks, modes and attributes."""
    prototype, state = prototypes["resnet8"], jobs[0].state
    first = prototype.load(state).train()
    for module in first.modules():
        module.register_forward_hook(lambda *called: pytest.fail("a hook of another model ran"))
        module.left_behind = True  # type: ignore[assignment]
    for parameter in first.parameters():
        parameter.requires_grad_(False)
        parameter.data.fill_(7.0)
    for buffer in first.buffers():
        buffer.fill_(9)
    second = prototype.load(state)
    assert all(torch.equal(second.state_dict()[key], tensor) for key, tensor in state.items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in second.parameters())
    assert not any(hasattr(module, "left_behind") or module.training for module in second.modules())
    second(torch.zeros(2, 3, 16, 16))
    alone = work(jobs[1])
    work(jobs[0])
    again = work(jobs[1])
    built_anew = replace(prototype, fit=lambda model, state: None)
    work.keywords["prototypes"]["resnet8"] = built_anew
    anew = work(jobs[1])
    for one in (again, anew):
        assert all(torch.equal(alone.state[key], one.state[key]) for key in state)


def test_a_network_that_may_remember_itself_is_built_anew(built: list[int]) -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.answer = lambda x: self.scale * x
            built.append(1)

    prototype = Prototype("own", Remembers)
    one, other = (prototype.load({"scale": torch.full((1,), value)}) for value in (2.0, 3.0))
    assert [float(model.answer(torch.ones(1)).detach()) for model in (one, other)] == [2.0, 3.0]


def test_tied_weights_stay_tied() -> None:
    def build() -> nn.Module:
        network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        network[1].weight = network[0].weight
        return network

    prototype = Prototype("tied", build)
    state = init_state(prototype, 0)
    for model in (prototype.load(state), prototype.load(state)):
        assert model[0].weight is model[1].weight  # type: ignore[index]
