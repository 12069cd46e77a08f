from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import update_of
from feddf.config import ConfigError, DataConfig, Experiment, Settings, parse
from feddf.config.keys import nested
from feddf.data.datasets import Dataset, toy
from feddf.engines import in_process
from feddf.outputs import classes
from feddf.rounds import jobs_for
from feddf.runs.build import Parts, build
from feddf.runs.loading import load_dataset
from feddf.runs.methods import fedavg
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.states import digest
from feddf.types import (
    Client,
    Engine,
    Examples,
    Fused,
    Inputs,
    Method,
    Part,
    Resources,
    Sent,
    ServerState,
    State,
    Steps,
    Training,
    Update,
)  # fmt: skip

BASE = {
    "data": {"name": "toy"}, "pool": {"sources": ["plane"]}, "prototypes": ["mlp"], "clients": {"total": 4},
    "run": {"engine": "in-process"},
}  # fmt: skip


def experiment(changes: dict[str, Any] | None = None) -> Experiment:
    return parse(nested(BASE, changes or {}))


def crowded(data: DataConfig) -> Dataset:
    """More classes than examples."""
    few = Examples(toy(data).train.inputs, toy(data).train.labels, classes(1000))
    return Dataset("crowded", few.take(torch.arange(60)), few)


def mislabeled(data: DataConfig) -> Dataset:
    plain = toy(data)
    return Dataset("mislabeled", Examples(plain.train.inputs, plain.train.labels - 1, classes(3)), plain.test)


def local_encode(data: DataConfig) -> Dataset:
    plain = toy(data)
    inputs = Inputs(plain.train.inputs.raw, lambda raw: raw)
    return Dataset("local", Examples(inputs, plain.train.labels, classes(3)), plain.test)


def empty(data: DataConfig) -> Dataset:
    plain = toy(data)
    return Dataset("empty", plain.train.take(torch.tensor([], dtype=torch.int64)), plain.test)


def one_sample(data: DataConfig) -> Dataset:
    plain = toy(data)
    return Dataset("one", plain.train.take(torch.tensor([3])), plain.test)


def ragged(data: DataConfig) -> Dataset:
    """Images of two sizes, which a tensor cannot hold."""
    rows: Any = [torch.zeros(1, 8 + k % 2, 8) for k in range(30)]
    part = Examples(Inputs(rows, lambda raw: raw), torch.zeros(30, 8, 8, dtype=torch.int64), classes(2, (8, 8)))
    return Dataset("ragged", part, part)


def masks(data: DataConfig) -> Dataset:
    rows = torch.zeros(30, 1, 8, 8, dtype=torch.uint8)
    part = Examples(Inputs(rows, lambda raw: raw), torch.zeros(30, 8, 8, dtype=torch.int64), classes(2, (8, 8)))
    return Dataset("masks", part, part)


