from __future__ import annotations

import pytest
from feddf.experiments.compare import PARTS, SHORT, grid, variant
from feddf.runs.config import Experiment, parse
from feddf.runs.settings import ConfigError

BASE = parse({"data": "toy", "pool": "plane", "prototypes": ["mlp"], "clients": 4})


def test_methods_are_named_by_their_parts() -> None:
    assert variant(BASE, "fedprox").model_dump() == {**BASE.model_dump(), "method": "fedavg", "proximal": 0.01}
    assert variant(BASE, "fedavgm").server_momentum == 0.2
    both = variant(BASE, "feddf+prox+swag")
    assert (both.method, both.proximal, both.swag_samples) == ("feddf", 0.01, 10)


def test_a_value_belongs_to_the_methods_that_name_its_part() -> None:
    """Otherwise "fedavg" beside "fedprox" with proximal=0.1 would be FedProx too."""
    tuned = parse({**BASE.model_dump(), "proximal": 0.1, "server_momentum": 0.3})
    found = grid(tuned, ["fedavg", "fedprox", "fedavgm"], [0])
    assert [(each.proximal, each.server_momentum) for each in found.values()] == [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3)]
    alone = grid(tuned, ["fedavg", "feddf"], [0])  # nobody names them: they are the experiment's
    assert {each.proximal for each in alone.values()} == {0.1}


def test_a_value_of_the_configuration_wins() -> None:
    tuned = parse({**BASE.model_dump(), "proximal": 0.5})
    assert variant(tuned, "fedprox").proximal == 0.5


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_a_change_of_the_configuration(part: str) -> None:
    assert variant(BASE, f"feddf+{part}") != variant(BASE, "feddf")
    assert PARTS[part].keys() <= Experiment.model_fields.keys()


@pytest.mark.parametrize("method", ["fedsgd", "feddf+magic", "", "+prox"])
def test_what_is_not_known_is_listed(method: str) -> None:
    with pytest.raises(ConfigError, match=r"methods = .*known are fedavg, feddf, fedma, fedprox, fedavgm, with any of"):
        variant(BASE, method)


def test_a_grid_is_every_method_with_every_seed() -> None:
    found = grid(BASE, ["fedavg", *SHORT], [3, 4])
    assert list(found)[:3] == ["fedavg-seed3", "fedprox-seed3", "fedavgm-seed3"]
    assert len(found) == 6
    assert {experiment.seed for experiment in found.values()} == {3, 4}
