from __future__ import annotations

import numpy as np
import torch
from torch import nn

from conftest import Tiny
from feddf.engines import in_process
from feddf.fusion.average import momentum
from feddf.rounds import run_round
from feddf.runs.methods import fedavg
from feddf.runs.store import pack, unpack
from feddf.states import digest
from feddf.types import Fused, Prototype, ServerState


def test_follows_the_papers_update_over_several_rounds(tiny: Tiny) -> None:
    """Against v := β v + Δx; x := x − v in NumPy, with the averages of an inner fusion that is a script."""
    random = np.random.default_rng(0)
    key, shape = "layers.1.bias", (16,)
    averages = [random.normal(size=shape).astype(np.float32) for _ in range(4)]

    def inner(server, updates, seed) -> Fused:
        state = {**server.models["mlp"], key: torch.from_numpy(averages[server.round])}
        return Fused(ServerState(server.round + 1, {"mlp": state}), {"mlp": state})

    fuse = momentum(0.4, inner, {"mlp": tiny.prototypes["mlp"]})
    server = ServerState(0, {"mlp": tiny.server.models["mlp"]})
    x, v = server.models["mlp"][key].numpy().astype(np.float64), np.zeros(shape)
    for average in averages:
        server = fuse(server, [], 0).server
        v = 0.4 * v + (x - average)
        x = x - v
        np.testing.assert_allclose(server.models["mlp"][key], x, atol=1e-5)


def test_without_momentum_it_is_the_inner_fusion(tiny: Tiny) -> None:
    arguments = {"engine": in_process, "train": tiny.local}
    inner = fedavg(tiny.resources, tiny.settings, in_process)
    plain = run_round(tiny.server, tiny.federation, fuse=inner, **arguments).server
    none = run_round(tiny.server, tiny.federation, fuse=momentum(0.0, inner, tiny.prototypes), **arguments).server
    for name in tiny.prototypes:
        for key in plain.models[name]:
            torch.testing.assert_close(none.models[name][key], plain.models[name][key], atol=1e-6, rtol=1e-6)


def test_buffers_have_no_momentum(tiny: Tiny) -> None:
    fuse = momentum(0.9, fedavg(tiny.resources, tiny.settings, in_process), tiny.prototypes)
    server = tiny.server
    for _ in range(3):
        closed = run_round(server, tiny.federation, engine=in_process, train=tiny.local, fuse=fuse)
        server = closed.server
        for key, tensor in closed.fused.start["cnn"].items():
            if "running" in key or "num_batches" in key:
                assert torch.equal(server.models["cnn"][key], tensor)


def test_its_memory_survives_a_checkpoint(tiny: Tiny) -> None:
    fuse = momentum(0.5, fedavg(tiny.resources, tiny.settings, in_process), tiny.prototypes)
    arguments = {"engine": in_process, "train": tiny.local, "fuse": fuse}
    first = run_round(tiny.server, tiny.federation, **arguments).server
    second, resumed = (
        run_round(server, tiny.federation, **arguments).server for server in (first, unpack(pack(first)))
    )
    assert digest(second.models) == digest(resumed.models)
    assert second.memory.keys() == resumed.memory.keys() == {"velocity"}
    assert digest(second.memory["velocity"]) == digest(resumed.memory["velocity"])


def test_the_inner_fusion_gets_the_rounds_seed(tiny: Tiny) -> None:
    seeds: list[int] = []

    def inner(server, updates, seed) -> Fused:
        seeds.append(seed)
        return Fused(server, dict(server.models))

    momentum(0.5, inner, tiny.prototypes)(tiny.server, [], 17)
    assert seeds == [17]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


def test_tied_weights_stay_tied() -> None:
    """A state dict has such a weight under both names; with momentum under one alone they would drift apart."""
    state = Tied().state_dict()

    def inner(server, updates, seed) -> Fused:
        new = {key: tensor + 1 for key, tensor in server.models["tied"].items()}
        return Fused(ServerState(server.round + 1, {"tied": new}), {"tied": new})

    fuse = momentum(0.5, inner, {"tied": Prototype("tied", Tied)})
    server = ServerState(0, {"tied": state})
    for _ in range(3):
        server = fuse(server, [], 0).server
    assert torch.equal(server.models["tied"]["first.weight"], server.models["tied"]["second.weight"])
