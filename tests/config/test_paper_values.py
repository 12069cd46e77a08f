"""The presets have the values that the paper states, or a numbered deviation."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from feddf.config import Experiment, load
from feddf.config.experiment import presets
from feddf.config.keys import flat

STATED = tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))
DEVIATIONS = STATED.pop("deviations")
FOR_ALL = STATED.pop("all")
DOCS = Path(__file__).parents[2] / "docs" / "paper-map.md"


def given(experiment: Experiment, key: str) -> Any:
    if key == "pool":
        return experiment.pool.names
    if key == "prototypes":
        return ", ".join(prototype.model for prototype in experiment.prototypes)
    if key == "pool.share_of_training":
        return experiment.pool.share_of_training
    return flat(experiment.model_dump())[key]


@pytest.mark.parametrize("name", STATED)
def test_a_preset_has_what_the_paper_states(name: str) -> None:
    experiment = load(name)
    for key, stated in {**FOR_ALL, **STATED[name]}.items():
        deviation = DEVIATIONS.get(f"{name} {key}")
        if given(experiment, key) != stated:
            assert deviation, f"{name}: {key} = {given(experiment, key)!r}, and the paper has {stated!r}"
            assert f"**{deviation}**" in DOCS.read_text(encoding="utf-8"), f"{deviation} is not in the paper map"
        else:
            assert not deviation, f"{name}: {key} does not deviate, so it needs no {deviation}"


def test_every_preset_for_a_table_or_figure_deals_as_the_authors_do() -> None:
    for name in STATED:
        assert load(name).partition.scheme == "dirichlet-equal", name


def test_every_other_preset_is_no_table_or_figure() -> None:
    other_outputs = {"diabetes", "digit-grid", "digit-scenes", "ag-news-characters"}
    assert set(presets()) - set(STATED) == {"demo", "toy", "cifar10-small", "cifar10-released"} | other_outputs
