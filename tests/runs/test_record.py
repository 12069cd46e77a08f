"""What a round's record says of ensembles and bytes, against the same found by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import Tiny, make_tiny, update_of
from feddf.client import combine_halves
from feddf.config import Record, RunConfig, with_values
from feddf.engines import in_process
from feddf.evaluate import accuracy_of, logits
from feddf.fusion.ensemble import avg_logits, avg_probabilities
from feddf.fusion.swag import swag
from feddf.fusion.weights import CLASS_COUNTS
from feddf.rounds import run_round
from feddf.runs.methods import make_method
from feddf.runs.run import Recorder, mean_metrics
from feddf.runs.spool import LOST
from feddf.runtime.execution import Execution
from feddf.states import n_bytes
from feddf.types import Failure, Job, Method, Round, ServerState, Update, WeightedLogits

EXECUTION = Execution()
SHORT = {"distill.steps": 2, "distill.eval_every": 1, "run.threads": 1}


def put_together(changes: dict[str, Any]) -> tuple[Tiny, Method]:
    tiny = make_tiny(clients=5, fraction=1.0)
    settings = with_values(tiny.settings, {**SHORT, **changes})
    method = make_method(tiny.resources, settings, in_process)
    local = partial(tiny.local, half=combine_halves([part.half for part in method.parts]))
    return replace(tiny, settings=settings, local=local, parts=method.parts), method


def round_of(tiny: Tiny, method: Method, server: ServerState | None = None) -> Round:
    return run_round(
        server or tiny.server,
        tiny.federation,
        engine=in_process,
        train=tiny.local,
        fuse=method.fuse,
        parts=method.parts,
    )


def recorded(tiny: Tiny, closed: Round, **run: Any) -> Record:
    run_config = RunConfig(**{"threads": 1, "log_clients": True, **run})
    return Recorder(in_process, tiny.prototypes, tiny.test, tiny.resources.labeled, run_config).record(closed)


def answers(tiny: Tiny, updates: Sequence[Update]) -> list[Tensor]:
    return [logits(tiny.prototypes[one.prototype].load(one.state), tiny.test.inputs) for one in updates]


def accuracy(tiny: Tiny, probabilities: Tensor) -> float:
    return accuracy_of(probabilities, tiny.test.labels)


def distinct(updates: Sequence[Update]) -> list[Update]:
    """Clients that disagree, one of them loudly: each way to combine them has an accuracy of its own."""
    sizes = (0.02, 3.0, 0.5, 9.0, 0.1)
    changed = []
    for number, (update, size) in enumerate(zip(updates, sizes, strict=True)):
        last = [key for key in update.state if key.endswith("weight") and update.state[key].ndim == 2][-1]
        noise = torch.randn(update.state[last].shape, generator=torch.Generator().manual_seed(number))
        state = {**update.state, last: size * (update.state[last] + 0.3 * noise)}
        changed.append(replace(update, state=state, n_examples=10 + 30 * number))
    return changed


def fused_of(tiny: Tiny, method: Method, updates: Sequence[Update]) -> Round:
    sent = {update.client_id: 1 for update in updates}
    return Round(method.fuse(tiny.server, updates, 3), list(updates), [], 1, {}, sent)


def some_updates(tiny: Tiny) -> list[Update]:
    jobs = [Job(client, 1, tiny.server.sent_to(client), 7) for client in tiny.federation.clients]
    return distinct([update_of(tiny.local(job)) for job in jobs])


def by_counts(updates: Sequence[Update], zs: Sequence[Tensor]) -> Tensor:
    counts = [update.payload[CLASS_COUNTS]["counts"].double() for update in updates]
    scaled = [one * min(1.0, update.n_examples / one.sum()) for one, update in zip(counts, updates, strict=True)]
    return avg_probabilities([WeightedLogits(z, n) for z, n in zip(zs, scaled, strict=True)])


ENSEMBLES: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, lambda updates, zs: avg_logits(map(WeightedLogits, zs))),
    "probabilities": (
        {"ensemble.combine": "probabilities"},
        lambda updates, zs: avg_probabilities(map(WeightedLogits, zs)),
    ),
    "examples": (
        {"ensemble.weights": "examples"},
        lambda updates, zs: avg_logits([WeightedLogits(z, one.n_examples) for z, one in zip(zs, updates, strict=True)]),
    ),
    "class counts": ({"ensemble.weights": "class-counts", "ensemble.combine": "probabilities"}, by_counts),
    "each batch": ({"ensemble.cache": False}, lambda updates, zs: avg_logits(map(WeightedLogits, zs))),
}


@pytest.mark.parametrize("case", ENSEMBLES)
def test_the_ensemble_is_the_one_that_taught(case: str) -> None:
    changes, expected = ENSEMBLES[case]
    tiny, method = put_together(changes)
    updates = some_updates(tiny)
    record = recorded(tiny, fused_of(tiny, method, updates))
    zs = answers(tiny, updates)
    assert record["ensemble"] == pytest.approx(accuracy(tiny, expected(updates, zs)))
    assert record["avg_logits"] == pytest.approx(accuracy(tiny, torch.stack(zs).mean(dim=0)))
    assert record["accuracy_of_clients"] == {
        one.client_id: accuracy(tiny, z) for one, z in zip(updates, zs, strict=True)
    }
    assert "no_ensemble" not in record
    if case not in ("plain", "each batch"):
        assert record["ensemble"] != record["avg_logits"]


def test_confusion_counts_every_test_input_once() -> None:
    tiny, _ = put_together({})
    models = {name: tiny.server.models[name] for name in tiny.prototypes}
    recorder = Recorder(in_process, tiny.prototypes, tiny.test, tiny.resources.labeled, RunConfig(threads=1))
    found = recorder.confusion(models)
    assert list(found) == sorted(tiny.prototypes)
    for name, rows in found.items():
        expected = [[0] * tiny.test.n_classes for _ in range(tiny.test.n_classes)]
        given = logits(tiny.prototypes[name].load(models[name]), tiny.test.inputs).argmax(dim=1)
        for label, answer in zip(tiny.test.labels.tolist(), given.tolist(), strict=True):
            expected[label][answer] += 1
        assert rows == expected


def test_sampled_teachers_are_in_the_ensemble_and_in_nothing_else() -> None:
    tiny, method = put_together({"ensemble.swag_samples": 3, "ensemble.swag_scale": 4.0})
    updates = some_updates(tiny)
    closed = fused_of(tiny, method, updates)
    drawn = swag(updates, 3, samples=3, scale=4.0)
    assert len(drawn) == 6  # of each architecture
    taught = [teacher.id for teacher in closed.fused.ensemble.teachers]
    assert taught == [one.client_id for one in (*updates, *drawn)]
    votes = [WeightedLogits(teacher.predict(tiny.test.inputs, EXECUTION)) for teacher in closed.fused.ensemble.teachers]
    record = recorded(tiny, closed)
    assert record["ensemble"] == pytest.approx(accuracy(tiny, avg_logits(votes)))
    assert record["avg_logits"] == pytest.approx(accuracy(tiny, torch.stack(answers(tiny, updates)).mean(dim=0)))
    assert record["ensemble"] != record["avg_logits"]
    assert record["accuracy_of_clients"].keys() == {one.client_id for one in updates}


def test_clients_that_do_not_teach_are_asked_but_not_in_the_ensemble() -> None:
    tiny, method = put_together({})
    updates = [
        replace(one, teaches=one.client_id != "c3", trust=0.25 if one.client_id == "c0" else 1.0)
        for one in some_updates(tiny)
    ]
    record = recorded(tiny, fused_of(tiny, method, updates))
    zs = answers(tiny, updates)
    left = [WeightedLogits(z, one.trust) for z, one in zip(zs, updates, strict=True) if one.teaches]
    assert record["ensemble"] == pytest.approx(accuracy(tiny, avg_logits(left)))
    assert record["avg_logits"] == pytest.approx(accuracy(tiny, torch.stack(zs).mean(dim=0)))
    assert record["ensemble"] != record["avg_logits"]
    assert record["accuracy_of_clients"].keys() == {one.client_id for one in updates}


@pytest.mark.parametrize("method_name", ["fedavg", "feddf"])
def test_an_ensemble_that_cannot_be_measured_says_why(method_name: str) -> None:
    tiny, method = put_together({"fusion.method": method_name, "ensemble.ema": 0.5})
    first = round_of(tiny, method)
    second = round_of(tiny, method, first.server)
    records = [recorded(tiny, first), recorded(tiny, second)]
    for record, closed in zip(records, (first, second), strict=True):
        plain = torch.stack(answers(tiny, closed.updates)).mean(dim=0)
        assert record["avg_logits"] == pytest.approx(accuracy(tiny, plain))
    if method_name == "fedavg":  # it has none, and needs no excuse
        assert [record["ensemble"] for record in records] == [None, None]
        assert not [record for record in records if "no_ensemble" in record]
    else:  # what earlier rounds said is remembered for the pool only
        assert records[0]["ensemble"] is not None
        assert "no_ensemble" not in records[0]
        reason = "earlier rounds' answers are known for the pool only"
        assert (records[1]["ensemble"], records[1]["no_ensemble"]) == (None, reason)


def test_logits_that_are_not_finite_are_in_no_ensemble() -> None:
    tiny, method = put_together({})
    updates = some_updates(tiny)
    good = fused_of(tiny, method, updates)
    broken = replace(updates[1], state={**updates[1].state, "layers.5.bias": torch.full((3,), torch.inf)})
    teachers = good.fused.ensemble.teachers
    spoilt = replace(teachers[1], predict=replace(teachers[1].predict, state=broken.state))
    ensemble = replace(good.fused.ensemble, teachers=(teachers[0], spoilt, *teachers[2:]))
    given = [updates[0], broken, *updates[2:]]
    record = recorded(tiny, replace(good, fused=replace(good.fused, ensemble=ensemble), updates=given))
    left = answers(tiny, [updates[0], *updates[2:]])
    assert record["ensemble"] == pytest.approx(accuracy(tiny, avg_logits(map(WeightedLogits, left))))
    assert record["avg_logits"] == pytest.approx(accuracy(tiny, torch.stack(left).mean(dim=0)))
    nobody = replace(good, fused=replace(good.fused, ensemble=replace(ensemble, teachers=(spoilt,))), updates=[broken])
    record = recorded(tiny, nobody)
    assert (record["ensemble"], record["avg_logits"]) == (None, None)
    assert record["no_ensemble"] == "no teacher's answers are finite"


def test_bytes_are_those_of_weights_and_payloads_in_both_directions() -> None:
    tiny, method = put_together({"fusion.parts": ("scaffold", "class-counts"), "fusion.method": "fedavg"})
    server = tiny.server
    for number in (1, 2):
        closed = round_of(tiny, method, server)
        server, record = closed.server, recorded(tiny, closed)
        for client in tiny.federation.clients:
            state = tiny.server.models[client.prototype]
            weights = sum(
                one.numel() * one.element_size()
                for key, one in state.items()
                if "running" not in key and "num_batches" not in key
            )
            assert record["bytes_down"][client.id] == n_bytes(state) + (weights if number > 1 else 0)
            assert record["bytes_up"][client.id] == n_bytes(state) + weights + 8 * 3


def test_who_failed_and_whose_state_was_lost_is_said() -> None:
    tiny, method = put_together({"fusion.method": "fedavg"})
    closed = round_of(tiny, method)
    marked = [
        replace(one, metrics={**one.metrics, LOST: 1.0}) if one.client_id == "c2" else one for one in closed.updates
    ]
    record = recorded(tiny, replace(closed, updates=marked, failures=[Failure("c9", "late")]))
    assert (record["lost_states"], record["dropped"]) == (["c2"], [{"client": "c9", "reason": "late"}])
    assert LOST not in record["metrics_of_clients"]
    assert "lost_states" not in recorded(tiny, closed)


def test_nothing_is_measured_without_test_data() -> None:
    tiny, method = put_together({})
    bare = replace(tiny, test=tiny.test.take(torch.arange(0)))
    record = recorded(bare, round_of(tiny, method))
    assert (record["ensemble"], record["avg_logits"]) == (None, None)
    assert "no_ensemble" not in record
    assert all(model["fused"] is None for model in record["models"].values())


def test_means_of_what_clients_say_cannot_be_taken_over_by_one() -> None:
    """An n_k of 10⁹ counts as ten times the median, an accuracy is at most 1, and a missing metric erases nothing."""
    honest = [(10, {"accuracy": 0.5, "loss": 2.0}), (10, {"accuracy": 0.7, "loss": 1.0}), (10, {"accuracy": 0.6})]
    found = mean_metrics([*honest, (10**9, {"accuracy": 1e6, "val.acc": -3.0})])
    assert found["accuracy"] == pytest.approx((10 * 0.5 + 10 * 0.7 + 10 * 0.6 + 100 * 1.0) / 130)
    assert found["loss"] == pytest.approx(1.5)
    assert found["val.acc"] == 0.0
    assert mean_metrics([(0, {"loss": 1.0})]) == mean_metrics([]) == {}
