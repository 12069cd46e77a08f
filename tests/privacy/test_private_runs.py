"""``[privacy]`` in whole runs: what is said, spent and withheld, and what is refused before anything is trained."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from sources import Counted
from typer.testing import CliRunner

from conftest import stripes
from feddf.admit import admit
from feddf.cli import app
from feddf.config import ConfigError, DataConfig, Experiment, parse
from feddf.config.errors import FeddfError
from feddf.config.keys import nested
from feddf.data.datasets import Dataset
from feddf.outputs import classes
from feddf.privacy.accountant import Mechanism, epsilon_of
from feddf.privacy.noise import Noise, Source
from feddf.privacy.releases import LEDGER, read_ledger
from feddf.rounds import QuorumError, jobs_for, sample
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.states import digest
from feddf.types import Examples, Job, Reply

BASE: dict[str, Any] = {
    "rounds": 2,
    "prototypes": ["linear"],
    "data": {"name": "digits", "train_size": 400, "test_size": 60},
    "pool": {"sources": ["train"]},
    "clients": {"total": 8, "fraction": 0.5},
    "partition": {"scheme": "iid"},
    "local": {"epochs": 1, "batch_size": 8},
    "distill": {"steps": 12, "batch_size": 16, "early_stopping": "none", "lr": 1e-2},
    "run": {"engine": "in-process", "threads": 1},
}
ANSWERS = {"distill.init": "previous", "ensemble.combine": "probabilities"}
KINDS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"privacy": {"level": "record", "epsilon": 60.0, "noise": 0.7, "sampling": 0.25}},
    "heads": {"privacy": {"level": "record", "epsilon": 8.0, "mechanism": "heads", "clip": 4.0}, "rounds": 1},
    "weights": {"privacy": {"level": "client", "epsilon": 300.0, "groups": 2}, "clients.fraction": 1.0},
    "adaptive": {"privacy": {"level": "client", "epsilon": 300.0, "quantile": 0.5}, "fusion.method": "fedavg"},
    "answers": {"privacy": {"level": "client", "epsilon": 300.0, "mechanism": "answers"}, **ANSWERS},
    "votes": {"privacy": {"level": "client", "epsilon": 300.0, "mechanism": "votes", "answered": 40}, **ANSWERS},
}


def experiment(kind: str = "", changes: dict[str, Any] | None = None) -> Experiment:
    return parse(nested(nested(deepcopy(BASE), deepcopy(KINDS.get(kind, {}))), changes or {}))


def ran(path: Path, given: Experiment, secrets: Source | None = None) -> list[Any]:
    parts = build(given, noise=partial(Noise, source=secrets)) if secrets else build(given)
    return list(run_experiment(parts, RunFolder.create(path, given)))


def digest_of(path: Path) -> str:
    server, _ = RunFolder.open(path).latest()
    assert server is not None
    return digest(server.models)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_spent_stands_in_every_record_and_in_the_card(kind: str, tmp_path: Path) -> None:
    given = experiment(kind)
    records = ran(tmp_path / "run", given)
    plan = build(given).privacy.plan  # type: ignore[union-attr]
    spent = [record["privacy"]["epsilon"] for record in records]
    assert spent == sorted(spent)
    assert 0 < spent[-1] <= given.privacy.epsilon
    assert records[-1]["privacy"]["planned"] == pytest.approx(plan.spent(given.rounds), abs=1e-3)
    assert {record["privacy"]["relation"] for record in records} == {"add/remove"}
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"Spent: ε = {spent[-1]}" in card
    assert str(plan) in card
    assert len(read_ledger(tmp_path / "run")) == 1 + records[-1]["privacy"]["releases"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_else_would_leave_a_client_is_withheld(kind: str, tmp_path: Path) -> None:
    records = ran(tmp_path / "run", experiment(kind))
    assert not (tmp_path / "run" / "partition.json").exists()
    assert all(record["metrics_of_clients"] == {} for record in records)
    assert "Who holds what" not in (tmp_path / "run" / "README.md").read_text()
    if experiment(kind).privacy.level == "client":
        assert all("accuracy_of_clients" not in record and record["avg_logits"] is None for record in records)
        assert all("drift_of_clients" not in record for record in records)
    else:
        assert all(len(set(record["bytes_up"].values())) == 1 for record in records)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_follow_from_the_noise_and_from_no_seed(kind: str, tmp_path: Path) -> None:
    for name, secrets in (("a", Counted()), ("b", Counted()), ("c", None)):
        ran(tmp_path / name, experiment(kind), secrets)
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b")
    assert digest_of(tmp_path / "a") != digest_of(tmp_path / "c")


@pytest.mark.parametrize("kind", ["weights", "answers"])
def test_at_client_level_models_follow_from_the_releases_alone(kind: str, tmp_path: Path) -> None:
    """With the releases of another run in its store, a run on other data ends with that run's models."""
    given = experiment(kind, {"rounds": 1})
    ran(tmp_path / "a", given)
    other = parse(nested(given.model_dump(), {"partition.scheme": "shards", "local.epochs": 3}))
    folder = RunFolder.create(tmp_path / "b", other)
    (tmp_path / "a" / "releases").rename(tmp_path / "b" / "releases")
    (tmp_path / "b" / LEDGER).write_text((tmp_path / "a" / LEDGER).read_text())
    list(run_experiment(build(other), folder))
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b")


