"""Whether weights travel is part of a method's form, in each direction: at the gate, in the loop, and over Flower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from feddf.admit import admit
from feddf.config import ConfigError, parse, with_values
from feddf.config.keys import nested
from feddf.engines import in_process
from feddf.flower import FedDF, client_app_of, settings_of, strategy_of
from feddf.rounds import collect
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.spool import DiskSpool
from feddf.runs.store import RunFolder
from feddf.states import digest
from feddf.types import (
    Client,
    Engine,
    Failure,
    Fused,
    Job,
    Method,
    Part,
    Payload,
    Reply,
    Resources,
    Sent,
    ServerState,
    State,
    Steps,
    TensorForm,
    Training,
    Update,
)
from flower.local_grid import LocalGrid, Node

BASE: dict[str, Any] = {
    "rounds": 3,
    "prototypes": [{"model": "mlp", "name": "narrow", "width": 8}, {"model": "mlp", "name": "wide", "width": 12}],
    "data": {"name": "toy"},
    "clients": {"total": 4, "fraction": 0.75},
    "local": {"epochs": 1, "lr": 0.05},
    "run": {"engine": "in-process"},
}
ANSWERS = "answers"
NOISE = "reproduction.attacks:noise"
PROBE = torch.linspace(-1, 1, 10).reshape(5, 2)


def answer(model: nn.Module, training: Training) -> Steps:
    """Go on from the model that the client kept, if it has one, and send what it answers for the probe."""
    if "model" in training.job.kept:
        model.load_state_dict(dict(training.job.kept["model"]))

    def finish() -> Sent:
        with torch.no_grad():
            logits = model(PROBE)
        kept = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        return Sent({}, {ANSWERS: {"logits": logits}}, {"model": kept})

    return Steps(finish=finish)


def send(server: ServerState, client: Client) -> Payload:
    return {ANSWERS: server.memory[ANSWERS]["mean"]} if ANSWERS in server.memory else {}


def form(job: Job) -> dict[str, dict[str, TensorForm]]:
    return {ANSWERS: {"logits": TensorForm((5, None), torch.float32, -1e3, 1e3)}}


def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
    """Move every output bias by the mean answer: the fused models depend on payloads only."""
    mean = torch.stack([update.payload[ANSWERS]["logits"] for update in updates]).mean(dim=0)
    models = {}
    for name, state in server.models.items():
        last = list(state)[-1]
        models[name] = {**state, last: state[last] + mean.mean(dim=0)}
    memory = {ANSWERS: {"mean": {"logits": mean}}}
    return Fused(replace(server.next(models), memory=memory), server.models)


def answering(resources: Resources, down: bool = False) -> Part:
    return Part(half=answer, send=send, form=form, keeps=True, weights_down=down, weights_up=False)


def answers_only(resources: Resources, settings: object, engine: Engine) -> Method:
    return Method(fuse, (replace(answering(resources), name="mine"),))


def answers_up(resources: Resources, settings: object, engine: Engine) -> Method:
    return Method(fuse, (replace(answering(resources, down=True), name="mine", told={"down": True}),))


def nameless(resources: Resources, settings: object, engine: Engine) -> Method:
    return Method(fuse, (answering(resources),))


def weights_up_only(resources: Resources) -> Part:
    return Part(weights_down=False)


OWN = {"mine": answering, "test_weights_travel:weights_up_only": weights_up_only}
NEITHER = {"fusion.method": "test_weights_travel:answers_only"}
NAMELESS = {"fusion.method": "test_weights_travel:nameless"}
ONLY_DOWN = {"fusion.method": "test_weights_travel:answers_up"}
ONLY_UP = {"fusion.method": "fedavg", "fusion.parts": ["test_weights_travel:weights_up_only"]}


# At the gate

STATE: State = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
JOB = Job(Client("a", "net", torch.arange(5)), 1, STATE, 0)


def at_the_gate(state: Any, parts: Sequence[Part]) -> Update | str:
    outcome = admit(Reply("a", "net", 1, state, 5), {"a": JOB}, parts)
    return outcome.reason if isinstance(outcome, Failure) else outcome


@pytest.mark.parametrize("state", [STATE, {"w": STATE["w"]}, {"x": 3}, None, 7, [("w", STATE["w"])]])
def test_weights_that_nobody_asked_for_are_refused(state: Any) -> None:
    assert at_the_gate(state, [Part(), Part(weights_up=False)]) == "it sent weights, which were not asked for"


def test_weights_that_are_due_must_come() -> None:
    assert "missing ['b', 'w']" in str(at_the_gate({}, [Part(weights_down=False)]))
    assert isinstance(at_the_gate(STATE, [Part(weights_down=False)]), Update)
    assert isinstance(at_the_gate({}, [Part(weights_up=False)]), Update)


def test_a_job_is_sent_without_weights_and_its_update_is_kept_without_them(tmp_path: Path) -> None:
    seen: list[Job] = []

    def train(job: Job) -> Reply:
        seen.append(job)
        return Reply("a", "net", 1, {}, 5)

    parts, spool = [Part(weights_down=False, weights_up=False)], DiskSpool(tmp_path)
    for _ in range(2):  # the second time it is on disk
        (update,), failures = collect(in_process, train, [JOB], spool, parts)
        assert (dict(update.state), failures) == ({}, [])
    assert [dict(job.state) for job in seen] == [{}]


# In the loop, and over Flower


def planned(changes: dict[str, Any]) -> Any:
    return parse(nested(BASE, changes))


def run(folder: Path, changes: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    experiment = planned(changes)
    records = list(run_experiment(build(experiment), RunFolder.create(folder, experiment)))
    saved, _ = RunFolder.open(folder).latest()
    assert saved is not None
    return digest(saved.models), [compared(record) for record in records]


def compared(record: Any) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("seconds", "kept_by_clients")}


def over_flower(folder: Path, changes: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    experiment = planned(changes)
    app = client_app_of(experiment, states=folder / "states", parts=OWN)
    grid = LocalGrid({10 + number: Node(app, {"partition-id": number}) for number in range(4)})
    over = strategy_of(experiment, folder / "run", wait=0.0, poll=0.0)
    over.start(grid)
    return digest(over.models), [compared(record) for record in RunFolder.open(folder / "run").records()]


@pytest.mark.parametrize("changes", [NEITHER, ONLY_DOWN, ONLY_UP], ids=["neither", "only down", "only up"])
def test_the_same_bytes_in_process_and_over_flower(tmp_path: Path, changes: dict[str, Any]) -> None:
    models, records = run(tmp_path / "here", changes)
    assert over_flower(tmp_path, changes) == (models, records)
    assert models != run(tmp_path / "other", {**changes, "local.lr": 0.01})[0]
    whole = run(tmp_path / "both", {"fusion.method": "fedavg"})[1]
    told = 5 * 3 * 4  # answers for five inputs
    for record, usual in zip(records, whole, strict=True):
        assert record["clients"] == usual["clients"]
        payload = told if record["round"] > 1 and changes is not ONLY_UP else 0
        for name in record["clients"]:
            down, up = record["bytes_down"][name], record["bytes_up"][name]
            assert down == payload + (usual["bytes_down"][name] if changes is ONLY_DOWN else 0)
            assert up == (usual["bytes_up"][name] if changes is ONLY_UP else told)


@pytest.mark.parametrize("changes", [NEITHER, ONLY_UP], ids=["neither", "only up"])
def test_the_same_bytes_in_worker_processes(tmp_path: Path, changes: dict[str, Any]) -> None:
    elsewhere = {**changes, "run.engine": "processes", "run.workers": 2}
    assert run(tmp_path / "here", changes) == run(tmp_path / "there", elsewhere)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**NEITHER, "fusion.defense": "robust"}, r"fusion\.defense = 'robust': .*send none; leave it at 'none'"),
        ({**NEITHER, "fusion.drop_worst": "paper"}, r"fusion\.drop_worst = 'paper': it looks at clients' weights"),
        ({**NEITHER, "fusion.guard": 0.1}, r"fusion\.guard = 0\.1: it looks at clients' weights"),
        ({**NEITHER, "attack.kind": NOISE}, rf"attack\.kind = '{NOISE}': attackers forge weights"),
        ({**ONLY_UP, "attack.kind": NOISE}, rf"attack\.kind = '{NOISE}': attackers forge weights"),
    ],
)
def test_what_needs_weights_is_refused_before_any_training(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        build(planned(changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "own", "said"),
    [
        (NAMELESS, {}, r"fusion\.method = 'test_weights_travel:nameless': .* give its Part the name"),
        (NEITHER, {"flower.evaluate_fraction": 1.0}, r"flower\.evaluate_fraction = 1\.0: .* set it to 0"),
    ],
)
def test_what_cannot_travel_over_flower_is_refused_before_any_training(
    tmp_path: Path, changes: dict[str, Any], own: dict[str, Any], said: str
) -> None:
    experiment = planned(changes)
    over: FedDF = strategy_of(experiment, tmp_path, with_values(settings_of(experiment), own))
    grid = LocalGrid({1: Node(client_app_of(experiment), {"partition-id": 0})})
    with pytest.raises(ConfigError, match=said) as caught:
        over.start(grid)
    assert "\n" not in str(caught.value)
    assert grid.nodes[1].asked == []
