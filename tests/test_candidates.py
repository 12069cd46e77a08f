"""The candidates for feddf-plus compute what they say: a result about them is worth no more than their code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from conftest import Tiny, update_of
from feddf.config import load, with_values
from feddf.data import datasets
from feddf.engines import in_process
from feddf.evaluate import teacher_of
from feddf.fusion.average import average, average_by_prototype
from feddf.fusion.ensemble import CachedTargets, EnsembleTargets, Memory
from feddf.fusion.weights import CLASS_COUNTS, told
from feddf.runs.build import build
from feddf.runs.methods import feddf
from feddf.states import digest
from feddf.types import Fused, Job, ServerState, Update, WeightedLogits

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import candidates

SMALL = {
    "data.train_size": 200,
    "data.test_size": 50,
    "data.image_size": 8,
    "partition.min_size": 4,
    "local.epochs": 2,
    "local.batch_size": 16,
    "local.logit_adjustment": 1.0,
    "prototypes": ({"model": "cnn", "width": 2},),
    "run.engine": "in-process",
}


def fixed(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
    """A fusion that starts from 1 and ends with 3."""
    return Fused(server.next({"m": {"w": torch.tensor([3.0])}}), {"m": {"w": torch.tensor([1.0])}})


def test_means_of_weights() -> None:
    later = ServerState(4, {"m": {"w": torch.tensor([7.0])}})
    assert candidates.half_way(fixed)(later, [], 0).server.models["m"]["w"].item() == 2
    assert candidates.running_mean(fixed, 0.25)(later, [], 0).server.models["m"]["w"].item() == 0.25 * 7 + 0.75 * 3
    first = ServerState(0, later.models)
    assert candidates.running_mean(fixed)(first, [], 0).server.models["m"]["w"].item() == 3, (
        "a start counts for nothing"
    )


def of_one_layer(name: str, weights: Sequence[Sequence[float]], counts: tuple[int, ...]) -> Update:
    state = {"0.weight": torch.full((2,), weights[0][0]), "1.weight": torch.tensor(weights), "1.bias": torch.zeros(2)}
    return Update(name, "m", 1, state, sum(counts), {}, {CLASS_COUNTS: {"counts": torch.tensor(counts)}})


ONE = of_one_layer("one", [[1.0], [2.0]], (30, 0))
TWO = of_one_layer("two", [[3.0], [6.0]], (10, 20))


def test_averages_teach_as_much_as_their_clients_together() -> None:
    given: list[Sequence[Update]] = []

    def noted(updates: Sequence[Update], seed: int, memory: Memory) -> EnsembleTargets:
        given.append(updates)
        return EnsembleTargets(CachedTargets(torch.ones(1, 2) / 2), None, memory)

    candidates.with_averages(noted)([ONE, TWO], 0, {})
    *clients, mean = given[-1]
    assert clients == [ONE, TWO]
    assert (mean.prototype, mean.n_examples, mean.trust, mean.teaches) == ("m", 30, 2.0, True)
    counts = told(mean)
    assert counts is not None
    assert counts.tolist() == [20, 10]
    assert mean.state["1.weight"].flatten().tolist() == [2.0, 4.0]
    candidates.with_mixtures(noted, samples=400)([ONE, TWO], 0, {})
    levels = torch.stack([update.state["1.weight"][0, 0] for update in given[-1][2:]])
    assert len(levels) == 400
    assert 1 <= levels.min() < 1.1
    assert 2.9 < levels.max() <= 3
    assert sum(update.trust for update in given[-1][2:]) == pytest.approx(2.0)
    silent = [replace(one, payload={}) for one in (ONE, TWO)]
    candidates.with_averages(noted)(silent, 0, {})
    assert (given[-1][-1].n_examples, given[-1][-1].payload) == (30, {})


@pytest.mark.parametrize("weights", ["uniform", "class-counts"])
def test_averages_teach_and_are_not_averaged_again(tiny: Tiny, weights: str) -> None:
    """Half of what is taught is theirs, and the start is the plain average of the clients alone."""
    settings = with_values(tiny.settings, {"ensemble.weights": weights, "distill.early_stopping": "none"})
    jobs = [Job(client, 1, tiny.server.models[client.prototype], 7) for client in tiny.federation.clients]
    counts = {CLASS_COUNTS: {"counts": torch.tensor([10, 5, 5])}}
    updates = [replace(update_of(tiny.local(job)), payload=counts) for job in jobs]
    found, plain = (
        make(tiny.resources, settings, in_process)(tiny.server, updates, 1)
        for make in (candidates.feddf_of_averages, feddf)
    )
    assert digest(found.start) == digest(average_by_prototype(average, tiny.server, updates)) == digest(plain.start)
    assert digest(found.server.models) != digest(plain.server.models)
    taught = {teacher.id: torch.as_tensor(teacher.weight) for teacher in found.ensemble.teachers}
    *clients, _, _ = taught
    assert clients == [update.client_id for update in updates]
    for prototype in tiny.prototypes:
        mine = sum(taught[update.client_id] for update in updates if update.prototype == prototype)
        assert torch.allclose(taught[f"average 0 of {prototype}"], torch.as_tensor(mine))


def test_centered_logits_do_not_depend_on_what_a_teacher_adds_to_all() -> None:
    logits, weights = torch.randn(5, 3), [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 0.0, 1.0])]
    votes = [
        [WeightedLogits(logits + shift, weights[0]), WeightedLogits(logits.flip(0), weights[1])] for shift in (0.0, 7.0)
    ]
    assert torch.allclose(*map(candidates.centered_logits, votes))
    assert not torch.allclose(*map(candidates.avg_logits, votes)), "with weights by class, plain ones do"


def test_a_mixed_input_lies_between_two() -> None:
    raw = torch.tensor([0, 100, 200], dtype=torch.uint8).view(3, 1, 1, 1).repeat(200, 1, 4, 4)
    mixed = candidates.mixed(raw, torch.Generator().manual_seed(1))
    assert (mixed.shape, mixed.dtype) == (raw.shape, torch.uint8)
    assert len(mixed.unique()) > 150
    assert all(len(image.unique()) == 1 for image in mixed)


def test_fedntd_takes_the_steps_of_its_formula() -> None:
    """Two steps on one batch: ∂/∂z of the loss is (σ(z + a) − y) / n, and β (q − q') / n for all but the true class."""
    values = {**SMALL, "local.batch_size": 200, "local.augment": "none", "prototypes": ({"model": "mlp", "width": 6},)}
    values["ensemble.weights"] = "class-counts"
    parts, beta = build(with_values(load("demo"), values)), 2.0
    client, rate, train = parts.federation.clients[0], parts.experiment.local.lr, parts.task.train
    assert client.indices is not None
    job = Job(client, 1, parts.server.models["mlp"], 7)
    inputs, labels = train.inputs.batch(client.indices), train.labels[client.indices]
    truth = torch.nn.functional.one_hot(labels, 10).double()
    prior = (truth.sum(dim=0) + 0.001 * len(labels) / 10) / len(labels)
    model = parts.prototypes["mlp"].load(job.state)
    received = model(inputs).detach()
    for _ in range(2):
        z = model(inputs)
        own, theirs = ((it.detach().double() - 1e9 * truth).softmax(dim=1) for it in (z, received))
        gradient = (z.detach().double() + prior.log()).softmax(dim=1) - truth + beta * (own - theirs)
        model.zero_grad()
        z.backward((gradient / len(labels)).float())
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight -= rate * weight.grad
    reply = candidates.fedntd(parts, beta).train(job)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(reply.state[name], tensor, atol=1e-5), name
        assert torch.allclose(parts.train(job).state[name], candidates.fedntd(parts, beta=0).train(job).state[name])
    assert reply.payload[CLASS_COUNTS]["counts"].tolist() == truth.sum(dim=0).tolist(), "what the method asks for"


def test_the_odds_are_those_of_a_regularized_logistic_regression() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    generator = torch.Generator().manual_seed(0)
    own, public = torch.randn(30, 3, generator=generator) + 0.7, torch.randn(90, 3, generator=generator)
    found = candidates._logistic(own, public, decay=0.05)
    x, y = torch.cat([own, public]).numpy(), [1] * 30 + [0] * 90
    expected = linear_model.LogisticRegression(C=1 / (2 * 0.05 * 120), class_weight="balanced", tol=1e-8).fit(x, y)
    assert found.tolist() == pytest.approx([*expected.coef_[0], *expected.intercept_], abs=2e-3)


def test_weights_for_each_sample_reach_the_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "pretrained", lambda model, *rest, **options: model)  # features need not be good
    parts = build(with_values(load("demo"), {**SMALL, "pool.size": 40}))
    odds = candidates.estimate_odds(parts)
    assert {one.shape for one in odds.values()} == {(40, 1)}
    assert torch.stack(list(odds.values())).amax(dim=0).eq(1).all(), "one client is the likeliest"
    counts = {CLASS_COUNTS: {"counts": torch.tensor([10, 20] + [0] * 8)}}
    first, second = (Update(client.id, "cnn", 1, {}, 30, {}, counts) for client in parts.federation.clients[:2])
    given: list[Update] = []

    def noted(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        given.extend(updates)
        return fixed(server, updates, seed)

    candidates.with_odds(odds, noted)(parts.server, [first, second], 0)
    teachers = [teacher_of(update, parts.prototypes) for update in given]
    weights = candidates.by_density(teachers, candidates.Resources({}), None)
    found = weights[second.client_id](torch.zeros(40, 10))  # type: ignore[operator]
    assert torch.allclose(found, 30 * odds[second.client_id].double())
    by_class = candidates.by_density_and_counts(teachers, candidates.Resources({}), None)
    found = by_class[first.client_id](torch.zeros(40, 10))  # type: ignore[operator]
    expected = torch.tensor([10.0, 20.0] + [1.0] * 8) * odds[first.client_id]  # of the others nobody has any
    assert torch.allclose(found, expected.double())


def test_a_start_learned_from_the_pool_tells_inputs_apart() -> None:
    values = {**SMALL, "pool.size": 60, "prototypes": ({"model": "mlp", "width": 64},)}
    parts = build(with_values(load("demo"), values))
    pool, flips = parts.task.pool, parts.task.data.flips
    assert pool is not None
    (prototype,), (state,) = parts.prototypes.values(), parts.server.models.values()

    def found(model: torch.nn.Module) -> float:
        """The share of inputs whose other view is the nearest among 60, in ten tries."""
        generator = torch.Generator().manual_seed(1)
        raw = pool.raw[torch.arange(60)]
        shares = []
        for _ in range(10):
            views = [pool.encode(candidates._view(raw, flips, generator)) for _ in range(2)]
            with torch.no_grad():
                first, second = (torch.nn.functional.normalize(candidates.features(model, view)) for view in views)
            shares.append(float(((first @ second.T).argmax(dim=1) == torch.arange(60)).float().mean()))
        return sum(shares) / len(shares)

    trained, again = (
        candidates.pretrained(prototype.load(state), pool, flips, seed=0, steps=150, batch=48) for _ in range(2)
    )
    assert found(trained) > 1.1 * found(prototype.load(state))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), again.parameters(), strict=True))


