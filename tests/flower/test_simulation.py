"""The real thing: Flower's simulation on Ray, against the same experiment in-process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.ray_settings import SETTINGS
from feddf.config import parse
from feddf.config.keys import nested
from flower.test_strategy import BASE, in_process
from soak import SOAK

pytestmark = pytest.mark.xdist_group("engines")  # it starts a Ray cluster of its own: one at a time

CONFIG = nested(BASE, {} if SOAK else {"rounds": 2, "clients.total": 3, "clients.fraction": 0.7, "run.workers": 1})
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def test_a_flower_simulation_ends_with_the_same_bytes_as_in_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    program = Path(__file__).with_name("simulated.py")
    words = [sys.executable, str(program), str(tmp_path / "config.json"), str(tmp_path / "run")]
    example = Path(__file__).parents[2] / "examples" / "flower-simulation"
    places = {"FLWR_HOME": str(tmp_path / "flwr"), "PYTHONPATH": str(example)}
    environment = {**os.environ, **OFFLINE, **SETTINGS, **places}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["digest"] == in_process(parse(CONFIG), tmp_path / "here")[0]
    assert found["no such function"] is True