def nothing(data: DataConfig) -> int:
    return 3


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "pool of another shape": (
        {"pool.sources": ["digits"]},
        r"pool\.sources = 'digits': inputs of type torch.uint8 cannot stand in for",
    ),
    "pool too small": (
        {"data.name": "mnist-5k", "pool.sources": ["digits"], "pool.size": 5000},
        "5000 inputs were asked for, .* has 1438",
    ),
    "unknown data": ({"data.name": "cifar11"}, r"data\.name = 'cifar11': did you mean 'cifar10"),
    "unknown pool": ({"pool.sources": ["cifar11"]}, r"pool\.sources = 'cifar11': did you mean 'cifar10"),
    "unknown model": ({"prototypes": ["resnet9"]}, r"prototypes\.model = 'resnet9': did you mean 'resnet8'"),
    "unknown option": ({"prototypes": [{"model": "mlp", "depth": 3}]}, "unexpected keyword argument 'depth'"),
    "image model on points": ({"prototypes": ["resnet8"]}, r"does not work on inputs of shape \(2,\)"),
    "too many clients": ({"clients.total": 100}, r"clients\.total = 100: with at least 10 examples each .* 540"),
    "more classes than data": ({"data.name": "test_build:crowded"}, "1000 classes are more than its 60 examples"),
    "images of different sizes": ({"data.name": "test_build:ragged"}, "images of different sizes .* fill them up and"),
    "resized images, not their masks": (
        {"data.name": "test_build:masks", "data.image_size": 4},
        r"data\.image_size = 4: the labels, one for each pixel",
    ),
    "labels out of range": ({"data.name": "test_build:mislabeled"}, "has labels from -1 to 1, and must have 0 to 2"),
    "a lambda and workers": (
        {"data.name": "test_build:local_encode", "run.engine": "processes"},
        "cannot be sent to worker processes",
    ),
    "no data": ({"data.name": "test_build:empty"}, "has 0 inputs and 0 labels"),
    "a pool of one": (
        {"pool.sources": ["test_build:one_sample"]},
        "a pool needs at least two inputs, and this has 1",
    ),
    "no validation left": ({"data.validation": 0.0001}, "leaves no validation example out of 600"),
    "augmented points": ({"local.augment": "flip-crop"}, "the inputs of 'toy' are not images"),
    "missing module": ({"data.name": "no_such_module:f"}, "cannot be imported: No module named 'no_such_module'"),
    "missing attribute": ({"data.name": "test_build:f"}, r"data\.name = 'test_build:f': cannot be imported"),
    "missing model": ({"prototypes": ["test_build:Net"]}, r"'test_build:Net': cannot be imported"),
    "missing method": ({"fusion.method": "test_build:f"}, r"fusion\.method = 'test_build:f': cannot be imported"),
    "missing scheme": ({"partition.scheme": "test_build:f"}, r"partition\.scheme = 'test_build:f': cannot be imp"),
    "not a data set": ({"data.name": "test_build:nothing"}, "must give a feddf.Dataset, and gave a int"),
    "a strict method": ({"fusion.method": "test_build:strict"}, r"fusion\.method = 'test_build:strict': not today"),
    "two that make the weights": (
        {"fusion.method": "test_build:watched", "local.binary": "straight-through"},
        r"local\.binary = 'straight-through': .*weights",
    ),
    "two losses": (
        {"fusion.method": "test_build:watched", "local.logit_adjustment": 1.0},
        "two parts of the method change the clients' loss",
    ),
    "two losses of parts": (
        {"fusion.method": "test_build:watched", "fusion.parts": ["test_build:with_a_loss"]},
        r"fusion\.parts = \['test_build:with_a_loss'\]: 'mlp': two parts of the method change the clients' loss",
    ),
    "nothing to binarize": (
        {"prototypes": [{"model": "test_build:Line"}], "local.binary": "straight-through"},
        r"local\.binary = 'straight-through': 'Line': it has no layer between its first and its last",
    ),
    "control variates and Adam": (
        {"fusion.parts": ["scaffold"], "local.optimizer": "adam"},
        r"fusion\.parts = \['scaffold'\]: 'mlp': control variates are for steps of SGD",
    ),
    "control variates of bits": (
        {"fusion.parts": ["scaffold"], "local.binary": "straight-through"},
        r"(fusion\.parts|local\.binary) = ",
    ),
    "control variates of layers that grow": (
        {"fusion.parts": ["scaffold"], "fusion.method": "fedma"},
        r"fusion\.parts = \['scaffold'\]: FedMA's layers grow .*; leave it at \[\]",
    ),
    "unknown part": ({"fusion.parts": ["scafold"]}, r"fusion\.parts = 'scafold': did you mean 'scaffold'"),
    "missing part": ({"fusion.parts": ["test_build:f"]}, r"'test_build:f': cannot be imported"),
}


def strict(resources: Resources, settings: Settings, engine: Engine) -> Method:
    raise ValueError("not today")


def watched(resources: Resources, settings: Settings, engine: Engine) -> Method:
    return Method(fedavg(resources, settings, engine), (Part(half=own_half),))


def own_half(model: nn.Module, training: Training) -> Steps:
    return Steps(own_loss, finish=lambda: Sent(model.state_dict()))


