"""Clients over Flower are strangers: what they claim is bounded, and the server's own data are checked first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from feddf.config import ConfigError, DistillConfig, FusionConfig
from feddf.flower import FedDF, FlowerClientsConfig, FlowerConfig, FlowerSettings
from feddf.flower.roster import FORGET_AFTER, Roster, most_clients
from feddf.types import Client
from flower.local_grid import LocalGrid, Node


def meet(roster: Roster, names: dict[int, str]) -> None:
    """Let these nodes, and no others, be connected under these names."""
    roster._claims = {node: Client(name, "m") for node, name in names.items()}
    roster._when = dict.fromkeys(names, 0.0)
    roster._grant()


def test_a_node_that_comes_back_under_new_names_does_not_fill_the_roster(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", ["m"], most=most_clients(3))
    steady = {1: "a", 2: "b", 3: "c"}
    for number in range(100):
        meet(roster, {**steady, 100 + number: f"liar-{number}"})
        assert len(roster.clients) <= most_clients(3)
        roster.begin_round()
        absent = [client.id for client in roster.clients if client.id not in roster._nodes]
        assert len(absent) <= FORGET_AFTER + 1  # so a quorum can be had
    assert {"a", "b", "c"} <= {client.id for client in roster.clients}


def test_newcomers_are_refused_where_all_places_are_taken(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", ["m"], most=2)
    meet(roster, {1: "a", 2: "b", 3: "c"})
    assert [client.id for client in roster.clients] == ["a", "b"]
    assert sorted(roster._nodes) == ["a", "b"]
    meet(roster, {1: "a", 3: "c"})  # b has gone, and c may come
    assert [client.id for client in roster.clients] == ["a", "c"]


def test_a_client_that_was_away_for_long_is_taken_back(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", ["m"], most=10)
    meet(roster, {1: "a", 2: "b"})
    for _ in range(FORGET_AFTER + 1):
        meet(roster, {1: "a"})
        roster.begin_round()
    assert [client.id for client in roster.clients] == ["a"]
    meet(roster, {1: "a", 2: "b"})
    roster.begin_round()
    assert [client.id for client in roster.clients] == ["a", "b"]


@pytest.mark.parametrize("content", [b'{"a": "m", ', b"\xff", b"[1]", b'{"a": 3}', b"[" * 100_000])
def test_a_damaged_roster_is_put_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "roster.json"
    path.write_bytes(content)
    roster = Roster(path, ["m"])
    assert roster.clients == []
    assert (tmp_path / "roster.json.damaged").read_bytes() == content
    meet(roster, {1: "a"})
    assert Roster(path, ["m"]).clients == [Client("a", "m")]
    assert Roster(path, ["another"]).clients == []  # whose architecture nobody has


def strategy(folder: Path, **given: Any) -> FedDF:
    settings = FlowerSettings(clients=FlowerClientsConfig(number=3), distill=DistillConfig(stop="steps"))
    return FedDF({"line": lambda: nn.Linear(4, 2)}, settings, folder=folder, **given)


BROKEN = torch.zeros(8, 4)
BROKEN[5, 1] = float("nan")
LABELS = torch.arange(8) % 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pool": BROKEN}, "pool = 'input 5': it has values that are not finite"),
        ({"pool": BROKEN[:4], "validation": (BROKEN, LABELS)}, "validation = 'input 5': it has values"),
        ({"pool": BROKEN[:4], "test": (BROKEN, LABELS)}, "test = 'input 5': it has values"),
        ({"pool": BROKEN[:1]}, "pool = '1 inputs': a student learns from batches of at least 2"),
        ({"pool": BROKEN[:0]}, "pool = '0 inputs'"),
    ],
)
def test_the_servers_own_data_are_checked_before_the_first_round(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        strategy(tmp_path, **given)


def test_the_defence_is_on_unless_it_is_turned_off(tmp_path: Path) -> None:
    assert strategy(tmp_path, pool=BROKEN[:4]).settings.fusion.defence == "robust"
    clients = FlowerClientsConfig(number=3)
    assert FlowerSettings(clients=clients, fusion=FusionConfig(momentum=0.3)).fusion.defence == "robust"  # type: ignore[arg-type]
    assert FlowerSettings(clients=clients, fusion=FusionConfig(defence="none")).fusion.defence == "none"  # type: ignore[arg-type]


def test_a_client_that_claims_a_billion_examples_does_not_decide_the_average(tmp_path: Path) -> None:
    """Three send zeros and ten examples each; the fourth sends ones, and claims all examples of the world."""

    def site(value: float, count: int) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            state = message.content["arrays"].to_torch_state_dict()  # type: ignore[union-attr]
            sent = ArrayRecord({key: torch.full_like(tensor, value) for key, tensor in state.items()})
            content = RecordDict({"arrays": sent, "metrics": MetricRecord({"num-examples": count})})
            return Message(content, reply_to=message)

        return app

    settings = FlowerSettings(
        clients=FlowerClientsConfig(number=4, fraction=1.0),
        fusion=FusionConfig(method="fedavg", defence="none"),
        flower=FlowerConfig(evaluate_fraction=0.0),
    )
    over = FedDF({"line": lambda: nn.Linear(4, 2)}, settings, folder=tmp_path, wait=0.0, poll=0.0)
    sites = [site(0.0, 10), site(0.0, 10), site(0.0, 10), site(1.0, 10**9)]
    over.start(LocalGrid({number: Node(app, {}) for number, app in enumerate(sites, 1)}), num_rounds=1)
    (fused,) = {float(value) for tensor in over.models["line"].values() for value in tensor.flatten()}
    assert fused == pytest.approx(100 / 130)  # ten times the median, not 1 - 3e-8
