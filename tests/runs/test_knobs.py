"""Every key that changes a method is wired: from the configuration to other weights in the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from conftest import stripes
from feddf.config import ConfigError, DataConfig, Experiment, parse
from feddf.config.keys import all_keys, nested
from feddf.data.datasets import Dataset
from feddf.evaluate import Evaluation, Predictions, Teacher
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.states import digest
from feddf.types import Failure


def bands(data: DataConfig) -> Dataset:
    return Dataset("bands", stripes(240, 1), stripes(60, 2))


def other_bands(data: DataConfig) -> Dataset:
    return Dataset("other bands", stripes(96, 3), stripes(60, 4))


BASE: dict[str, Any] = {
    "data": {"name": f"{__name__}:bands"},
    "pool": {"sources": [f"{__name__}:other_bands"]},
    "prototypes": [{"model": "cnn", "width": 4}],
    "clients": {"total": 6, "fraction": 0.5},
    "partition": {"alpha": 0.5},
    "rounds": 2,
    "local": {"epochs": 1, "batch_size": 8},
    "distill": {"early_stopping": "none", "steps": 16, "batch_size": 16, "eval_every": 2, "lr": 2e-2},
    "run": {"engine": "in-process", "threads": 1},
}
MATCHED = [{"model": "mlp", "width": 12}]
KNOBS: dict[str, dict[str, Any]] = {
    "local decay": {"local.lr_schedule": "linear"},
    "local cosine": {"local.lr_schedule": "cosine"},
    "local Adam": {"local.optimizer": "adam", "local.lr": 1e-3},
    "straight-through": {"local.binary": "straight-through"},
    "error feedback": {"local.binary": "error-feedback"},
    "validation split": {"data.validation_split": "last"},
    "FedProx": {"local.prox_mu": 0.5},
    "adjusted loss": {"local.logit_adjustment": 1.0},
    "FedAvg": {"fusion.method": "fedavg"},
    "FedAvgM": {"fusion.method": "fedavg", "fusion.momentum": 0.3},
    "uniform average": {"fusion.aggregation": "uniform"},
    "last statistics": {"fusion.batchnorm": "last"},
    "recalibrated": {"fusion.batchnorm": "recalibrate"},
    "recalibrated FedAvg": {"fusion.method": "fedavg", "fusion.batchnorm": "recalibrate"},
    "local statistics": {"fusion.batchnorm": "local", "clients.fraction": 1.0},
    "drop the worst": {"fusion.drop_worst": "paper", "partition.alpha": 0.05},
    "probabilities": {"ensemble.combine": "probabilities"},
    "weights n_k": {"ensemble.weights": "examples"},
    "weights validation": {"ensemble.weights": "validation"},
    "weights certainty": {"ensemble.weights": "certainty"},
    "weights class counts": {"ensemble.weights": "class-counts"},
    "earlier rounds": {"ensemble.ema": 0.5},
    "defense": {"fusion.defense": "robust"},
    "trust": {"fusion.trust": "expguard"},
    "guard": {"fusion.guard": 0.01, "distill.lr": 0.5},
    "temperature": {"distill.temperature": 3.0},
    "groups": {"ensemble.groups": 1},
    "swag": {"ensemble.swag_samples": 3},
    "swag scale": {"ensemble.swag_samples": 3, "ensemble.swag_scale": 1.0},
    "from previous": {"distill.init": "previous"},
    "held-out loss": {"distill.early_stopping": "held-out-loss"},
    "held-out share": {"distill.early_stopping": "held-out-loss", "distill.held_out": 0.4, "distill.lr": 2e-3},
    "validation": {"distill.early_stopping": "validation", "distill.lr": 0.5},
    "a start that is not kept": {"distill.early_stopping": "validation", "distill.lr": 0.5, "distill.keep_init": False},
    "SGD": {"distill.optimizer": "sgd"},
    "SWA": {"distill.optimizer": "swa", "distill.steps": 30},
    "SWA's cycle": {"distill.optimizer": "swa", "distill.steps": 30, "distill.swa_cycle": 4},
    "clip": {"distill.clip": 1e-9, "distill.optimizer": "sgd"},
    "views": {"pool.views": 3},
    "augmented pool": {"ensemble.cache": False, "pool.augment": True},
    "SCAFFOLD": {"fusion.parts": ["scaffold"]},
    "answers": {"fusion.exchange": "answers"},
    "digests": {"fusion.exchange": "answers", "answers.digest_epochs": 4},
    "a digest's rate": {"fusion.exchange": "answers", "answers.digest_lr": 0.05},
    "FedMD": {"fusion.exchange": "answers", "answers.distance": "absolute"},
    "FedMA's growth": {"fusion.method": "fedma", "fedma.growth": 1.0, "prototypes": MATCHED},
    "FedMA's start": {"fusion.method": "fedma", "fedma.own_start": False, "prototypes": MATCHED},
    "FedMA's weights": {"fusion.method": "fedma", "fedma.neuron_weights": "examples", "prototypes": MATCHED},
}

SIZES = ("clients.fraction", "distill.steps", "distill.lr", "partition.alpha", "prototypes")


def experiment(changes: dict[str, Any]) -> Experiment:
    return parse(nested(BASE, changes))


def outcome(changes: dict[str, Any] | None = None) -> tuple[str, Any]:
    """Return the digest of the last models, and the records; the same changes are run only once."""
    return remembered(json.dumps(changes or {}, sort_keys=True))


@cache
def remembered(changes: str) -> tuple[str, Any]:
    parts = build(experiment(json.loads(changes)))
    with TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", parts.experiment)
        records = list(run_experiment(parts, run))
        server, _ = run.latest()
        assert server is not None
        return digest(server.models), records


@pytest.mark.parametrize("knob", KNOBS)
def test_each_changes_the_outcome(knob: str) -> None:
    changed = {key: value for key, value in KNOBS[knob].items() if key not in SIZES}
    sizes = {key: value for key, value in KNOBS[knob].items() if key in SIZES}
    with_all = outcome({**changed, **sizes})[0]
    for key in changed:  # each key by itself, not only all together
        try:
            without = outcome({**{k: v for k, v in changed.items() if k != key}, **sizes})[0]
        except ConfigError:
            continue  # it is needed by another
        assert with_all != without, key


def test_no_key_of_a_method_is_left_out_here() -> None:
    tried = {key for changes in KNOBS.values() for key in changes}
    methods = {name for name, key in all_keys().items() if key.kind == "method"}
    methods -= {name for name in methods if name.startswith("privacy.")}  # noise differs anyway; see tests/privacy
    assert methods - tried == {"fusion.options", "answers.gamma"}  # read by no method of ours; by FD, see below


def test_fds_server_learns_nothing_and_its_clients_by_gamma() -> None:
    (models, records), (same, others) = (outcome({"fusion.method": "fd", "answers.gamma": one}) for one in (0.1, 5.0))
    assert models == same
    assert records[0]["metrics_of_clients"] == others[0]["metrics_of_clients"]  # before there are means
    assert records[1]["metrics_of_clients"] != others[1]["metrics_of_clients"]


def test_what_happens_to_a_lost_state_matters_only_where_one_is_lost() -> None:
    for parts in ([], ["scaffold"]):
        assert outcome({"fusion.parts": parts, "clients.lost_state": "anew"})[0] == outcome({"fusion.parts": parts})[0]


def test_counts_that_nobody_uses_change_no_model_and_cost_their_bytes() -> None:
    plain, told = outcome(), outcome({"fusion.parts": ["class-counts"]})
    assert plain[0] == told[0]
    for before, record in zip(plain[1], told[1], strict=True):
        assert record["bytes_down"] == before["bytes_down"]
        assert record["bytes_up"] == {client: n + 8 * 3 for client, n in before["bytes_up"].items()}


def test_the_best_start_is_never_below_the_average_on_validation() -> None:
    """The scores at the start, of each round, with the same models before it: only round one can be compared."""
    best, average, previous = (
        outcome({"distill.init": start, "distill.early_stopping": "validation"})[1][0]["distillation"]["cnn"][
            "score_before"
        ]
        for start in ("best", "average", "previous")
    )
    assert best == max(average, previous)


def test_records_tell_bytes_validation_accuracy_and_what_each_client_reached() -> None:
    records = outcome({"run.log_clients": True})[1]
    for record in records:
        assert record["bytes_up"].keys() == record["bytes_down"].keys() == set(record["clients"])
        assert set(record["bytes_up"].values()) == set(record["bytes_down"].values()) == {1900}  # as a file has it
        assert record["accuracy_of_clients"].keys() == record["drift_of_clients"].keys() == set(record["clients"])
        assert min(record["drift_of_clients"].values()) > 0
        assert 0 <= record["models"]["cnn"]["validation"] <= 1
    known = [outcome()[1][0][name] for name in ("accuracy_of_clients", "drift_of_clients")]  # the ensemble needs them
    assert known == [records[0][name] for name in ("accuracy_of_clients", "drift_of_clients")]
    assert "accuracy_of_clients" not in outcome({"run.log_ensemble": False})[1][0]
    assert outcome({"run.log_clients": True})[0] == outcome()[0]


def test_an_ensemble_that_is_not_logged_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Noted(Evaluation):
        def __call__(self, teachers: Sequence[Teacher]) -> Iterator[Predictions | Failure]:
            asked.extend(teacher.id for teacher in teachers)
            return super().__call__(teachers)

    monkeypatch.setattr("feddf.runs.run.Evaluation", Noted)
    digests, records = remembered.__wrapped__(json.dumps({"run.log_ensemble": False}))
    assert "fused cnn" in asked
    assert not [name for name in asked if name.startswith("client-")]
    with_it = outcome()
    assert digests == with_it[0]
    assert [(record["ensemble"], record["avg_logits"]) for record in records] == [(None, None)] * 2
    assert not [record for record in records if "no_ensemble" in record]  # nobody wanted to know
    assert [record["models"] for record in records] == [record["models"] for record in with_it[1]]
    both = remembered.__wrapped__(json.dumps({"run.log_ensemble": False, "run.log_clients": True}))[1][0]
    assert [name for name in asked if name.startswith("client-")]  # the clients are asked once they are logged
    assert both["ensemble"] is None
    assert set(both["accuracy_of_clients"]) == set(both["clients"])


def test_fedma_from_the_configuration(tmp_path: Path) -> None:
    changes = {"fusion.method": "fedma", "prototypes": MATCHED, "fedma.growth": 1.5}
    parts = build(experiment({**changes, "rounds": 4}))
    run = RunFolder.create(tmp_path / "run", parts.experiment)
    records = list(run_experiment(parts, run))
    assert [record["fedma"]["matched_layer"] for record in records] == [0, 1, 2, 0]
    assert records[0]["clients"] == records[1]["clients"] == records[2]["clients"]
    assert len(RunFolder.open(tmp_path / "run").records()) == 4


@pytest.mark.parametrize(
    ("model", "reason"),
    [("cnn", "FedMA cannot match 'cnn': 'features.1' is a BatchNorm2d"), ("resnet8", "is a BatchNorm2d")],
)
def test_fedma_refuses_batchnorm_in_one_line_before_training(model: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(experiment({"fusion.method": "fedma", "prototypes": [model]}))
