"""Answers instead of weights: targets and halves against their papers' formulas, and what leaves a client."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from feddf.config import ConfigError, parse
from feddf.config.keys import nested
from feddf.data.datasets import plain
from feddf.engines import in_process
from feddf.evaluate import logits
from feddf.flower import client_app_of, strategy_of
from feddf.fusion import answers
from feddf.outputs import classes, values
from feddf.rounds import Federation, run_round
from feddf.runs.build import Parts, build
from feddf.runs.run import run_experiment
from feddf.runs.spool import ClientStates
from feddf.runs.store import RunFolder
from feddf.states import digest
from feddf.types import (
    Client,
    Failure,
    Inputs,
    Job,
    Payload,
    Prototype,
    Reply,
    Resources,
    ServerState,
    Training,
    WeightedLogits,
)
from flower.local_grid import LocalGrid, Node

BASE: dict[str, Any] = {
    "rounds": 3,
    "prototypes": [{"model": "mlp", "name": "narrow", "width": 8}, {"model": "mlp", "name": "wide", "width": 12}],
    "data": {"name": "toy"},
    "pool": {"sources": ["train"], "size": 40},
    "clients": {"total": 4, "fraction": 0.75},
    "local": {"epochs": 1, "lr": 0.05},
    "distill": {"steps": 20, "eval_every": 10, "batch_size": 16},
    "run": {"engine": "in-process"},
}
METHODS = ["feddf+answers", "fedmd", "ds-fl", "cronus", "fd"]


def planned(method: str, **changes: Any) -> Any:
    return parse(nested(BASE, {"fusion.method": method, **changes}))


def run(folder: Path, parts: Parts) -> list[Any]:
    return list(run_experiment(parts, RunFolder.create(folder, parts.experiment)))


def ended(folder: Path) -> str:
    saved, _ = RunFolder.open(folder).latest()
    assert saved is not None
    return digest({**saved.models, **{name: state for kind in saved.memory.values() for name, state in kind.items()}})


# Targets


def softmax(z: np.ndarray) -> np.ndarray:
    shifted = np.exp(z - z.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 4), st.integers(0, 9))
def test_the_entropy_is_reduced_as_ds_fl_does_it(teachers: int, n: int, channels: int, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (teachers, n, channels))
    mean = sum(softmax(one) for one in logits) / teachers
    found = answers.entropy_reduced([WeightedLogits(torch.tensor(one)) for one in logits])
    np.testing.assert_allclose(found.numpy(), softmax(mean / 0.1), atol=1e-6)


def test_answers_keep_all_that_a_softmax_tells_and_values_their_unit() -> None:
    raw = torch.randn(5, 4) * 5 + 100
    torch.testing.assert_close(
        answers.as_answers(raw, classes(4)).float().softmax(1), raw.softmax(1), atol=2e-3, rtol=0
    )
    assert answers.as_answers(torch.tensor([[1e4, -1e4]]), classes(2)).tolist() == [[50.0, -50.0]]
    assert torch.equal(answers.as_answers(raw, values(4)), raw)


# What clients do


def begun(model: nn.Module, payload: Payload | None = None, kept: Payload | None = None) -> Training:
    state = model.state_dict()
    job = Job(Client("a", "net", torch.arange(4)), 2, state, 5, payload or {}, 1, kept or {})
    return Training(job, Prototype("net", lambda: model), torch.tensor([0, 1, 1, 0]), classes(2), "sgd", 1, 1.0)


def test_fedmd_comes_near_by_the_absolute_difference_of_logits() -> None:
    """Ten lines of it, with the pool as one batch: Adam on the mean of |f(x) − z̄|, both without their means."""
    torch.manual_seed(0)
    pool, target = torch.randn(6, 3), torch.randn(6, 2)
    target = (target - target.mean(dim=1, keepdim=True)).half()
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    two.load_state_dict(one.state_dict())
    adam = torch.optim.Adam(one.parameters(), lr=0.01)
    for _ in range(3):
        z = one(pool)
        loss = (z - z.mean(dim=1, keepdim=True) - target.float()).abs().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    digest = answers.Digest(epochs=3, lr=0.01, batch_size=6, absolute=True)
    inputs = Inputs(pool, lambda raw: raw)
    answers.answer_for_pool(two, begun(two, {"answers": {"outputs": target}}), pool=inputs, digest=digest)
    torch.testing.assert_close(two.weight, one.weight)


def test_a_client_goes_on_from_its_own_model() -> None:
    own, drawn = nn.Linear(3, 2), nn.Linear(3, 2)
    kept = {"own model": {key: tensor.clone() for key, tensor in own.state_dict().items()}}
    pool = Inputs(torch.randn(4, 3), lambda raw: raw)
    steps = answers.answer_for_pool(drawn, begun(drawn, kept=kept), pool=pool, digest=answers.Digest())
    assert torch.equal(drawn.weight, own.weight)
    assert steps.finish is not None
    sent = steps.finish()
    assert sent.state == {}
    told = sent.payload["answers"]["outputs"].float().softmax(1)
    torch.testing.assert_close(told, own(pool.batch(torch.arange(4))).softmax(1), atol=2e-3, rtol=0)


def test_fd_adds_the_others_mean_answer_for_each_label() -> None:
    z, labels, gamma = torch.randn(4, 2), torch.tensor([0, 1, 1, 0]), 0.3
    others = torch.tensor([[0.9, 0.1], [0.0, 0.0]])  # nobody else has the label 1
    model = nn.Linear(3, 2)
    steps = answers.follow_means(model, begun(model, {"label means": {"means": others}}), gamma=gamma)
    assert steps.loss is not None
    assert steps.finish is not None
    p = softmax(z.numpy())
    regularized = [gamma * -(others[label].numpy() * np.log(row)).sum() for label, row in zip(labels, p, strict=True)]
    own = [-np.log(row[label]) for label, row in zip(labels, p, strict=True)]
    assert float(steps.loss(z, labels, z)) == pytest.approx(np.mean(own) + np.mean(regularized), rel=1e-5)
    means = steps.finish().payload["label means"]["means"]
    np.testing.assert_allclose(means.numpy(), [p[labels == 0].mean(0), p[labels == 1].mean(0)], atol=1e-6)


def test_fd_leaves_a_client_out_of_its_own_target() -> None:
    means = {"a": [[1.0, 0.0], [0.0, 0.0]], "b": [[0.6, 0.4], [0.2, 0.8]], "c": [[0.2, 0.8], [0.0, 0.0]]}
    memory = {"label means": {name: {"means": torch.tensor(rows)} for name, rows in means.items()}}
    sent = answers.send_means(ServerState(1, {}, memory=memory), Client("a", "net"))
    torch.testing.assert_close(sent["label means"]["means"], torch.tensor([[0.4, 0.6], [0.2, 0.8]]))


# Whole runs


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bytes_in_process_in_workers_and_over_flower(tmp_path: Path, method: str) -> None:
    experiment = planned(method)
    records = run(tmp_path / "here", build(experiment))
    if method in ("ds-fl", "fd"):  # workers take seconds to start
        run(tmp_path / "workers", build(planned(method, **{"run.engine": "processes", "run.workers": 2})))
        assert ended(tmp_path / "here") == ended(tmp_path / "workers")
    app = client_app_of(experiment, states=tmp_path / "states")
    grid = LocalGrid({10 + number: Node(app, {"partition-id": number}) for number in range(4)})
    strategy_of(experiment, tmp_path / "flower", wait=0.0, poll=0.0).start(grid)
    assert ended(tmp_path / "here") == ended(tmp_path / "flower")
    sizes = {"fd": (3 * 3 * 4, 3 * 3 * 4)}.get(method, (40 * 3 * 2, 40 * 3 * 2))
    assert set(records[-1]["bytes_up"].values()) == {sizes[0]}
    assert set(records[-1]["bytes_down"].values()) == {sizes[1]}
    assert set(records[0]["bytes_down"].values()) == {0}


@pytest.mark.parametrize("pool", [{"sources": ["noise"]}, {"sources": ["plane", "noise"], "size": 50}])
def test_a_pool_that_the_seed_makes_needs_no_size_and_is_the_same_over_flower(tmp_path: Path, pool: Any) -> None:
    experiment = parse({**BASE, "rounds": 2, "pool": pool, "fusion": {"exchange": "answers"}})
    records, size = run(tmp_path / "here", build(experiment)), pool.get("size", 10_000)
    app = client_app_of(experiment, states=tmp_path / "states")
    grid = LocalGrid({10 + number: Node(app, {"partition-id": number}) for number in range(4)})
    strategy_of(experiment, tmp_path / "flower", wait=0.0, poll=0.0).start(grid)
    assert ended(tmp_path / "here") == ended(tmp_path / "flower")
    assert set(records[-1]["bytes_up"].values()) == set(records[-1]["bytes_down"].values()) == {size * 3 * 2}


def test_a_client_with_another_pool_says_so_and_is_left_out(tmp_path: Path) -> None:
    """It has as many inputs, drawn with another seed: their answers would be about something else."""
    experiment = planned("feddf+answers", rounds=1, **{"clients.fraction": 1.0, "pool.sources": ["noise"]})
    others = parse({**experiment.model_dump(), "seed": 1})
    apps = [client_app_of(one, states=tmp_path / "states") for one in (experiment, others)]
    grid = LocalGrid({10 + number: Node(apps[number == 2], {"partition-id": number}) for number in range(4)})
    strategy_of(experiment, tmp_path / "run", wait=0.0, poll=0.0).start(grid)
    (record,) = RunFolder.open(tmp_path / "run").records()
    (dropped,) = record["dropped"]
    assert dropped["client"] == "client-2"
    assert "the agreed pool has other inputs here than on the server, or another order" in dropped["reason"]


@pytest.mark.parametrize("turn", [lambda rows: rows.flip(0), lambda rows: rows[:-1], lambda rows: rows.double()])
def test_the_agreed_pool_is_known_by_its_rows_and_their_order(turn: Any) -> None:
    ours, theirs = (Resources({}, Inputs(rows, plain)) for rows in (torch.randn(5, 2), torch.randn(5, 2)))
    told = answers.exchange_answers(ours).told
    assert answers.exchange_answers(ours, **told).told == told
    for other in (theirs, Resources({}, Inputs(turn(ours.pool.raw), plain))):  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="other inputs here than on the server"):
            answers.exchange_answers(other, **told)


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_ends_as_a_whole_one(tmp_path: Path, method: str) -> None:
    parts = build(planned(method))
    run(tmp_path / "whole", parts)
    folder = RunFolder.create(tmp_path / "cut", parts.experiment)
    next(iter(run_experiment(parts, folder)))
    list(run_experiment(build(planned(method)), RunFolder.open(tmp_path / "cut")))
    assert ended(tmp_path / "cut") == ended(tmp_path / "whole")


@pytest.mark.parametrize("method", METHODS)
def test_no_byte_of_a_private_model_leaves_its_client(tmp_path: Path, method: str) -> None:
    """Every reply, as Flower would carry it, is searched for each tensor of each model that its client kept."""
    experiment, sent = planned(method), list[bytes]()

    def listen(message: Message, reply: Message | None) -> Message | None:
        assert reply is not None
        arrays = [array.data for record in reply.content.array_records.values() for array in record.values()]
        others = [sorted(record.items()) for record in reply.content.metric_records.values()]
        sent.append(b"".join(arrays) + repr([others, dict(reply.content.config_records)]).encode())
        assert len(sent[-1]) < 2000, "answers are a few hundred bytes, and nothing else is sent"
        return reply

    app = client_app_of(experiment, states=tmp_path / "states")
    grid = LocalGrid({10 + k: Node(app, {"partition-id": k}, behave=listen) for k in range(4)})
    strategy_of(experiment, tmp_path / "run", wait=0.0, poll=0.0).start(grid)
    parts, private = build(experiment), list[bytes]()
    for client, number in itertools.product(parts.federation.clients, (1, 2, 3)):
        kept = ClientStates(tmp_path / "states").read(Job(client, number, {}, 0, counted=number))
        if kept:
            private += [tensor.numpy().tobytes() for tensor in kept["own model"].values() if tensor.numel() > 3]
            if method != "fd":  # the search finds what is there: what this model answers
                assert parts.task.pool is not None
                model = parts.prototypes[client.prototype].load(kept["own model"])
                said = answers.as_answers(logits(model, parts.task.pool), parts.task.train.outputs)
                assert any(said.numpy().tobytes() in one for one in sent)
    assert len(private) > 20
    for tensor in private:
        for first in range(0, len(tensor) - 8, 8):  # no two weights that follow each other
            assert not any(tensor[first : first + 8] in one for one in sent)


def forged(answer: torch.Tensor) -> Callable[..., Any]:
    def engine(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any | Failure]:
        for reply in in_process(function, jobs):
            if isinstance(reply, Reply) and reply.client_id == "client-0":
                reply = replace(reply, payload={"answers": {"outputs": answer}})
            yield reply

    return engine


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (torch.full((40, 3), torch.nan).half(), "has values from nan to nan"),
        (torch.full((40, 3), 60.0).half(), "has values from 60 to 60, not -50 to 50"),
        (torch.zeros(39, 3).half(), r"has shape \(39, 3\), not \(40, 3\)"),
        (torch.zeros(40, 4).half(), r"has shape \(40, 4\)"),
        (torch.zeros(40, 3), "is torch.float32, not torch.float16"),
    ],
)
def test_answers_that_are_none_are_refused_at_the_gate(tmp_path: Path, answer: torch.Tensor, said: str) -> None:
    parts = build(planned("feddf+answers"))
    federation = Federation(parts.federation.clients, parts.experiment.clients.model_copy(update={"fraction": 1.0}), 0)
    parts.engine.become(in_process)
    train, method = parts.train, parts.method
    closed = run_round(
        parts.server, federation, engine=forged(answer), train=train, fuse=method.fuse, parts=method.parts
    )
    (failure,) = closed.failures
    assert failure.client_id == "client-0"
    assert re.search(said, failure.reason)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ensemble.cache": False}, r"ensemble\.cache = False: clients keep their models"),
        ({"ensemble.weights": "validation"}, r"ensemble\.weights = 'validation': clients keep"),
        ({"ensemble.swag_samples": 3}, r"ensemble\.swag_samples = 3: clients keep"),
        ({"fusion.method": "fedavg", "fusion.exchange": "answers"}, r"fusion\.exchange = 'answers': only students"),
        ({"fusion.defense": "robust"}, r"fusion\.defense = 'robust': it looks at clients' weights"),
        ({"fusion.parts": ["scaffold"]}, r"fusion\.parts = \['scaffold'\]: it looks at clients' weights"),
    ],
)
def test_what_needs_their_models_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        build(planned(**{"method": "feddf+answers", **changes}))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