def test_every_candidate_runs_and_makes_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "mnist_5k", cache(datasets.mnist_5k))  # reading it takes most of the time
    learn = candidates.pretrained
    monkeypatch.setattr(candidates, "pretrained", lambda *given: learn(*given, steps=3, batch=16))
    small = {
        **SMALL,
        "clients.total": 4,
        "rounds": 2,
        "pool.size": 40,
        "local.epochs": 1,
        "local.logit_adjustment": 0.0,  # the method's name says it
        "distill.steps": 3,
        "distill.batch_size": 16,
        "distill.early_stopping": "none",
        "run.threads": 1,
    }
    monkeypatch.setattr(candidates, "TASKS", {"digits": ("demo", small)})
    monkeypatch.setattr(candidates, "FEDERATION", {"partition.alpha": 0.1})
    found = {}
    for name in candidates.CANDIDATES:
        parts = candidates.made([name], "digits", "feddf+adjusted+class-counts+probabilities", 0)
        assert parts.experiment.local.logit_adjustment == 1.0, "what the base stands for stays"
        first, second = candidates.rounds_of(parts)
        assert not [*first.failures, *second.failures], name
        found[name] = digest(second.server.models)
    assert len(set(found.values())) == len(found) == 17
    row = candidates.run(["averages", "running-mean"], "digits", "feddf-plus", 1)
    assert len(row["curve"]) == 2
    with pytest.raises(ValueError, match=r"two of them change fusion\.method"):
        candidates.made(["averages", "mixed"], "digits", "feddf-plus", 0)
