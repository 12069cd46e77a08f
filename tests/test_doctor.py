"""``feddf doctor``."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from feddf.cli import app
from feddf.runtime import device, execution

doctor = sys.modules["feddf.cli.doctor"]  # feddf.cli.doctor itself is the command

NAMES = ["machine", "feddf", "torch", "cpu", "set", "workers", "extras", "data", "disk"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without what takes long: compilation and child processes."""
    monkeypatch.setattr(execution, "can_compile", lambda kind: False)
    monkeypatch.setattr(device, "works", lambda kind, precision: precision == "float32")
    monkeypatch.setattr(device, "present", lambda: {"cpu": 1})
    monkeypatch.setattr(doctor, "_try_code", lambda code: "work")
    return monkeypatch


def test_every_thing_is_one_line(quick: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("trying")] == NAMES
    found = dict(line.split(maxsplit=1) for line in lines)
    assert "run.precision may be float32;" in found["cpu"]
    assert "run.compile does not work" in found["cpu"]
    assert "run.device = 'auto'" in found["set"]
    assert "fedma" in found["extras"]


def test_programs_get_the_same_as_json(quick: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert list(json.loads(done.stdout)) == NAMES


def test_a_device_that_computes_something_else_is_said(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(device, "works", lambda kind, precision: False)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "DOES NOT WORK" in done.stdout


def test_several_accelerators_are_dealt_to_workers(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(device, "count", lambda kind: 2)
    quick.setattr(device, "choose", lambda name: device.torch.device("cuda"))
    assert "'cuda' here; run.workers = 2" in doctor._advice()


def test_an_extra_that_is_missing_comes_with_its_remedy(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(doctor, "EXTRAS", {"images": "PIL", "ray": "no_such_module"})
    assert doctor._extras() == "images; for more: pip install 'feddf[ray]'"


def test_code_that_fails_or_kills_its_process_is_said_in_one_line() -> None:
    assert doctor._try_code("1 / 0") == "DO NOT WORK: ZeroDivisionError: division by zero"
    assert doctor._try_code("import os, signal; os.kill(os.getpid(), signal.SIGILL)") == "DO NOT WORK: code -4"


@pytest.mark.long
def test_worker_processes_are_really_started() -> None:
    assert doctor._try_code(doctor.WORKERS) == "work"
    assert doctor._try_code(doctor.WORKERS.replace("repr", "len")).startswith("DO NOT WORK: AssertionError")
