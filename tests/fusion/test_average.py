"""Averages of weights in closed form, and which rule the settings name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import Tiny, make_tiny
from feddf.config import Settings, with_values
from feddf.engines import in_process
from feddf.fusion.average import average, uniform_average
from feddf.fusion.batchnorm import last_statistics, recalibrated
from feddf.fusion.weights import CLASS_COUNTS, class_average, counts_of
from feddf.robust.defense import robust_start
from feddf.runs.methods import averaging_rule, fedavg
from feddf.states import digest
from feddf.types import Payload, Rule, ServerState, State, Update


def update(name: str, value: float, n_examples: int) -> Update:
    return Update(name, "mlp", 1, {"weight": torch.tensor([value, -value])}, n_examples)


BEFORE = {"weight": torch.tensor([9.0, 9.0])}
THREE = [update("a", 1.0, 1), update("b", 4.0, 2), update("c", 1000.0, 0)]


def test_weights_are_the_numbers_of_examples_and_one_example_counts() -> None:
    assert average(BEFORE, THREE)["weight"].tolist() == [3.0, -3.0]  # (1·1 + 2·4) / 3


def test_the_uniform_average_counts_every_trained_client_alike() -> None:
    assert uniform_average(BEFORE, THREE)["weight"].tolist() == [2.5, -2.5]


def told(*counts: int) -> Payload:
    return {CLASS_COUNTS: {"counts": torch.tensor(counts)}}


def of_classes(name: str, row: list[float], counts: tuple[int, ...] | None, n: int) -> Update:
    weight = torch.tensor(row).repeat(2, 1).T
    state = {"inner": torch.tensor(row[:2]), "last.weight": weight, "last.bias": -torch.tensor(row)}
    return Update(name, "mlp", 1, state, n, {}, {} if counts is None else told(*counts))


def test_the_last_layers_rows_are_averaged_over_those_who_have_the_class() -> None:
    a = of_classes("a", [1.0, 2.0, 5.0], (30, 10, 0), 40)
    b = of_classes("b", [3.0, 8.0, 9.0], (10, 50, 0), 60)
    found = class_average(BEFORE, [a, b])
    rows = [(30 * 1 + 10 * 3) / 40, (10 * 2 + 50 * 8) / 60, (40 * 5 + 60 * 9) / 100]  # nobody has the third: as n_k
    assert all(column.tolist() == pytest.approx(rows) for column in found["last.weight"].T)
    assert found["last.bias"].tolist() == pytest.approx([-row for row in rows])
    assert found["inner"].tolist() == average(BEFORE, [a, b])["inner"].tolist()
    silent = Update("b", "mlp", 1, b.state, 60)  # taken to have 20 of each class
    odd = [replace(silent, payload=told(30, 30)), a, replace(a, client_id="c")]  # its counts are of no use
    assert class_average(BEFORE, odd)["last.bias"].tolist()[0] == pytest.approx(-(20 * 3 + 30 * 1 + 30 * 1) / 80)
    three = [a, replace(a, client_id="c", n_examples=10, payload=told(10, 0, 0)), silent]
    rows = [(30 * 1 + 10 * 1 + 20 * 3) / 60, (10 * 2 + 20 * 8) / 30, 9.0]
    assert class_average(BEFORE, three)["last.bias"].tolist() == pytest.approx([-row for row in rows])
    plain = average(BEFORE, [a, silent])  # one of two does not say which layer is the last
    assert class_average(BEFORE, [a, silent])["last.bias"].tolist() == plain["last.bias"].tolist()


def test_class_counts_are_scaled_to_the_examples_that_count() -> None:
    """An n_k that was cut takes the class counts with it, in the average as well."""
    a, b = of_classes("a", [1.0, 2.0, 5.0], (30, 10, 0), 40), of_classes("b", [3.0, 8.0, 9.0], (10, 50, 0), 60)
    cut = replace(b, n_examples=6)
    assert counts_of(b, 3).tolist() == [10.0, 50.0, 0.0]
    assert counts_of(cut, 3).tolist() == pytest.approx([1.0, 5.0, 0.0])
    rows = [(30 * 1 + 1 * 3) / 31, (10 * 2 + 5 * 8) / 15, (40 * 5 + 6 * 9) / 46]
    assert class_average(BEFORE, [a, cut])["last.bias"].tolist() == pytest.approx([-row for row in rows])


def test_the_last_layer_is_found_in_any_order() -> None:
    """Workers, spools and checkpoints sort a state's names."""
    pair = [of_classes("a", [1.0, 2.0, 5.0], (30, 10, 0), 40), of_classes("b", [3.0, 8.0, 9.0], (10, 50, 0), 60)]
    turned = [replace(one, state={"z": one.state["inner"], **dict(reversed(one.state.items()))}) for one in pair]
    found, other = class_average(BEFORE, pair), class_average(BEFORE, turned)
    assert all(torch.equal(found[key], other[key]) for key in found)
    twice = [
        replace(one, state={**one.state, "more.weight": torch.ones(3, 9), "more.bias": torch.ones(3)}) for one in pair
    ]
    assert torch.equal(class_average(BEFORE, twice)["last.bias"], average(BEFORE, twice)["last.bias"]), "which is last?"


def test_without_rows_for_classes_all_is_averaged_alike() -> None:
    accumulation_dtype = [of_classes(name, [1.0, value, 2.0], (3, 1), 4) for name, value in (("a", 1.0), ("b", 5.0))]
    for given in (THREE, accumulation_dtype, [of_classes("a", [1.0, 2.0, 3.0], None, 5)]):
        found, expected = class_average(BEFORE, given), average(BEFORE, given)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("rule", [average, uniform_average, class_average])
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
        "fusion.aggregation=examples": average,
        "fusion.aggregation=uniform": uniform_average,
        "fusion.batchnorm=last": last_statistics(average),
        "fusion.batchnorm=recalibrate": recalibrated(average, tiny.resources),
        "fusion.defense=robust": robust_start(average, tiny.resources),
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
