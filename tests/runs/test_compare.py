from __future__ import annotations

from typing import Any

import pytest

from feddf.config import ConfigError, Experiment, parse, with_values
from feddf.config.keys import PARTS, SHORT, flat, keys_of
from feddf.config.names import PARTS as NAMED
from feddf.report.read import method_name
from feddf.runs.many import grid, variant
from feddf.runs.methods import part_names

BASE = parse({"data": {"name": "toy"}, "pool": {"sources": ["plane"]}, "prototypes": ["mlp"], "clients": {"total": 4}})


def test_methods_are_named_by_their_parts() -> None:
    assert variant(BASE, "fedprox") == with_values(BASE, {"fusion.method": "fedavg", "local.prox_mu": 0.01})
    assert variant(BASE, "fedavgm").fusion.momentum == 0.2
    both = variant(BASE, "feddf+prox+swag")
    assert (both.fusion.method, both.local.prox_mu, both.ensemble.swag_samples) == ("feddf", 0.01, 10)


def test_a_users_own_method_is_one_of_them() -> None:
    found = grid(BASE, ["fedavg", "mine:method+prox"], [0])
    assert [one.folder for one in found] == ["fedavg-seed0", "mine.method+prox-seed0"]
    mine = found[1].experiment
    assert (mine.fusion.method, mine.local.prox_mu) == ("mine:method", 0.01)


def test_a_value_belongs_to_the_methods_that_name_its_part() -> None:
    """Otherwise "fedavg" next to "fedprox" with prox_mu=0.1 would be FedProx too."""
    tuned = with_values(BASE, {"local.prox_mu": 0.1, "fusion.momentum": 0.3})
    found = grid(tuned, ["fedavg", "fedprox", "fedavgm"], [0])
    values = [(each.experiment.local.prox_mu, each.experiment.fusion.momentum) for each in found]
    assert values == [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3)]
    alone = grid(tuned, ["fedavg", "feddf"], [0])  # no method names them: they are the experiment's
    assert {each.experiment.local.prox_mu for each in alone} == {0.1}


def test_a_value_of_the_configuration_wins() -> None:
    tuned = with_values(BASE, {"local.prox_mu": 0.5})
    assert variant(tuned, "fedprox").local.prox_mu == 0.5


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_a_change_of_the_configuration(part: str) -> None:
    assert variant(BASE, f"feddf+{part}") != variant(BASE, "feddf")
    assert keys_of(Experiment)[PARTS[part][0]].kind == "method"


@pytest.mark.parametrize(
    ("method", "right"),
    [
        ("fedsgd", r"did you mean 'fed\w+'"),
        ("", "known are: fedavg, feddf, fedma, fd, fedprox, fedavgm, feddistill, feddf-plus"),
        ("feddf+magic", r"parts that can be added to a method are \+prox, "),
        ("+prox", r"parts that can be added to a method are \+prox, "),
    ],
)
def test_what_is_not_known_is_listed(method: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"fusion.method = .*{right}"):
        variant(BASE, method)


@pytest.mark.parametrize(
    "method", [*SHORT, "feddf+prox+swag", "feddf-plus+robust", "mine:method+prox", "fedavg+scaffold"]
)
def test_a_name_with_parts_is_a_method_of_every_configuration(method: str) -> None:
    """In a file, on the command line and in Python; what is kept is spelled out."""
    values = {**BASE.model_dump(), "fusion": {"method": method}}
    assert parse(values) == Experiment(**values) == variant(BASE, method)
    assert parse(BASE.model_dump(), overrides=[f"method={method}"]) == variant(BASE, method)
    assert variant(BASE, method).fusion.method in ("fedavg", "feddf", "mine:method")


def test_feddf_plus_adjusts_the_loss_and_weighs_by_class_counts() -> None:
    plus, private = variant(BASE, "feddf-plus"), variant(BASE, "feddf-plus-private")
    assert (plus.ensemble.weights, plus.ensemble.combine) == ("class-counts", "probabilities")
    assert (private.ensemble.weights, private.ensemble.combine) == ("uniform", "logits")
    assert (part_names(plus), part_names(private)) == (["class-counts"], [])
    assert (plus.fusion.aggregation, private.fusion.aggregation) == ("class-counts", "examples")
    assert plus.local.logit_adjustment == private.local.logit_adjustment == 1.0


@pytest.mark.parametrize(
    ("method", "changes", "names"),
    [
        ("fedavg", {"ensemble.weights": "class-counts"}, []),  # it has no teachers: its clients tell nothing
        ("fedavg", {"fusion.aggregation": "class-counts"}, ["class-counts"]),
        ("feddf", {"ensemble.weights": "class-counts"}, ["class-counts"]),
        ("mine:method", {"ensemble.weights": "class-counts"}, ["class-counts"]),
        ("feddf", {"ensemble.weights": "examples"}, []),
        ("feddf-plus+scaffold", {}, ["class-counts", "scaffold"]),
        ("feddf-plus", {"fusion.parts": ("mine:part", "class-counts")}, ["class-counts", "mine:part"]),  # each once
    ],
)
def test_clients_tell_only_what_something_is_made_of(method: str, changes: dict[str, Any], names: list[str]) -> None:
    assert part_names(with_values(variant(BASE, method), changes)) == names


@pytest.mark.parametrize("part", [name for name in NAMED if name not in PARTS])
def test_a_part_with_two_halves_is_added_like_the_others(part: str) -> None:
    added = variant(BASE, f"fedavg+prox+{part}")
    assert added == with_values(variant(BASE, "fedprox"), {"fusion.parts": (part,)})
    assert method_name(flat(added.model_dump())) != "fedprox"
    both = grid(BASE, ["fedprox", f"fedprox+{part}"], [0])
    assert [one.experiment.fusion.parts for one in both] == [(), (part,)]


def test_a_grid_is_every_method_with_every_seed() -> None:
    found = grid(BASE, ["fedavg", *SHORT], [3, 4])
    assert [one.folder for one in found[:3]] == ["fedavg-seed3", "fedprox-seed3", "fedavgm-seed3"]
    assert len(found) == 2 * (1 + len(SHORT))
    assert {one.experiment.seed for one in found} == {3, 4}


def test_several_values_of_a_key_are_settings_with_names() -> None:
    found = grid(BASE, ["fedavg"], [0, 1], {"partition.alpha": [0.1, 10], "local.epochs": [1]})
    assert [one.folder for one in found] == [
        "alpha=0.1,epochs=1-fedavg-seed0",
        "alpha=0.1,epochs=1-fedavg-seed1",
        "alpha=10,epochs=1-fedavg-seed0",
        "alpha=10,epochs=1-fedavg-seed1",
    ]
    assert {one.experiment.partition.alpha for one in found} == {0.1, 10.0}


@pytest.mark.parametrize("method", [*SHORT, "fedavg", "feddf"])
def test_reports_call_a_method_by_its_short_name(method: str) -> None:
    assert method_name(flat(variant(BASE, method).model_dump())) == method


def test_reports_say_what_the_short_name_does_not() -> None:
    other = with_values(variant(BASE, "feddf-plus"), {"local.prox_mu": 0.1})
    assert method_name(flat(other.model_dump())) == "feddf-plus+prox_mu=0.1"
