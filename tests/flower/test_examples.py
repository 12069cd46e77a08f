"""The Flower examples run: an app before and after it moved to FedDF, and that of the deployment."""

from __future__ import annotations

import difflib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from feddf.runs.store import RunFolder

EXAMPLES = Path(__file__).parents[2] / "examples"
MIGRATION, DEPLOYMENT = EXAMPLES / "flower-migration", EXAMPLES / "flower-deployment"


def run(folder: Path, package: str, run_config: dict[str, Any], node_configs: list[dict[str, Any]]) -> str:
    program = Path(__file__).with_name("run_app.py")
    configs = [json.dumps(config) for config in (run_config, *node_configs)]
    words = [sys.executable, str(program), str(folder), package, *configs]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def digits(version: str, folder: Path) -> str:
    nodes = [{"partition-id": number} for number in range(10)]
    return run(MIGRATION / version, "digits", {"rounds": 3, "folder": str(folder)}, nodes)


def test_before_it_averages_one_model(tmp_path: Path) -> None:
    assert "accuracy" in digits("before", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_after_it_fuses_two_sizes(tmp_path: Path) -> None:
    digits("after", tmp_path / "run")
    records = RunFolder.open(tmp_path / "run").records()
    assert [record["round"] for record in records] == [1, 2, 3]
    assert {len(record["clients"]) for record in records} == {10}
    assert all(records[-1]["models"][size]["fused"] > 0.6 for size in ("small", "large"))


def test_training_is_untouched_and_few_lines_change() -> None:
    def lines(version: str, name: str) -> list[str]:
        return (MIGRATION / version / "digits" / name).read_text().splitlines()

    assert lines("before", "task.py") == lines("after", "task.py")
    changes = list(difflib.unified_diff(lines("before", "client_app.py"), lines("after", "client_app.py"), n=0))
    added = [line for line in changes if line.startswith("+") and not line.startswith("+++") and line != "+"]
    assert len(added) <= 6


def test_the_app_of_the_deployment_fuses_three_architectures(tmp_path: Path) -> None:
    sites = {"north": "mlp", "south": "wide", "west": "cnn"}
    specification = importlib.util.spec_from_file_location("shards", DEPLOYMENT / "shards.py")
    assert specification is not None
    assert specification.loader is not None
    shards = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(shards)
    shards.share_digits(tmp_path, list(sites))
    nodes = [
        {"site": site, "architecture": architecture, "data": str(tmp_path / f"{site}.npz")}
        for site, architecture in sites.items()
    ]
    config = {"rounds": 1, "folder": str(tmp_path / "run"), "data": str(tmp_path / "server.npz")}
    run(DEPLOYMENT / "app", "hospitals", config, nodes)
    (record,) = RunFolder.open(tmp_path / "run").records()
    assert record["clients"] == sorted(sites)
    assert all(model["fused"] > 0.6 for model in record["models"].values())
    assert record["evaluated_by_clients"]["means"]["accuracy"] > 0.6
