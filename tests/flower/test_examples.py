"""The Flower examples run: an app before and after it moved to FedDF, and that of the deployment."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from feddf.config import load
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
    app = tomllib.loads((DEPLOYMENT / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    given = {"rounds": 1, "folder": str(tmp_path / "run"), "data": str(tmp_path / "server.npz")}
    config = {**app["config"], **given}
    run(DEPLOYMENT / "app", "hospitals", config, nodes)
    (record,) = RunFolder.open(tmp_path / "run").records()
    assert record["clients"] == sorted(sites)
    assert all(model["fused"] > 0.6 for model in record["models"].values())
    assert record["evaluated_by_clients"]["means"]["accuracy"] > 0.6


def test_the_baseline_fuses_two_architectures_and_its_defaults_are_the_papers(tmp_path: Path) -> None:
    """With 48 images of one's own instead of CIFAR's, and few steps."""
    project = tomllib.loads((EXAMPLES / "flower-baseline" / "pyproject.toml").read_text())
    defaults = project["tool"]["flwr"]["app"]["config"]
    paper = load("cifar10-resnet8")
    assert (defaults["rounds"], defaults["local-epochs"], defaults["clients"]) == (paper.rounds, 40, 20)
    assert (defaults["fraction"], defaults["alpha"], defaults["distill-steps"]) == (0.4, paper.partition.alpha, 10_000)
    small = {"rounds": 1, "clients": 2, "fraction": 1.0, "alpha": 100.0, "local-epochs": 1, "distill-steps": 2}
    names = {"models": "resnet8,vgg9", "data": "tiny_images:colored", "pool": "tiny_images:others"}
    (tmp_path / "tiny_images.py").write_text(TINY)
    config = {**defaults, **small, **names, "folder": str(tmp_path / "run")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        run(EXAMPLES / "flower-baseline", "feddf_cifar", config, [{"partition-id": 0}, {"partition-id": 1}])
    (record,) = RunFolder.open(tmp_path / "run").records()
    assert sorted(record["models"]) == ["resnet8", "vgg9"]
    assert record["dropped"] == []


TINY = """
import torch
import feddf

def colored(data):
    labels = torch.arange(48) % 10
    images = (labels * 20).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32).contiguous()
    return feddf.from_torch(torch.utils.data.TensorDataset(images, labels), name="colored")

others = colored
"""
