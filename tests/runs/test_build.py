from __future__ import annotations

from pathlib import Path

import pytest
import torch
from feddf.runs.config import parse

from feddf.data import Dataset, datasets
from feddf.runs import ConfigError, RunFolder, play
from feddf.runs.build import build
from feddf.states import digest
from feddf.types import Examples, Inputs

BASE = {"data": "toy", "pool": "plane", "prototypes": ["mlp"], "clients": 4, "engine": "in-process"}


def crowded() -> Dataset:
    """More classes than examples."""
    toy = datasets.toy(None)
    few = Examples(toy.train.inputs, toy.train.labels, 1000)
    return Dataset("crowded", few.take(torch.arange(60)), few)


def mislabelled() -> Dataset:
    toy = datasets.toy(None)
    return Dataset("mislabelled", Examples(toy.train.inputs, toy.train.labels - 1, 3), toy.test)


def local_encode() -> Dataset:
    toy = datasets.toy(None)
    inputs = Inputs(toy.train.inputs.raw, lambda raw: raw)
    return Dataset("local", Examples(inputs, toy.train.labels, 3), toy.test)


def empty() -> Dataset:
    toy = datasets.toy(None)
    return Dataset("empty", toy.train.take(torch.tensor([], dtype=torch.int64)), toy.test)


def one_sample() -> Dataset:
    toy = datasets.toy(None)
    return Dataset("one", toy.train.take(torch.tensor([3])), toy.test)


def nothing() -> int:
    return 3


MISTAKES = {
    "pool of another shape": (
        {"pool": "digits"},
        "pool = 'digits': inputs of type torch.uint8 cannot stand in for",
    ),
    "pool too small": (
        {"data": "mnist-5k", "pool": "digits", "pool_size": 5000},
        "5000 inputs were asked for, .* has 1438",
    ),
    "unknown data": ({"data": "cifar11"}, "data = 'cifar11': known are mnist-5k"),
    "unknown pool": ({"pool": "cifar11"}, "pool = 'cifar11': known are mnist-5k"),
    "unknown model": ({"prototypes": ["resnet9"]}, "prototypes.model = 'resnet9': known are mlp, cnn"),
    "unknown option": ({"prototypes": [{"model": "mlp", "depth": 3}]}, "unexpected keyword argument 'depth'"),
    "image model on points": ({"prototypes": ["resnet8"]}, r"does not work on inputs of shape \(2,\)"),
    "too many clients": (
        {"clients": 100},
        "clients = 100: with at least 10 examples each .* 540",
    ),
    "more classes than data": ({"data": "test_build:crowded"}, "1000 classes are more than its 60 examples"),
    "labels out of range": ({"data": "test_build:mislabelled"}, "has labels from -1 to 1, and must have 0 to 2"),
    "a lambda and workers": ({"data": "test_build:local_encode", "engine": "processes"}, "cannot travel to worker"),
    "no data": ({"data": "test_build:empty"}, "has 0 inputs and 0 labels"),
    "a pool of one": ({"pool": "test_build:one_sample"}, "a pool needs at least two inputs, and this has 1"),
    "no validation left": ({"validation": 0.0001}, "leaves no validation example out of 600"),
    "augmented points": ({"augment": "flip-crop"}, "the inputs of 'toy' are not images"),
    "missing module": ({"data": "no_such_module:f"}, "cannot be imported: No module named 'no_such_module'"),
    "missing attribute": ({"data": "test_build:f"}, "cannot be imported"),
    "not a data set": ({"data": "test_build:nothing"}, "must give a feddf.Dataset, and gave a int"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_together_is_one_line_before_any_training(name: str) -> None:
    values, said = MISTAKES[name]
    with pytest.raises(ConfigError, match=said) as error:
        build(parse({**BASE, **values}))
    assert "\n" not in str(error.value)


def test_the_same_config_gives_the_same_parts() -> None:
    one, two = (build(parse(BASE)) for _ in range(2))
    assert digest(one.server.models) == digest(two.server.models)
    assert all(torch.equal(a, b) for a, b in zip(one.task.shards, two.task.shards, strict=True))


def test_methods_share_shards_validation_and_initial_weights() -> None:
    """Only the fusion differs between methods: an honest comparison."""
    df, avg = (build(parse({**BASE, "method": method})) for method in ("feddf", "fedavg"))
    assert digest(df.server.models) == digest(avg.server.models)
    assert all(torch.equal(a, b) for a, b in zip(df.task.shards, avg.task.shards, strict=True))
    assert torch.equal(df.task.validation.labels, avg.task.validation.labels)


def test_validation_test_pool_and_shards_do_not_overlap() -> None:
    parts = build(parse(BASE))

    def rows(tensor: torch.Tensor) -> set[tuple[float, ...]]:
        return {tuple(row) for row in tensor.tolist()}

    task = parts.task
    assert task.pool is not None
    assert len(task.train) + len(task.validation) == 600
    places = [task.train, task.validation, task.data.test]
    sets = [rows(place.inputs.raw) for place in places] + [rows(task.pool.raw)]
    assert sum(map(len, sets)) == len(set.union(*sets))


def test_prototypes_are_dealt_evenly() -> None:
    parts = build(parse({**BASE, "clients": 7, "prototypes": [{"model": "mlp", "name": n} for n in "abc"]}))
    assert [client.prototype for client in parts.federation.clients] == list("abcabca")


def test_own_data_and_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_test.py").write_text(
        "from feddf.data.datasets import toy\n"
        "from feddf.models import MLP\n"
        "def points(): return toy(None)\n"
        "class Net(MLP): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    prototypes = [{"model": "mine_for_test:Net", "width": 5}]
    parts = build(parse({**BASE, "data": "mine_for_test:points", "prototypes": prototypes}))
    assert parts.server.models["Net"]["layers.1.weight"].shape == (5, 2)


def test_every_method_can_be_named_in_a_configuration(tmp_path: Path) -> None:
    """FedProx, FedAvgM, Adam and drop-worst, all at once and under FedDF; and what a fusion remembers is kept."""
    values = {"proximal": 0.1, "server_momentum": 0.3, "local_optimizer": "adam", "local_rate": 0.01}
    short = {"drop_worst": "released", "rounds": 2, "local_epochs": 1, "distill_steps": 20, "fraction": 1}
    experiment = parse({**BASE, **values, **short})
    folder = RunFolder.create(tmp_path / "run", experiment)
    records = list(play(build(experiment), folder))
    assert all("dropped_worst" in record for record in records)
    server, _ = folder.latest()
    assert server is not None
    assert "velocity of mlp" in server.memory


def test_a_small_budget_takes_some_examples() -> None:
    small = build(parse({**BASE, "data_size": 100, "test_size": 50})).task
    assert (len(small.train) + len(small.validation), len(small.data.test)) == (100, 50)
    other = build(parse({**BASE, "data_size": 100, "test_size": 50, "seed": 1})).task
    assert torch.equal(small.data.test.labels, other.data.test.labels)
    assert not torch.equal(small.data.train.labels, other.data.train.labels)
    for key in ("data_size", "test_size"):
        with pytest.raises(ConfigError, match=f"{key} = 99999: there are"):
            build(parse({**BASE, key: 99999}))
