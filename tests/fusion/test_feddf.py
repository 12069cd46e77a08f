from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import Tiny, make_tiny, update_of
from feddf.config import ConfigError, DistillConfig, parse, with_values
from feddf.config.keys import nested
from feddf.config.records import DistillationRecord
from feddf.engines import in_process
from feddf.evaluate import accuracy, logits
from feddf.fusion.distill import distill, held_out_inputs
from feddf.fusion.ensemble import avg_logits
from feddf.losses import kl_divergence
from feddf.outputs import Outputs, classes
from feddf.rounds import run_round
from feddf.runs.methods import feddf
from feddf.states import digest
from feddf.types import Examples, Fusion, Job, Reply, Resources, Update, WeightedLogits


def fusion(tiny: Tiny, changes: Mapping[str, Any] | None = None, resources: Resources | None = None) -> Fusion:
    """FedDF with some settings changed, by their full names."""
    return feddf(resources or tiny.resources, with_values(tiny.settings, changes or {}), in_process)


def trained(tiny: Tiny, only: str | None = None) -> list[Update]:
    clients = [client for client in tiny.federation.clients if only in (None, client.prototype)]
    return [update_of(tiny.local(Job(c, 1, tiny.server.models[c.prototype], 7))) for c in clients]


def distance(tiny: Tiny, name: str, state: Any, updates: list[Update]) -> float:
    """KL between the ensemble and a model on the pool."""
    teachers = (WeightedLogits(logits(tiny.prototypes[u.prototype].load(u.state), tiny.pool)) for u in updates)
    return float(kl_divergence(avg_logits(teachers), logits(tiny.prototypes[name].load(state), tiny.pool)))


def test_a_prototype_without_clients_learns_from_the_others(tiny: Tiny) -> None:
    updates = trained(tiny, only="mlp")
    fuse = fusion(tiny, {"distill.early_stopping": "none", "distill.steps": 200, "distill.lr": 1e-2})
    fused = fuse(tiny.server, updates, 1)
    before = distance(tiny, "cnn", tiny.server.models["cnn"], updates)
    assert distance(tiny, "cnn", fused.server.models["cnn"], updates) < 0.5 * before


def test_students_come_closer_to_the_ensemble_of_all_architectures(tiny: Tiny) -> None:
    updates = trained(tiny)
    fuse = fusion(tiny, {"distill.early_stopping": "none", "distill.steps": 300, "distill.lr": 1e-2})
    fused = fuse(tiny.server, updates, 1)
    for name in tiny.prototypes:
        start = distance(tiny, name, fused.start[name], updates)
        assert distance(tiny, name, fused.server.models[name], updates) < start


def test_with_one_prototype_it_is_algorithm_1(tiny: Tiny) -> None:
    """The other prototype's presence on the server changes nothing for the first."""
    updates = trained(tiny, only="mlp")
    one_thread = {"run.threads": 1}  # a lone student would have two
    both = fusion(tiny, one_thread)(tiny.server, updates, 1)
    alone = replace(tiny.resources, prototypes={"mlp": tiny.prototypes["mlp"]})
    server = replace(tiny.server, models={"mlp": tiny.server.models["mlp"]})
    one = fusion(tiny, one_thread, alone)(server, updates, 1)
    assert digest({"mlp": both.server.models["mlp"]}) == digest(one.server.models)


def test_teachers_asked_once_or_on_each_batch_give_almost_the_same_student(tiny: Tiny) -> None:
    updates = trained(tiny)
    once, again = (
        fusion(tiny, {"distill.early_stopping": "none", "ensemble.cache": cache})(tiny.server, updates, 1).server.models
        for cache in (True, False)
    )
    for name in tiny.prototypes:
        for key in once[name]:
            torch.testing.assert_close(once[name][key], again[name][key], atol=1e-4, rtol=1e-4)


def test_is_never_worse_on_validation_than_the_average(tiny: Tiny) -> None:
    updates = trained(tiny)
    fuse = fusion(tiny, {"distill.steps": 30, "distill.batch_size": 128, "distill.lr": 1.0, "distill.eval_every": 10})
    result = fuse(tiny.server, updates, 1)
    for name, prototype in tiny.prototypes.items():
        after, before = (prototype.load(models[name]) for models in (result.server.models, result.start))
        assert accuracy(after, tiny.resources.labeled) >= accuracy(before, tiny.resources.labeled)


def test_its_notes_say_what_each_student_did(tiny: Tiny) -> None:
    notes = fusion(tiny)(tiny.server, trained(tiny), 1).notes
    assert notes["distillation"].keys() == {"cnn", "mlp"}
    assert notes["distillation"]["mlp"]["steps"] == 12
    assert notes["seconds"].keys() == {"ask", "distill"}