def own_loss(outputs: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels)


def with_a_loss(resources: Resources) -> Part:
    return Part(half=lambda model, training: Steps(own_loss))


class Line(nn.Linear):
    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__(*shape, n_classes)


@pytest.mark.parametrize(
    "name",
    list(MISTAKES),
)
def test_what_does_not_fit_together_is_one_line_before_any_training(name: str) -> None:
    values, said = MISTAKES[name]
    with pytest.raises(ConfigError, match=said) as error:
        build(experiment(values))
    assert "\n" not in str(error.value)


def test_masks_that_have_the_size_are_taken() -> None:
    """As ``feddf fuse`` asks for labeled data at the size of its pool."""
    name = "test_build:masks"
    assert load_dataset("data.name", name, DataConfig(name=name, image_size=8)).shape == (1, 8, 8)


def test_the_same_config_gives_the_same_parts() -> None:
    one, two = (build(experiment()) for _ in range(2))
    assert digest(one.server.models) == digest(two.server.models)
    assert all(torch.equal(a, b) for a, b in zip(one.task.shards, two.task.shards, strict=True))


def test_methods_share_shards_validation_and_initial_weights() -> None:
    """Only the fusion differs between methods: an honest comparison."""
    df, avg = (build(experiment({"fusion.method": method})) for method in ("feddf", "fedavg"))
    assert digest(df.server.models) == digest(avg.server.models)
    assert all(torch.equal(a, b) for a, b in zip(df.task.shards, avg.task.shards, strict=True))
    assert torch.equal(df.task.validation.labels, avg.task.validation.labels)


def test_validation_test_pool_and_shards_do_not_overlap() -> None:
    parts = build(experiment())

    def rows(tensor: torch.Tensor) -> set[tuple[float, ...]]:
        return {tuple(row) for row in tensor.tolist()}

    task = parts.task
    assert task.pool is not None
    assert len(task.train) + len(task.validation) == 600
    places = [task.train, task.validation, task.data.test]
    sets = [rows(place.inputs.raw) for place in places] + [rows(task.pool.raw)]
    assert sum(map(len, sets)) == len(set.union(*sets))


def test_prototypes_are_dealt_evenly() -> None:
    parts = build(experiment({"clients.total": 7, "prototypes": [{"model": "mlp", "name": n} for n in "abc"]}))
    assert [client.prototype for client in parts.federation.clients] == list("abcabca")


def test_own_data_and_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_test.py").write_text(
        "from feddf.data.datasets import toy\n"
        "from feddf.models.small import MLP\n"
        "def points(data): return toy(data)\n"
        "class Net(MLP): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    prototypes = [{"model": "mine_for_test:Net", "width": 5}]
    parts = build(experiment({"data.name": "mine_for_test:points", "prototypes": prototypes}))
    assert parts.server.models["Net"]["layers.1.weight"].shape == (5, 2)


def thirds(labels: torch.Tensor, clients: int, partition: object, *, n_classes: int, seed: int) -> list[torch.Tensor]:
    """Client k has every example whose number ends in k."""
    return [torch.arange(k, len(labels), clients) for k in range(clients)]


def last_wins(resources: Resources, settings: Settings, engine: Engine) -> Method:
    """A user's method: the last update of each prototype, and as many rounds with the same clients as asked for."""

    def fuse(server: ServerState, updates: list[Update], seed: int) -> Fused:
        models: dict[str, State] = {**server.models, **{update.prototype: update.state for update in updates}}
        return Fused(server.next(models), models, {"note": settings.fusion.options["note"]})

    return Method(fuse, rounds_per_cohort=settings.fusion.options["hold"])


