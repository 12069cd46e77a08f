"""Averages of weights in closed form, and which rule the settings name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import Tiny, make_tiny
from feddf.config import Settings, with_values
from feddf.engines import in_process
from feddf.fusion.average import average, averaging_rule, fedavg, uniform_average
from feddf.fusion.batchnorm import last_statistics, recalibrated
from feddf.fusion.defence import robust_start
from feddf.states import digest
from feddf.types import Rule, ServerState, State, Update


def update(name: str, value: float, n_examples: int) -> Update:
    return Update(name, "mlp", 1, {"weight": torch.tensor([value, -value])}, n_examples)


BEFORE = {"weight": torch.tensor([9.0, 9.0])}
THREE = [update("a", 1.0, 1), update("b", 4.0, 2), update("c", 1000.0, 0)]


def test_weights_are_the_numbers_of_examples_and_one_example_counts() -> None:
    assert average(BEFORE, THREE)["weight"].tolist() == [3.0, -3.0]  # (1·1 + 2·4) / 3


def test_the_uniform_average_counts_every_trained_client_alike() -> None:
    assert uniform_average(BEFORE, THREE)["weight"].tolist() == [2.5, -2.5]


@pytest.mark.parametrize("rule", [average, uniform_average])
def test_without_a_trained_client_the_weights_stay(rule: Rule) -> None:
    assert rule(BEFORE, []) is BEFORE
    assert rule(BEFORE, [update("c", 1000.0, 0)]) is BEFORE
    assert rule(BEFORE, [update("a", 5.0, 1)])["weight"].tolist() == [5.0, -5.0]


def moved(tiny: Tiny) -> list[Update]:
    """Return updates of three convolutional clients, whose statistics differ."""
    start = tiny.server.models["cnn"]
    states = [{k: v + 0.1 * (i + 1) if v.is_floating_point() else v for k, v in start.items()} for i in range(3)]
    return [Update(f"c{i}", "cnn", 1, state, 10 * (i + 1)) for i, state in enumerate(states)]


def rule_of(tiny: Tiny, changes: dict[str, Any]) -> State:
    settings: Settings = with_values(tiny.settings, changes)
    return averaging_rule(tiny.resources, settings)(tiny.server.models["cnn"], moved(tiny))


def test_the_settings_name_the_rule() -> None:
    tiny = make_tiny()
    start, updates = tiny.server.models["cnn"], moved(tiny)
    expected: dict[str, Rule] = {
        "fusion.average=examples": average,
        "fusion.average=uniform": uniform_average,
        "fusion.batchnorm=last": last_statistics(average),
        "fusion.batchnorm=recalibrate": recalibrated(average, tiny.resources),
        "fusion.defence=robust": robust_start(average, tiny.resources),
    }
    found = {}
    for text, rule in expected.items():
        key, _, value = text.partition("=")
        found[text] = digest({"": rule_of(tiny, {key: value})})
        assert found[text] == digest({"": rule(start, updates)}), text
    assert len(set(found.values())) >= 4, "the rules must differ, or this test says nothing"


def test_fedavg_averages_each_prototype_and_says_what_it_averaged(tiny: Tiny) -> None:
    server = ServerState(3, {name: tiny.server.models[name] for name in ("cnn", "mlp")})
    fused = fedavg(tiny.resources, tiny.settings, in_process)(server, moved(tiny), 0)
    expected = average(server.models["cnn"], moved(tiny))
    assert digest({"": fused.server.models["cnn"]}) == digest({"": expected}) == digest({"": fused.start["cnn"]})
    assert fused.server.models["mlp"] is server.models["mlp"]
    assert fused.server.round == 4
