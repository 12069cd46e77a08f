"""Clients over Flower are not trusted: what they claim is bounded, and the server's own data are checked first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from feddf.config import ClientsConfig, ConfigError, DistillConfig, FusionConfig
from feddf.flower import FedDF, FlowerConfig, FlowerSettings, announce
from feddf.flower.transport import FORGET_AFTER, ClientRegistry, MessageQueue
from feddf.types import Client
from flower.local_grid import LocalGrid, Node


def registry_of(folder: Path, most: int = 10_000, prototype: str = "m") -> ClientRegistry:
    return ClientRegistry(MessageQueue(LocalGrid({})), folder / "registry.json", [prototype], None, most)


def connect(registry: ClientRegistry, names: dict[int, str]) -> dict[str, int]:
    """Let these nodes, and no others, be connected under these names."""
    grid = registry.queue.grid
    assert isinstance(grid, LocalGrid)
    for node, name in names.items():
        grid.nodes.setdefault(node, Node(announce(ClientApp(), "m", name=lambda context, name=name: name), {}))
    for node, one in grid.nodes.items():
        one.online = node in names
    return registry.connected()


def known(registry: ClientRegistry) -> list[str]:
    return [client.id for client in registry.clients]


def test_a_node_that_comes_back_under_new_names_does_not_fill_the_registry(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, most=14)
    steady = {1: "a", 2: "b", 3: "c"}
    for number in range(100):
        connected = connect(registry, {**steady, 100 + number: f"liar-{number}"})
        assert len(registry.clients) <= 14
        registry.begin_round()
        assert len(set(known(registry)) - connected.keys()) <= FORGET_AFTER + 1  # so a quorum can be had
    assert {"a", "b", "c"} <= set(known(registry))


def test_new_clients_are_refused_where_all_places_are_taken(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, most=2)
    assert sorted(connect(registry, {1: "a", 2: "b", 3: "c"})) == known(registry) == ["a", "b"]
    connect(registry, {1: "a", 3: "c"})  # b has gone, and c may come
    assert known(registry) == ["a", "c"]


def test_a_client_that_was_away_for_long_is_taken_back(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, most=10)
    connect(registry, {1: "a", 2: "b"})
    for _ in range(FORGET_AFTER + 1):
        connect(registry, {1: "a"})
        registry.begin_round()
    assert known(registry) == ["a"]
    connect(registry, {1: "a", 2: "b"})
    registry.begin_round()
    assert known(registry) == ["a", "b"]


@pytest.mark.parametrize("content", [b'{"a": "m", ', b"\xff", b"[1]", b'{"a": 3}', b"[" * 100_000])
def test_a_damaged_registry_is_put_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "registry.json").write_bytes(content)
    registry = registry_of(tmp_path)
    assert registry.clients == []
    assert (tmp_path / "registry.json.damaged").read_bytes() == content
    connect(registry, {1: "a"})
    assert registry_of(tmp_path).clients == [Client("a", "m")]
    assert registry_of(tmp_path, prototype="another").clients == []  # an architecture that there is no more


def strategy(folder: Path, **given: Any) -> FedDF:
    settings = FlowerSettings(clients=ClientsConfig(total=3), distill=DistillConfig(early_stopping="none"))
    return FedDF({"line": lambda: nn.Linear(4, 2)}, settings, folder=folder, **given)


BROKEN = torch.zeros(8, 4)
BROKEN[5, 1] = float("nan")
LABELS = torch.arange(8) % 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pool": BROKEN}, "pool = 'input 5': .* finite"),
        ({"pool": BROKEN[:4], "validation": (BROKEN, LABELS)}, "validation = 'input 5': .* finite"),
        ({"pool": BROKEN[:4], "test": (BROKEN, LABELS)}, "test = 'input 5': .* finite"),
        ({"pool": BROKEN[:1]}, "pool = '1 inputs': .* at least 2"),
        ({"pool": BROKEN[:0]}, "pool = '0 inputs'"),
    ],
)
def test_the_servers_own_data_are_checked_before_the_first_round(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        strategy(tmp_path, **given)


def test_the_defense_is_on_unless_it_is_turned_off(tmp_path: Path) -> None:
    assert strategy(tmp_path, pool=BROKEN[:4]).settings.fusion.defense == "robust"
    clients = ClientsConfig(total=3)
    assert FlowerSettings(clients=clients, fusion=FusionConfig(momentum=0.3)).fusion.defense == "robust"
    assert FlowerSettings(clients=clients, fusion=FusionConfig(defense="none")).fusion.defense == "none"


def test_a_client_that_claims_a_billion_examples_does_not_decide_the_average(tmp_path: Path) -> None:
    """Three send zeros and ten examples each; the fourth sends ones, and claims all examples of the world."""

    def sending(value: float, count: int) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            state = message.content["arrays"].to_torch_state_dict()  # type: ignore[union-attr]
            sent = ArrayRecord({key: torch.full_like(tensor, value) for key, tensor in state.items()})
            content = RecordDict({"arrays": sent, "metrics": MetricRecord({"num-examples": count})})
            return Message(content, reply_to=message)

        return app

    settings = FlowerSettings(
        clients=ClientsConfig(total=4, fraction=1.0),
        fusion=FusionConfig(method="fedavg", defense="none"),
        flower=FlowerConfig(evaluate_fraction=0.0),
    )
    over = FedDF({"line": lambda: nn.Linear(4, 2)}, settings, folder=tmp_path, wait=0.0, poll=0.0)
    apps = [sending(0.0, 10), sending(0.0, 10), sending(0.0, 10), sending(1.0, 10**9)]
    over.start(LocalGrid({number: Node(app, {}) for number, app in enumerate(apps, 1)}), num_rounds=1)
    (fused,) = {float(value) for tensor in over.models["line"].values() for value in tensor.flatten()}
    assert fused == pytest.approx(100 / 130)  # ten times the median, not 1 - 3e-8