def test_it_hands_on_the_ensemble_that_taught_or_says_why_there_is_none(tiny: Tiny) -> None:
    updates, fuse = trained(tiny), fusion(tiny, {"ensemble.ema": 0.5})
    first = fuse(tiny.server, updates, 1)
    assert [teacher.id for teacher in first.ensemble.teachers] == [update.client_id for update in updates]
    second = fuse(first.server, updates, 2)
    assert second.ensemble is None
    assert second.no_ensemble == "earlier rounds' answers are known for the pool only"


def labeled_by(tiny: Tiny, state: Any) -> Examples:
    """Validation examples that a model, and only that one, gets all right."""
    predicted = logits(tiny.prototypes["mlp"].load(state), tiny.pool).argmax(dim=1)
    return Examples(tiny.pool, predicted, classes(3))


def test_a_student_may_start_from_the_average_from_before_or_from_the_better(tiny: Tiny) -> None:
    """With a rate of almost zero, what comes out is where it started."""
    updates = trained(tiny)
    previous = tiny.server.models["mlp"]

    def weights(start: str, validation: Examples | None) -> tuple[Tensor, Tensor]:
        stop = "none" if validation is None else "validation"
        changes = {"distill.steps": 1, "distill.lr": 1e-30, "distill.init": start, "distill.early_stopping": stop}
        resources = replace(tiny.resources, validation=validation)
        fused = fusion(tiny, changes, resources)(tiny.server, updates, 1)
        return fused.server.models["mlp"]["layers.1.weight"], fused.start["mlp"]["layers.1.weight"]

    averaged = fusion(tiny)(tiny.server, updates, 1).start["mlp"]
    for_previous, for_average = (labeled_by(tiny, state) for state in (previous, averaged))
    assert not torch.equal(for_previous.labels, for_average.labels)
    from_average, start = weights("average", None)
    assert torch.equal(from_average, start)
    assert torch.equal(start, averaged["layers.1.weight"])
    assert torch.equal(weights("previous", None)[0], previous["layers.1.weight"])
    assert torch.equal(weights("best", for_previous)[0], previous["layers.1.weight"])
    assert torch.equal(weights("best", for_average)[0], averaged["layers.1.weight"])


def test_the_held_out_part_of_the_pool_stops_the_distillation_without_labels(tiny: Tiny) -> None:
    changes = {
        "distill.early_stopping": "held-out-loss",
        "distill.held_out": 0.25,
        "distill.steps": 60,
        "distill.lr": 1e-2,
    }
    fuse = fusion(tiny, changes, replace(tiny.resources, validation=None))
    fused = fuse(tiny.server, trained(tiny), 1)
    for student in fused.notes["distillation"].values():
        assert student["score_before"] < student["score_after"] < 0  # minus a divergence


@pytest.mark.parametrize(("n", "share", "expected"), [(100, 0.1, 10), (4, 0.1, 1), (4, 0.9, 2)])
def test_something_is_held_out_and_something_is_left(n: int, share: float, expected: int) -> None:
    kept, held_out = held_out_inputs(n, DistillConfig(early_stopping="held-out-loss", held_out=share))
    assert (len(kept), len(held_out)) == (n - expected, expected)
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(n))


def test_all_views_of_an_input_are_held_out_together() -> None:
    kept, held_out = held_out_inputs(60, DistillConfig(early_stopping="held-out-loss", held_out=0.2), views=3)
    assert (len(kept), len(held_out)) == (48, 12)
    assert {int(i) % 20 for i in kept}.isdisjoint({int(i) % 20 for i in held_out})
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(60))


@pytest.mark.parametrize("stop", ["validation", "none"])
def test_nothing_is_held_out_where_something_else_stops_the_student(stop: Any) -> None:
    kept, held_out = held_out_inputs(50, DistillConfig(early_stopping=stop))
    assert (kept.tolist(), len(held_out)) == (list(range(50)), 0)


heard: list[tuple[int, Tensor]] = []


def noted(votes: Iterable[WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()) -> Tensor:
    """The paper's target, with a note of how many teachers there were and what came of it."""
    given = list(votes)
    heard.append((len(given), avg_logits(given, temperature)))
    return heard[-1][1]


def test_sampled_teachers_join_the_clients(tiny: Tiny) -> None:
    updates = trained(tiny)
    heard.clear()
    fusion(tiny, {"ensemble.combine": f"{__name__}:noted", "ensemble.swag_samples": 4})(tiny.server, updates, 1)
    assert [teachers for teachers, _ in heard] == [len(updates) + 2 * 4]  # four of each prototype


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"distill.init": "best", "distill.early_stopping": "none"}, "the best is found by a score"),
        ({"pool.augment": True}, "only with ensemble.cache = false"),
        ({"ensemble.cache": False, "ensemble.swag_samples": 2}, "only with ensemble.cache = true"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], reason: str) -> None:
    base = {"data": {"name": "mnist-5k"}, "prototypes": ["mlp"], "pool": {"sources": ["noise"]}}
    assert parse(base).distills
    with pytest.raises(ConfigError, match=reason):
        parse(nested(base, changes))


