"""Every key that changes a method is wired: from the configuration to other weights in the end."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from feddf.runs.config import parse

from conftest import stripes
from feddf.data import Dataset
from feddf.fusion.ensemble import Answer, Question, answer
from feddf.runs import ConfigError, RunFolder, build, judge, play
from feddf.states import digest


def bands() -> Dataset:
    return Dataset("bands", stripes(240, 1), stripes(60, 2))


def other_bands() -> Dataset:
    return Dataset("other bands", stripes(96, 3), stripes(60, 4))


BASE: dict[str, Any] = {
    "data": f"{__name__}:bands",
    "pool": f"{__name__}:other_bands",
    "prototypes": [{"model": "cnn", "width": 4}],
    "clients": 6,
    "fraction": 0.5,
    "alpha": 0.5,
    "rounds": 2,
    "local_epochs": 1,
    "local_batch": 8,
    "stop": "steps",
    "distill_steps": 16,
    "distill_batch": 16,
    "distill_check": 2,
    "distill_rate": 2e-2,
    "distill_threads": 1,
    "engine": "in-process",
}
KNOBS: dict[str, dict[str, Any]] = {
    "local decay": {"local_decay": "linear"},
    "local cosine": {"local_decay": "cosine"},
    "local Adam": {"local_optimizer": "adam", "local_rate": 1e-3},
    "straight-through": {"local_binary": "straight-through"},
    "error feedback": {"local_binary": "error-feedback"},
    "validation split": {"validation_split": "last"},
    "FedProx": {"proximal": 0.5},
    "FedAvg": {"method": "fedavg"},
    "FedAvgM": {"method": "fedavg", "server_momentum": 0.3},
    "uniform average": {"average_weights": "uniform"},
    "last statistics": {"batchnorm": "last"},
    "recalibrated": {"batchnorm": "recalibrate"},
    "recalibrated FedAvg": {"method": "fedavg", "batchnorm": "recalibrate"},
    "local statistics": {"batchnorm": "local", "fraction": 1.0},
    "probabilities": {"teacher_average": "probabilities"},
    "weights n_k": {"teacher_weights": "examples"},
    "weights validation": {"teacher_weights": "validation"},
    "weights certainty": {"teacher_weights": "certainty"},
    "weights class counts": {"teacher_weights": "class-counts"},
    "temperature": {"temperature": 3.0},
    "swag": {"swag_samples": 3},
    "swag scale": {"swag_samples": 3, "swag_scale": 1.0},
    "from previous": {"start": "previous"},
    "held-out loss": {"stop": "held-out-loss"},
    "held-out share": {"stop": "held-out-loss", "held_out": 0.4, "distill_rate": 2e-3},
    "validation": {"stop": "validation", "distill_rate": 0.5},
    "SGD": {"distill_optimizer": "sgd"},
    "SWA": {"distill_optimizer": "swa", "distill_steps": 30},
    "clip": {"distill_clip": 1e-9, "distill_optimizer": "sgd"},
    "augmented pool": {"mode": "online", "pool_augment": True},
}

SIZES = ("fraction", "distill_steps", "distill_rate")


@cache
def outcome(**changes: Any) -> tuple[str, Any]:
    values = {**BASE, **changes}
    parts = build(parse(values))
    with TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", parts.experiment)
        records = list(play(parts, run))
        server, _ = run.latest()
        assert server is not None
        return digest(server.models), records


@pytest.mark.parametrize("knob", KNOBS)
def test_each_changes_the_outcome(knob: str) -> None:
    changed = {key: value for key, value in KNOBS[knob].items() if key not in SIZES}
    sizes = {key: value for key, value in KNOBS[knob].items() if key in SIZES}
    with_all = outcome(**changed, **sizes)[0]
    for key in changed:  # each key by itself, not only all together
        try:
            without = outcome(**{k: v for k, v in changed.items() if k != key}, **sizes)[0]
        except ConfigError:
            continue  # it is needed by another
        assert with_all != without, key


def test_averaging_losses_ends_where_averaging_probabilities_does() -> None:
    assert outcome(teacher_average="losses")[0] == outcome(teacher_average="probabilities")[0]


def test_the_best_start_is_never_below_the_average_on_validation() -> None:
    """The scores at the start, of each round, with the same models before it: only round one can be compared."""
    best, average, previous = (
        outcome(start=start, stop="validation")[1][0]["distillation"]["cnn"]["score_before"]
        for start in ("best", "average", "previous")
    )
    assert best == max(average, previous)


def test_records_tell_bytes_validation_accuracy_and_clients_when_asked() -> None:
    records = outcome(log_clients=True)[1]
    for record in records:
        assert record["bytes_up"].keys() == record["bytes_down"].keys() == set(record["clients"])
        assert set(record["bytes_up"].values()) == set(record["bytes_down"].values()) == {1900}  # as a file has it
        assert record["accuracy_of_clients"].keys() == set(record["clients"])
        assert 0 <= record["models"]["cnn"]["validation"] <= 1
    assert "accuracy_of_clients" not in outcome()[1][0]
    assert outcome(log_clients=True)[0] == outcome()[0]


def test_an_ensemble_that_is_not_logged_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def note(question: Question, **rest: Any) -> Answer:
        asked.append(question.id)
        return answer(question, **rest)

    monkeypatch.setattr(judge, "answer", note)
    digests, records = outcome.__wrapped__(log_ensemble=False)
    assert asked
    assert not [name for name in asked if name.startswith("teacher ")]
    with_it = outcome()
    assert digests == with_it[0]
    assert [record["ensemble"] for record in records] == [None, None]
    assert [record["models"] for record in records] == [record["models"] for record in with_it[1]]
    both = outcome(log_ensemble=False, log_clients=True)[1][0]
    assert both["ensemble"] is None
    assert set(both["accuracy_of_clients"]) == set(both["clients"])


def test_fedma_from_the_configuration(tmp_path: Path) -> None:
    changes = {"method": "fedma", "prototypes": [{"model": "mlp", "width": 12}], "rounds": 4, "fedma_growth": 1.5}
    parts = build(parse({**BASE, **changes}))
    run = RunFolder.create(tmp_path / "run", parts.experiment)
    records = list(play(parts, run))
    assert [record["fedma"]["matched_layer"] for record in records] == [0, 1, 2, 0]
    assert records[0]["clients"] == records[1]["clients"] == records[2]["clients"]
    assert len(RunFolder.open(tmp_path / "run").records()) == 4


@pytest.mark.parametrize(
    ("model", "reason"),
    [("cnn", "FedMA cannot match 'cnn': 'features.1' is a BatchNorm2d"), ("resnet8", "is a BatchNorm2d")],
)
def test_fedma_refuses_batchnorm_in_one_line_before_training(model: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(parse({**BASE, "method": "fedma", "prototypes": [model]}))
