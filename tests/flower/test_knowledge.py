"""Clients over Flower that know different channels: they say which, with their updates, and the server checks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message

from conftest import stripes
from feddf.config import ConfigError, DataConfig, Experiment, parse
from feddf.config.keys import nested
from feddf.data.datasets import Dataset
from feddf.flower import client_app
from feddf.outputs import classes
from feddf.rounds import QuorumError
from feddf.runs.store import RunFolder
from feddf.states import digest
from feddf.types import Examples, Inputs
from flower.local_grid import LocalGrid, Node
from flower.test_strategy import (
    AVERAGED,
    grid_of,
    grid_with,
    in_process,
    line,
    server_of,
    some,
    strategy,
    without_times,
)

PLACE = "known channels/mask"
BASE: dict[str, Any] = {
    "rounds": 2,
    "prototypes": [{"model": "dilated-cnn", "width": 4, "depth": 2}, {"model": "unet", "width": 4, "depth": 1}],
    "data": {"name": f"{__name__}:scans"},
    "partition": {"scheme": "groups"},
    "clients": {"total": 4, "fraction": 1.0, "quorum": 0.5},
    "local": {"epochs": 2, "lr": 0.05},
    "pool": {"sources": [{"name": "train", "fraction": 0.3}]},
    "distill": {"steps": 6, "eval_every": 3},
    "run": {"engine": "in-process"},
}


def scans(data: DataConfig) -> Dataset:
    """Masks of the bright band of each picture, 1 or 2 by its place; one site knows the ones, the other the twos."""

    def part(n: int, seed: int) -> Examples:
        found = stripes(n, seed)
        masks = torch.zeros(n, 8, 8, dtype=torch.int64)
        for row, label in enumerate(found.labels):
            masks[row, 2 * label : 2 * label + 3] = 1 + label % 2
        inputs = Inputs(found.inputs.raw, found.inputs.encode)
        return Examples(inputs, masks, classes(3, (8, 8), background=0), torch.arange(n) % 2)

    return Dataset(
        f"{__name__}:scans", part(90, 1), part(20, 2), classes=("none", "one", "two"), known=((0, 1), (0, 2))
    )


def experiment(changes: dict[str, Any] | None = None) -> Experiment:
    return parse(nested(BASE, changes or {}))


@pytest.mark.parametrize("changes", [{}, {"ensemble.combine": "probabilities"}, {"fusion.method": "fedavg"}], ids=str)
def test_same_bytes_and_records_as_in_process(tmp_path: Path, changes: dict[str, Any]) -> None:
    planned = experiment(changes)
    expected = in_process(planned, tmp_path / "here")
    over = strategy(planned, tmp_path / "flower")
    over.start(grid_of(planned))
    records = [without_times(record) for record in RunFolder.open(tmp_path / "flower").records()]
    assert (digest(over.models), records) == expected
    assert over.settings.fusion.parts == ("known-channels",)


def test_a_teacher_that_says_it_knows_all_is_another_teacher(tmp_path: Path) -> None:
    planned, models = experiment(), []
    for folder in ("honest", "naive"):
        grid, over = grid_of(planned), strategy(planned, tmp_path / folder)
        if folder == "naive":
            grid.nodes[1000].behave = saying(lambda number: [1, 1, 1])
        over.start(grid, num_rounds=1)
        models.append(digest(over.models))
    assert models[0] != models[1]


def saying(mask: Callable[[int], list[int] | None]) -> Callable[[Message, Message | None], Message | None]:
    """Let a node say something else of what it knows, by the round."""

    def behave(message: Message, reply: Message | None) -> Message | None:
        said = mask(message.content["config"].get("server-round", 0)) if reply and "payload" in reply.content else None
        if reply is not None and said is not None:
            reply.content["payload"][PLACE] = Array(np.array(said, dtype=np.uint8))
        return reply

    return behave


LIES: dict[str, tuple[Callable[[int], list[int] | None], int, str]] = {
    "none": (lambda number: [0, 0, 0], 1, "does not know channel 0, the background"),
    "the background alone": (lambda number: [1, 0, 0], 1, "knows no channel"),
    "unknown channels": (lambda number: [1, 0, 1, 1], 1, "is uint8 (4,), and its prototype's uint8 (3,)"),
    "no mask": (lambda number: [1, 7, 0], 1, "has values from 0 to 7, not 0 to 1"),
    "a change": (lambda number: [1, 0, 1] if number > 1 else None, 2, "knows channels 0, 2, and it said channels 0, 1"),
}


@pytest.mark.parametrize(("mask", "number", "said"), LIES.values(), ids=LIES)
def test_what_a_client_says_it_knows_is_checked(
    tmp_path: Path, mask: Callable[[int], list[int] | None], number: int, said: str
) -> None:
    planned = experiment()
    grid = grid_of(planned)
    grid.nodes[1000].behave = saying(mask)
    strategy(planned, tmp_path / "run").start(grid)
    records = RunFolder.open(tmp_path / "run").records()
    for record in records[: number - 1]:
        assert not record["dropped"]
    (dropped,) = records[number - 1]["dropped"]
    assert dropped["client"] == "client-0"
    assert said in dropped["reason"]
    assert "\n" not in dropped["reason"]


def test_what_was_said_is_remembered_by_a_server_that_starts_again(tmp_path: Path) -> None:
    planned = experiment()
    grid = grid_of(planned)
    strategy(planned, tmp_path / "run").start(grid, num_rounds=1)
    grid.nodes[1000].behave = saying(lambda number: [1, 0, 1])
    strategy(planned, tmp_path / "run").start(grid, num_rounds=2)
    assert [one["client"] for one in RunFolder.open(tmp_path / "run").records()[1]["dropped"]] == ["client-0"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"fusion.defense": "robust"}, "fusion.defense"), ({"ensemble.combine": "cronus"}, "ensemble.combine")],
    ids=["defense", "robust target"],
)
def test_robust_rules_that_would_blame_clients_are_one_line(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} = .*know") as refused:
        strategy(experiment(), tmp_path / "run", changes).start(grid_of(experiment()))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("known", "said"),
    [([0, 9], "has the channel 9; there are 0 to 1"), ([0], r"its server must set fusion\.parts")],
    ids=["unknown", "not asked"],
)
def test_a_client_whose_knowledge_would_be_lost_says_so(tmp_path: Path, known: list[int], said: str) -> None:
    def examples(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        return some(20, 3)

    app = client_app({"net": line(6)}, examples, known=lambda context: known)
    with pytest.raises(QuorumError, match=said):
        server_of(tmp_path, {"net": line(6)}, AVERAGED).start(grid_with(app, (1, 2)), num_rounds=1)


def test_a_client_that_knows_all_needs_not_be_asked(tmp_path: Path) -> None:
    app = client_app({"net": line(6)}, lambda context: some(20, 3), known=lambda context: [0, 1])
    grid = LocalGrid({1: Node(app, {"partition-id": 1}), 2: Node(app, {"partition-id": 2})})
    server_of(tmp_path, {"net": line(6)}, AVERAGED).start(grid, num_rounds=1)
    assert not RunFolder.open(tmp_path / "run").records()[0]["dropped"]