def test_asked_on_each_batch_teachers_see_the_augmented_pool_that_the_student_sees(tiny: Tiny) -> None:
    black = torch.zeros_like(tiny.pool.raw[:1])

    def blacken(raw: Tensor, generator: torch.Generator) -> Tensor:
        return black.expand(len(raw), *black.shape[1:]).clone()

    changes = {"ensemble.cache": False, "ensemble.combine": f"{__name__}:noted", "distill.early_stopping": "none"}
    heard.clear()
    fusion(tiny, changes, replace(tiny.resources, augment=blacken))(tiny.server, trained(tiny), 1)
    assert len(heard) == 2 * 12  # two students, twelve steps each
    assert all(torch.allclose(batch, batch[:1].expand_as(batch), atol=1e-6) for _, batch in heard)


@pytest.mark.parametrize("cache", [True, False])
def test_a_teacher_whose_logits_overflow_leaves_the_average_too(cache: bool) -> None:
    """Its weights pass the gate; its logits do not. The round ends as if the client had never answered."""
    tiny = make_tiny(fraction=1.0)

    def absent(job: Job) -> Reply:
        if job.id == "c1":
            raise RuntimeError("away")
        return tiny.local(job)

    def overflowing(job: Job) -> Reply:
        reply = tiny.local(job)
        if job.id != "c1":
            return reply
        huge = {key: torch.full_like(tensor, 1e4) for key, tensor in reply.state.items()}
        return replace(reply, state={**huge, "layers.5.bias": torch.zeros(3)})

    def overflow_at_once(raw: Tensor) -> Tensor:
        return raw.to(torch.float32) * 1e22

    pool = replace(tiny.pool, encode=overflow_at_once)
    fuse = fusion(tiny, {"ensemble.cache": cache}, replace(tiny.resources, pool=pool))
    closed, reference = (
        run_round(tiny.server, tiny.federation, engine=in_process, train=train, fuse=fuse)
        for train in (overflowing, absent)
    )
    assert [failure.client_id for failure in closed.failures] == ["c1"]
    assert "not finite" in closed.failures[0].reason
    assert digest(closed.server.models) == digest(reference.server.models)


def test_fusing_good_clients_gives_a_good_model() -> None:
    tiny = make_tiny(fraction=1.0)
    server = tiny.server
    fuse = fusion(tiny)
    for _ in range(6):
        server = run_round(server, tiny.federation, engine=in_process, train=tiny.local, fuse=fuse).server
    for name, prototype in tiny.prototypes.items():
        assert accuracy(prototype.load(server.models[name]), tiny.test) > 0.9


def test_the_rounds_seed_decides_how_students_learn(tiny: Tiny) -> None:
    updates, fuse = (
        trained(tiny),
        fusion(tiny, {"distill.early_stopping": "none", "distill.steps": 5, "distill.batch_size": 8}),
    )
    one, same, other = (digest(fuse(tiny.server, updates, seed).server.models) for seed in (1, 1, 2))
    assert one == same != other


def test_students_learn_from_nothing_that_is_held_out(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[set[int]] = []

    def spied(student: Any, targets: Any, pool: Any, config: DistillConfig, **options: Any) -> Any:
        learned.append(set(options["chosen_from"].tolist()))
        return distill(student, targets, pool, config, **options)

    monkeypatch.setattr("feddf.fusion.distill.distill", spied)
    fuse = fusion(tiny, {"distill.early_stopping": "held-out-loss", "distill.steps": 5})
    fuse(tiny.server, trained(tiny), 1)
    config = tiny.settings.distill.model_copy(update={"early_stopping": "held-out-loss"})
    kept, held_out = held_out_inputs(len(tiny.pool), config)
    assert len(held_out) > 0
    assert learned == [set(kept.tolist())] * len(tiny.prototypes)


def test_the_record_of_a_student_has_the_documented_keys(tiny: Tiny) -> None:
    fused = fusion(tiny, {"distill.steps": 5})(tiny.server, trained(tiny), 1)
    for record in fused.notes["distillation"].values():
        assert record.keys() == DistillationRecord.__annotations__.keys()


def test_what_travels_to_workers_does_not_hold_the_server(tiny: Tiny) -> None:
    """Over Flower the number of clients is a method of the server, which holds locks and connections."""
    sent: list[bytes] = []

    def engine(function: Any, jobs: Sequence[Any], /) -> Iterator[Any]:
        sent.append(pickle.dumps(function))
        return in_process(function, jobs)

    lock = threading.RLock()
    resources = replace(tiny.resources, n_clients=lambda name: int(lock is None))
    fused = feddf(resources, tiny.settings, engine)(tiny.server, trained(tiny), 1)
    assert len(sent) == 2, "teachers and students"
    assert fused.server.round == 1
