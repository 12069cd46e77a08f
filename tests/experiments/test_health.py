"""``feddf doctor``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from feddf.cli import app
from feddf.experiments import health
from feddf.experiments.health import Trial, advice, checked, compared, tried
from pretend_device import NAME, pretend_device


def test_a_small_round_learns_something_and_is_the_same_on_another_device() -> None:
    here = tried("cpu")
    assert here.accuracy > 0.6
    assert here.seconds.keys() >= {"train", "fuse", "all"}
    with pretend_device():
        there = tried(NAME)
    assert compared(there, here)["works"]
    assert compared(there, here)["largest_difference_from_cpu"] < 1e-4


def test_a_device_that_computes_something_else_does_not_work() -> None:
    good, bad = Trial(1.0, {"all": 1.0}, [[0.9, 0.1]]), Trial(1.0, {"all": 1.0}, [[0.8, 0.2]])
    assert compared(good, good)["works"]
    found = compared(bad, good)
    assert not found["works"]
    assert found["reason"] == "its probabilities differ from the CPU's by 0.1"
    assert compared("the process ended with code -4", good) == {
        "works": False,
        "reason": "the process ended with code -4",
    }


def test_what_is_missing_or_broken_is_said() -> None:
    assert checked("import no_such_module") == "not installed"
    assert checked("1 / 0") == "ZeroDivisionError: division by zero"
    assert checked("import os, signal; os.kill(os.getpid(), signal.SIGILL)") == "the process ended with code -4"
    assert checked("pass") == "works"


def test_advice() -> None:
    cpu = {"works": True, "bfloat16": False, "compile": True, "number": 1}
    assert advice({"cpu": cpu})[0].startswith("run.device = 'cpu'")
    assert "run.precision = 'float32': bfloat16 does not work there" in advice({"cpu": cpu})
    gpus = {"works": True, "bfloat16": True, "compile": False, "number": 2}
    lines = advice({"cpu": cpu, "cuda": gpus})
    assert lines[0].startswith("run.device = 'cuda' ('auto', the default, chooses ")
    assert any(line.startswith("run.workers = 2") for line in lines)
    assert any(line.startswith("run.compile = false") for line in lines)
    broken = advice({"cpu": cpu, "cuda": {**gpus, "works": False, "reason": "it crashed"}})
    assert broken[0].startswith("run.device = 'cpu'")
    assert "do not use run.device = 'cuda': it crashed" in broken


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"]])
def test_the_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(0.9, {"all": 1.0}, [[0.5, 0.5]])
    monkeypatch.setattr(health, "tried_in_child", lambda name: trial)
    monkeypatch.setattr(health, "checked", lambda code: "works")
    monkeypatch.setattr(health, "can_compile", lambda name: True)
    monkeypatch.setattr(health.devices, "works", lambda name, precision: False)
    monkeypatch.setattr(health.devices, "present", lambda: {"cpu": 1})
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    if words[-1] == "--json":
        found: Any = json.loads(done.stdout)
        assert found["devices"]["cpu"]["works"] is True
        assert found["checks"] == {"worker processes": "works", "ray": "works", "flower": "works"}
        assert found["versions"]["torch"]
    else:
        assert "What to set" in done.stdout
        assert "run.device = 'cpu'" in done.stdout