def test_without_privacy_nothing_is_written_and_nothing_changes(tmp_path: Path) -> None:
    records = ran(tmp_path / "run", experiment(), Counted())
    assert not (tmp_path / "run" / LEDGER).exists()
    assert "privacy" not in records[0]
    assert (tmp_path / "run" / "partition.json").exists()


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no ε": ("", {"privacy.level": "record"}, "privacy.epsilon"),
    "an ε and no level": ("", {"privacy.epsilon": 2.0}, "nothing is protected"),
    "a mechanism and no level": ("", {"privacy.mechanism": "heads"}, "nothing is protected"),
    "a mechanism of the other level": ("dp-sgd", {"privacy.mechanism": "votes"}, "privacy.mechanism"),
    "FedMA": ("dp-sgd", {"fusion.method": "fedma"}, "fusion.method"),
    "control variates": ("dp-sgd", {"fusion.parts": ["scaffold"]}, "fusion.parts"),
    "class counts": ("dp-sgd", {"ensemble.weights": "class-counts"}, "ensemble.weights"),
    "the client's prior": ("dp-sgd", {"local.logit_adjustment": 1.0}, "local.logit_adjustment"),
    "a second round of heads": ("heads", {"rounds": 2}, "rounds"),
    "a head that is a network": ("heads", {"prototypes": ["mlp"]}, "prototypes"),
    "a start from averaged weights": ("answers", {"distill.init": "average"}, "distill.init"),
    "logits, which have no bound": ("answers", {"ensemble.combine": "logits"}, "ensemble.combine"),
    "remembered answers": ("answers", {"ensemble.ema": 0.5}, "ensemble.ema"),
    "answers for each batch": ("votes", {"ensemble.cache": False}, "ensemble.cache"),
    "a guard": ("weights", {"fusion.guard": 0.1}, "fusion.guard"),
    "trust in single clients": ("weights", {"fusion.trust": "expguard"}, "fusion.trust"),
    "BatchNorm": ("dp-sgd", {"prototypes": ["resnet8"]}, "BatchNorm"),
    "BatchNorm of clients": ("weights", {"prototypes": ["resnet8"]}, "BatchNorm"),
    "eight clients at ε = 1": ("weights", {"privacy.epsilon": 1.0}, "a round needs"),
    "answers of eight clients": ("answers", {"privacy.epsilon": 0.5}, "a smaller pool"),
    "less noise than ε allows": ("weights", {"privacy.noise": 0.06}, "would accept that"),
    "hardly any noise": ("weights", {"privacy.noise": 0.01}, "cost ε = inf"),
    "δ that allows to publish a client": ("weights", {"privacy.delta": 0.09, "clients.total": 16}, "below 1/16"),
    "δ that allows to publish a record": ("dp-sgd", {"privacy.delta": 0.09, "clients.total": 16}, "below 1/16"),
    "a head that hardly any noise hides": ("heads", {"privacy.regularization": 0.001}, "greater than or equal to 0.01"),
    "nothing that noise could do": ("weights", {"privacy.epsilon": 1e-6, "privacy.delta": 1e-30}, "would accept that"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_private_is_one_line_before_any_training(mistake: str) -> None:
    kind, changes, said = MISTAKES[mistake]
    with pytest.raises((ConfigError, Exception)) as refused:
        build(experiment(kind, changes))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def partly_known(data: DataConfig) -> Dataset:
    def part(n: int, seed: int) -> Examples:
        found = stripes(n, seed)
        return Examples(found.inputs, found.labels, classes(3), torch.arange(n) % 2)

    return Dataset("own", part(400, 1), part(60, 2), known=((0, 1), (0, 1, 2)))


@pytest.mark.parametrize("kind", ["answers", "votes"])
def test_sums_of_classes_that_few_clients_know_are_refused(kind: str) -> None:
    """The mean of a class is over those who know it, so that one client moves it by more than the noise is for."""
    given = {"data.name": f"{__name__}:partly_known", "data.train_size": 300, "partition.scheme": "groups"}
    with pytest.raises(ConfigError, match="its sites know different channels"):
        build(experiment(kind, {**given, "privacy.epsilon": 650.0}))


def test_what_the_gate_refuses_counts_and_is_not_asked_for_again(tmp_path: Path) -> None:
    """The server has seen it: with a second version in the next attempt, a round would cost what two do."""
    given = experiment("dp-sgd", {"rounds": 1, "clients.fraction": 1.0, "clients.attempts": 3, "clients.quorum": 1.0})
    parts, asked = build(given), []

    def train(job: Job) -> Reply:
        asked.append(job.id)
        reply = parts.train(job)
        bad = {key: value * float("nan") for key, value in reply.state.items()}
        return replace(reply, state=bad) if job.id == asked[0] else reply

    with pytest.raises(QuorumError, match="would spend twice"):
        list(run_experiment(replace(parts, train=train), RunFolder.create(tmp_path / "run", given)))
    assert sorted(asked) == [client.id for client in parts.federation.clients]
    assert parts.privacy.releases.counts() == dict.fromkeys(asked, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "said"), [("weights", "withheld"), ("dp-sgd", "1.23e+04")])
