"""The example of a fusion of one's own, in both of its forms: by name in a configuration, and from Python."""

from __future__ import annotations

import runpy
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from feddf.cli import app
from feddf.data import datasets
from feddf.runs.store import RunFolder
from feddf.types import Update

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["rounds=2", "data.train_size=300", "test_size=200", "clients.total=4", "local.epochs=1", "engine=in-process"]


def test_both_forms_reach_the_same_accuracies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(datasets, "mnist_5k", cache(datasets.mnist_5k))  # reading it takes most of the time
    words = ["run", str(EXAMPLES / "own_fusion.toml"), *SMALL, "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    folder = RunFolder.open(tmp_path / "run")
    assert folder.experiment().fusion.method == "own_fusion:median"
    by_name = [
        f"round {record['round']}: {name} {model['fused']:.3f}"
        for record in folder.records()
        for name, model in record["models"].items()
    ]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["own_fusion.py", *SMALL])
    runpy.run_path(str(EXAMPLES / "own_fusion.py"), run_name="__main__")
    assert len(by_name) == 4
    assert capsys.readouterr().out.splitlines() == by_name


def test_the_rule_is_the_median_of_each_coordinate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from own_fusion import rule

    def update(name: str, *values: float) -> Update:
        return Update(name, "net", 1, {"w": torch.tensor(values), "n": torch.tensor(len(name))}, 5)

    previous = {"w": torch.zeros(2), "n": torch.tensor(0)}
    fused = rule(previous, [update("a", 1.0, 9.0), update("bb", 5.0, -1.0), update("ccc", 2.0, 4.0)])
    assert torch.equal(fused["w"], torch.tensor([2.0, 4.0]))
    assert torch.equal(fused["n"], torch.tensor(2))
    assert torch.equal(rule(previous, [])["w"], previous["w"])


def test_parts_of_ones_own_are_named_in_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedNTD's loss in twenty lines, and weights of teachers with a state of their own, outside the package."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(datasets, "mnist_5k", cache(datasets.mnist_5k))
    accuracies = []
    for number, change in enumerate([[], ['fusion.parts=["own_parts:statistics"]'], ["ensemble.weights=uniform"]]):
        words = ["run", str(EXAMPLES / "own_parts.toml"), *SMALL, "distill.steps=20", *change]
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / str(number))], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        records = RunFolder.open(tmp_path / str(number)).records()
        assert ("no_ensemble" in records[-1]) == (change != ["ensemble.weights=uniform"])
        accuracies.append([record["metrics_of_clients"]["train_loss"] for record in records])
    assert accuracies[0] != accuracies[1], "the loss is used"
    assert accuracies[0] != accuracies[2], "so are the weights"
