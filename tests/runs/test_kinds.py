"""Runs whose outputs are labels, values or masks: from a data function to records, tables, a card and a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import stripes
from feddf.config import ConfigError, DataConfig, PartitionConfig
from feddf.config.experiment import parse
from feddf.config.names import DATASETS
from feddf.data.datasets import Dataset, wrong_labels
from feddf.data.partition import by_groups
from feddf.data.text import CHARACTERS, characters
from feddf.flower.settings import server_data, settings_of
from feddf.models.small import MLP, Standardized
from feddf.outputs import Outputs, classes, labels, values
from feddf.report.read import read_run
from feddf.report.tables import compared, results, runs_table
from feddf.runs.build import build, build_task
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.saved.model_folder import load_model
from feddf.types import Examples


def of(outputs: Outputs, wanted: Any, **more: Any) -> Dataset:
    def part(n: int, seed: int) -> Examples:
        found = stripes(n, seed)
        return Examples(found.inputs, wanted(found.labels), outputs, torch.arange(n) % 2 if more else None)

    return Dataset("own", part(90, 1), part(30, 2), **more)


def several(data: DataConfig) -> Dataset:
    found = of(labels(2), lambda y: torch.stack([y == 0, y > 0], dim=1).float())
    return replace(found, classes=("low", "high"))


def number(data: DataConfig) -> Dataset:
    return of(values(1), lambda y: 300 + 50.0 * y.unsqueeze(1))


def masks(data: DataConfig) -> Dataset:
    return of(
        classes(3, (8, 8), background=0), lambda y: (y % 3)[:, None, None].repeat(1, 8, 8), known=((0, 1), (0, 2))
    )


def wrong(data: DataConfig) -> Dataset:
    return of(values(1), lambda y: y.float())


RUN: dict[str, Any] = {
    "rounds": 2,
    "clients": {"total": 4, "fraction": 1.0},
    "local": {"epochs": 3, "batch_size": 8, "lr": 0.05},
    "pool": {"sources": [{"name": "train", "fraction": 0.3}]},
    "distill": {"steps": 10, "batch_size": 16, "eval_every": 5},
    "run": {"engine": "in-process", "log_clients": True},
}
MLPS = [{"model": "mlp", "width": 8}, {"model": "cnn", "width": 4}]


def experiment(name: str, **changes: Any) -> Any:
    models = ["unet", "dilated-cnn"] if name == "masks" else MLPS
    scheme = {"partition": {"scheme": "groups"}} if name == "masks" else {}
    data = {"name": f"{__name__}:{name}", "validation": 0.2}
    return parse({**RUN, "data": data, "prototypes": models, **scheme, **changes})


CASES = [("several", "macro F1", {"mean average precision", "AUROC"}), ("number", "R²", {"MAE"}),
         ("masks", "mean IoU", {"Dice", "accuracy"})]  # fmt: skip


@pytest.mark.parametrize(("name", "score", "measures"), CASES)
def test_a_run_says_what_it_is_scored_by(name: str, score: str, measures: set[str], tmp_path: Path) -> None:
    parts = build(experiment(name))
    folder = RunFolder.create(tmp_path / "run", parts.experiment)
    records = list(run_experiment(parts, folder))
    models = list(parts.prototypes)
    for record in records:
        assert record["score"] == score
        assert record["measures"].keys() == {"ensemble", *models}
        assert all(one.keys() == measures for one in record["measures"].values())
    run = read_run(folder.path)
    assert score in str(runs_table([run]).title)
    assert results([run])[0]["score"] == score
    assert compared({"feddf": [run]}).title.startswith(f"Test {score} after round 2")
    card = (folder.path / "README.md").read_text()
    assert f"## Test {score} in %" in card
    assert "a client's largest group is" in card  # and no class, which their examples do not have
    loaded = load_model(folder.path, models[0])
    assert loaded.spec.outputs.describe() == parts.task.train.outputs.describe()
    counts = np.array(json.loads((folder.path / "partition.json").read_text())["counts"])
    assert counts.sum() == len(parts.task.train)
    said = loaded.predict([np.zeros((8, 8), dtype=np.uint8)])[0]
    if name == "masks":
        assert said.mask is not None
        assert said.mask.shape == (8, 8)
        assert set(said.mask.flatten().tolist()) <= {0, 1, 2}
        return
    assert said.probabilities.keys() == ({"low", "high"} if name == "several" else {"0"})
    if name == "number":  # in the unit of the labels, not in that of the network
        assert 150 < float(said.label) < 550


def test_sites_learn_and_teach_what_they_know() -> None:
    parts = build(experiment("masks"))
    assert [client.known.tolist() for client in parts.federation.clients if client.known is not None] == [
        [True, True, False], [True, False, True], [True, True, False], [True, False, True],
    ]  # fmt: skip
    groups, _ = parts.task.train.partitioned_by
    for number, shard in enumerate(parts.task.shards):
        assert set(groups[shard].tolist()) == {number % 2}


def test_a_round_without_those_who_know_a_class_goes_through(tmp_path: Path) -> None:
    """One client a round: what the others know is left as it is, and nothing becomes infinite."""
    made = experiment("masks", clients={"total": 4, "fraction": 0.25})
    parts = build(made)
    records = list(run_experiment(parts, RunFolder.create(tmp_path / "run", made)))
    assert [len(record["clients"]) for record in records] == [1, 1]
    assert all(0 <= model["fused"] <= 1 for record in records for model in record["models"].values() if model["fused"])


MISTAKES = [
    (experiment, "masks", {"partition": {"scheme": "iid"}}, "partition.scheme = 'iid': the sites of"),
    (experiment, "masks", {"ensemble": {"combine": "cronus"}}, "ensemble.combine = 'cronus': teachers know different"),
    (experiment, "several", {"prototypes": ["unet"]}, "prototypes"),
    (experiment, "number", {"distill": {**RUN["distill"], "temperature": 3.0}}, "distill.temperature = 3.0: 'values'"),
    (experiment, "wrong", {}, "has labels of shape ()"),
]


@pytest.mark.parametrize(("make", "name", "changes", "said"), MISTAKES, ids=[case[3] for case in MISTAKES])
def test_what_does_not_fit_is_one_line_before_any_training(make: Any, name: str, changes: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(make(name, **changes))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_are_dealt_by_their_size_and_labels_by_the_rarest() -> None:
    skewed = {"partition": {"alpha": 0.01}, "clients": {"total": 3, "fraction": 1.0}}
    for name in ("number", "several"):
        task = build_task(experiment(name, **skewed))
        groups, n_groups = task.train.partitioned_by
        mixes = [torch.bincount(groups[shard], minlength=n_groups).double() for shard in task.shards]
        assert max(float(mix.max() / mix.sum()) for mix in mixes) > 1.3 / n_groups, name


def test_groups_are_dealt_whole() -> None:
    groups = torch.tensor([0, 1, 2] * 20)
    shards = by_groups(groups, 6, PartitionConfig(), n_classes=3, seed=0)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(60))
    assert [set(groups[shard].tolist()) for shard in shards] == [{0}, {1}, {2}] * 2
    with pytest.raises(ValueError, match="3 groups"):
        by_groups(groups, 2, PartitionConfig(), n_classes=3, seed=0)


def test_flower_takes_the_kind_of_the_server_s_examples() -> None:
    made = experiment("number")
    data = number(made.data)
    networks = {"mlp": lambda: Standardized(MLP((1, 8, 8), 1), 1)}
    resources, _, _ = server_data(networks, settings_of(made), data.train.inputs, data.test, None)
    assert resources.outputs.kind == "values"
    with pytest.raises(ConfigError, match="'values'"):
        server_data({"mlp": lambda: MLP((1, 8, 8), 3)}, settings_of(made), data.train.inputs, data.test, None)


# The data sets that come with packages


@pytest.mark.parametrize("name", ["diabetes", "digit-grid", "digit-scenes"])
def test_data_of_packages(name: str) -> None:
    data: Dataset = DATASETS[name](DataConfig(name=name))
    assert wrong_labels(data.train) is None
    assert wrong_labels(data.test) is None
    assert len(data.test) == (88 if name == "diabetes" else 2000)
    assert len(data.classes) == data.train.outputs.channels
    again: Dataset = DATASETS[name](DataConfig(name=name))
    assert torch.equal(again.test.labels, data.test.labels)
    train, test = (
        {row.numpy().tobytes() for row in one.inputs.raw[torch.arange(50)]} for one in (data.train, data.test)
    )
    assert not train & test


def test_characters_are_rows_of_numbers() -> None:
    rows = characters(["Ab~", "a much longer text"], 6)
    assert rows[0].tolist() == [CHARACTERS.index("a"), CHARACTERS.index("b"), 1, 0, 0, 0]
    assert "".join(CHARACTERS[number] for number in rows[1]) == "a much"