def test_own_methods_and_schemes_by_name(tmp_path: Path) -> None:
    changes = {
        "fusion.method": "test_build:last_wins", "fusion.options": {"note": "mine", "hold": 2}, "rounds": 2,
        "partition.scheme": "test_build:thirds", "clients.total": 3, "clients.fraction": 0.34, "local.epochs": 1,
    }  # fmt: skip
    parts = build(experiment(changes))
    assert [shard[:2].tolist() for shard in parts.task.shards] == [[0, 3], [1, 4], [2, 5]]
    folder = RunFolder.create(tmp_path / "run", parts.experiment)
    records = list(run_experiment(parts, folder))
    assert [record["note"] for record in records] == ["mine", "mine"]
    assert records[0]["clients"] == records[1]["clients"]
    server, _ = folder.latest()
    assert server is not None
    (client,) = (each for each in parts.federation.clients if [each.id] == records[0]["clients"])
    assert digest(server.models) == digest({"mlp": trained_twice(parts, client)})


def trained_twice(parts: Parts, client: Client) -> State:
    server = parts.server
    for number in (1, 2):
        (job,) = jobs_for(server, parts.federation, [client])
        server = ServerState(number, {"mlp": parts.train(job).state})
    return server.models["mlp"]


def test_every_method_can_be_named_in_a_configuration(tmp_path: Path) -> None:
    """FedProx, FedAvgM, Adam and drop-worst, all at once and under FedDF; and what a fusion remembers is kept."""
    values = {"local.prox_mu": 0.1, "fusion.momentum": 0.3, "local.optimizer": "adam", "local.lr": 0.01}
    small = {"rounds": 2, "local.epochs": 1, "distill.steps": 20, "clients.fraction": 1.0}
    parts = build(experiment({**values, **small, "fusion.drop_worst": "released"}))
    folder = RunFolder.create(tmp_path / "run", parts.experiment)
    records = list(run_experiment(parts, folder))
    assert all("dropped_worst" in record for record in records)
    server, _ = folder.latest()
    assert server is not None
    assert server.memory["velocity"].keys() == {"mlp"}


def test_a_part_is_added_by_its_name() -> None:
    named = build(experiment({"fusion.method": "fedavg+scaffold"}))
    assert named.experiment == build(experiment({"fusion.method": "fedavg", "fusion.parts": ["scaffold"]})).experiment
    assert [part.keeps for part in named.method.parts] == [True]
    assert [part.keeps for part in build(experiment({"fusion.aggregation": "class-counts"})).method.parts] == [False]
    assert build(experiment()).method.parts == ()


def test_nothing_is_fused_before_the_engines_are_open() -> None:
    parts = build(experiment({"fusion.method": "fedavg"}))
    jobs = jobs_for(parts.server, parts.federation, parts.federation.clients[:1], parts.method.parts)
    updates = [update_of(parts.train(job)) for job in jobs]
    with pytest.raises(AssertionError, match="once its engines are open"):
        parts.method.fuse(parts.server, updates, 0)
    parts.engine.become(in_process)
    assert digest(parts.method.fuse(parts.server, updates, 0).server.models) == digest({"mlp": updates[0].state})


def test_a_small_budget_takes_some_examples() -> None:
    sizes = {"data.train_size": 100, "data.test_size": 50}
    small = build(experiment(sizes)).task
    assert (len(small.train) + len(small.validation), len(small.data.test)) == (100, 50)
    other = build(experiment({**sizes, "seed": 1})).task
    assert torch.equal(small.data.test.labels, other.data.test.labels)
    assert not torch.equal(small.data.train.labels, other.data.train.labels)
    for key in sizes:
        with pytest.raises(ConfigError, match=f"{key} = 99999: there are"):
            build(experiment({key: 99999}))


SESSION = """
from torch import nn
from feddf import build, load
class Net(nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.linear = nn.Linear(shape[0], n_classes)
    def forward(self, x):
        return self.linear(x)
build(load("toy", ["prototypes=['__main__:Net']", "engine=in-process"]))
try:
    build(load("toy", ["prototypes=['__main__:Net']"]))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_model_of_a_notebook_is_refused_before_any_training() -> None:
    done = subprocess.run([sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ConfigError: prototypes = '__main__:Net': cannot be sent to worker processes: it is")
    assert done.stdout.endswith("or set run.engine = 'in-process'\n")