def test_why_a_client_was_left_out_is_not_told_where_clients_are_protected(
    kind: str, said: str, tmp_path: Path
) -> None:
    given = experiment(kind, {"rounds": 1, "clients.fraction": 1.0})
    parts = build(given)

    def train(job: Job) -> Reply:
        reply = parts.train(job)
        large = {key: value + 12_345 for key, value in reply.state.items()}
        return replace(reply, state=large) if job.id == "client-3" else reply

    (record,) = run_experiment(replace(parts, train=train), RunFolder.create(tmp_path / "run", given))
    (dropped,) = record["dropped"]
    assert dropped["client"] == "client-3"
    assert said in dropped["reason"]


def test_noisy_averages_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(FeddfError, match="round 1 cannot be fused: linear group-0: its model's logits are not finite"):
        ran(tmp_path / "run", experiment("weights", {"privacy.clip": 1e42}))


def test_how_many_clients_would_be_needed_would_do() -> None:
    few = {"privacy.epsilon": 4.0, "rounds": 1, "clients.fraction": 1.0}
    with pytest.raises(ConfigError, match=r"a round needs \d+") as refused:
        build(experiment("weights", few))
    needed = int(str(refused.value).partition("a round needs ")[2].partition(",")[0])
    enough = {**few, "data.train_size": None, "partition.min_size": 2, "clients.total": needed}
    assert build(experiment("weights", enough)).privacy is not None
    with pytest.raises(ConfigError, match=f"needs {needed}"):
        build(experiment("weights", {**enough, "clients.total": needed - 1}))


def test_extending_a_finished_run_says_what_it_costs_and_needs_consent(tmp_path: Path) -> None:
    run, config = tmp_path / "run", tmp_path / "c.toml"
    config.write_text(tomli_w.dumps(experiment("weights").model_dump(exclude_none=True)))
    said = CliRunner().invoke(app, ["run", str(config), "--out", str(run)])
    assert said.exit_code == 0, said.output
    assert "privacy at client level: ε = 300, δ = 1e-05 after 2 rounds" in said.output
    noise = read_ledger(run)[0]["plan"]["noise"]
    cost = epsilon_of(Mechanism(noise, 4), 1e-5)
    refused = CliRunner().invoke(app, ["resume", str(run), "rounds=4"])
    assert f"4 rounds with noise {noise:g} cost ε = {cost:.4g}" in str(refused.exception)
    accepted = CliRunner().invoke(app, ["resume", str(run), "rounds=4", f"privacy.epsilon={cost + 0.01}"])
    assert accepted.exit_code == 0, accepted.exception
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["privacy"]["epsilon"] == pytest.approx(cost, abs=1e-3)
    assert last["privacy"]["noise"] == noise


def test_augmentation_and_dropout_follow_from_no_seed() -> None:
    """With a seed that is known, one record more changes those after it in a batch by more than the clip."""
    parts, seen = build(experiment("dp-sgd")), []
    job = jobs_for(parts.server, parts.federation, sample(parts.federation, 1), parts.method.parts)[0]

    def train(job: Job) -> Reply:
        seen.append(job.seed)
        return Reply(job.id, "linear", 1, {}, 7, {"train_loss": 1.0})

    for _ in range(2):
        told = parts.privacy.local(train, parts.task.train)(job)  # type: ignore[union-attr]
        assert (told.n_examples, told.metrics) == (1, {})
    assert len({job.seed, *seen}) == 3


def test_what_clients_lack_is_not_warned_of() -> None:
    few = {"data.train_size": 20, "partition.min_size": 2, "clients.total": 8, "pool.sources": ["mnist-5k"]}
    assert build(experiment("", few)).warnings
    assert not build(experiment("dp-sgd", few)).warnings


def test_over_flower_it_is_refused_and_not_ignored(tmp_path: Path) -> None:
    flower = pytest.importorskip("feddf.flower")
    given = experiment("dp-sgd")
    for over in (flower.settings_of, flower.client_app_of, lambda one: flower.strategy_of(one, tmp_path / "run")):
        with pytest.raises(ConfigError, match="over Flower it must be"):
            over(given)
    assert not (tmp_path / "run").exists()


def test_a_client_that_tells_its_count_is_refused(tmp_path: Path) -> None:
    parts = build(experiment("dp-sgd"))
    job = jobs_for(parts.server, parts.federation, sample(parts.federation, 1), parts.method.parts)[0]
    reply = parts.train(job)
    assert (reply.n_examples, reply.metrics) == (1, {})
    assert "withhold" in admit(replace(reply, n_examples=45), {job.id: job}, parts.method.parts).reason  # type: ignore[union-attr]
    assert torch.isfinite(torch.cat([value.flatten() for value in reply.state.values()])).all()
