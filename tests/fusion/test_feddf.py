from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from conftest import Tiny, make_tiny
from feddf.engines import in_process
from feddf.evaluate import accuracy, logits
from feddf.fusion import FUSIONS, Schedule, feddf
from feddf.fusion.distill import kl_divergence
from feddf.fusion.ensemble import avg_logits
from feddf.fusion.feddf import _held_out
from feddf.fusion.swag import swag
from feddf.rounds import play
from feddf.states import digest
from feddf.types import Job, Update


def trained(tiny: Tiny, only: str | None = None) -> list[Update]:
    clients = [client for client in tiny.federation.clients if only in (None, client.prototype)]
    return [tiny.local(Job(c, 1, tiny.server.models[c.prototype], 7)) for c in clients]


def distance(tiny: Tiny, name: str, state: Any, updates: list[Update]) -> float:
    """KL between the ensemble and a model on the pool."""
    teachers = (logits(tiny.prototypes[u.prototype].load(u.state), tiny.pool) for u in updates)
    return float(kl_divergence(avg_logits(teachers), logits(tiny.prototypes[name].load(state), tiny.pool)))


def test_a_prototype_without_clients_learns_from_the_others(tiny: Tiny) -> None:
    updates = trained(tiny, only="mlp")
    schedule = Schedule(steps=200, batch=16, rate=1e-2)
    fused = feddf(tiny.prototypes, tiny.pool, engine=in_process, score=None, schedule=schedule)(tiny.server, updates, 1)
    before = distance(tiny, "cnn", tiny.server.models["cnn"], updates)
    assert distance(tiny, "cnn", fused.server.models["cnn"], updates) < 0.5 * before


def test_students_come_closer_to_the_ensemble_of_all_architectures(tiny: Tiny) -> None:
    updates = trained(tiny)
    schedule = Schedule(steps=300, batch=16, rate=1e-2)
    fused = feddf(tiny.prototypes, tiny.pool, engine=in_process, score=None, schedule=schedule)(tiny.server, updates, 1)
    for name in tiny.prototypes:
        start = distance(tiny, name, fused.start[name], updates)
        assert distance(tiny, name, fused.server.models[name], updates) < start


def test_with_one_prototype_it_is_algorithm_1(tiny: Tiny) -> None:
    """The other prototype's presence on the server changes nothing for the first."""
    updates = trained(tiny, only="mlp")
    both = FUSIONS["feddf"](tiny.kit)(tiny.server, updates, 1)
    alone = replace(tiny.kit, prototypes={"mlp": tiny.prototypes["mlp"]})
    server = replace(tiny.server, models={"mlp": tiny.server.models["mlp"]})
    one = FUSIONS["feddf"](alone)(server, updates, 1)
    assert digest({"mlp": both.server.models["mlp"]}) == digest(one.server.models)


def test_online_and_cached_distillation_end_close_together(tiny: Tiny) -> None:
    updates = trained(tiny)
    kit = replace(tiny.kit, score=None)
    cached, online = (
        FUSIONS["feddf"](replace(kit, mode=mode))(tiny.server, updates, 1).server.models
        for mode in ("cached", "online")
    )
    for name in tiny.prototypes:
        for key in cached[name]:
            torch.testing.assert_close(cached[name][key], online[name][key], atol=1e-4, rtol=1e-4)


def test_is_never_worse_on_validation_than_the_average(tiny: Tiny) -> None:
    updates = trained(tiny)
    fused = FUSIONS["feddf"](replace(tiny.kit, schedule=Schedule(steps=30, rate=1.0, check_every=10)))
    result = fused(tiny.server, updates, 1)
    for name, prototype in tiny.prototypes.items():
        assert tiny.kit.score is not None
        assert tiny.kit.score(prototype.load(result.server.models[name])) >= tiny.kit.score(
            prototype.load(result.start[name])
        )


def test_its_notes_say_what_each_student_did(tiny: Tiny) -> None:
    notes = FUSIONS["feddf"](tiny.kit)(tiny.server, trained(tiny), 1).notes
    assert notes["distillation"].keys() == {"cnn", "mlp"}
    assert notes["distillation"]["mlp"]["steps"] == 12
    assert notes["seconds"].keys() == {"ask", "distill"}


def test_a_student_may_start_from_the_average_from_before_or_from_the_better(tiny: Tiny) -> None:
    """With a rate of almost zero, what comes out is where it started."""
    updates = trained(tiny)
    schedule = Schedule(steps=1, rate=1e-30, batch=16)

    def prefers_previous(model: torch.nn.Module) -> float:
        previous = tiny.server.models["mlp"]
        same = [key for key in model.state_dict() if key in previous and key.endswith("weight")]
        return float(bool(same) and all(torch.equal(model.state_dict()[key], previous[key]) for key in same))

    def weights(start: str, score: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        kit = replace(tiny.kit, schedule=schedule, start=start, score=score)
        fused = FUSIONS["feddf"](kit)(tiny.server, updates, 1)
        return fused.server.models["mlp"], fused.start["mlp"]

    from_average, averaged = weights("average", None)
    from_previous, _ = weights("previous", None)
    best, _ = weights("best", prefers_previous)
    other_best, _ = weights("best", lambda model: 1 - prefers_previous(model))
    key = "layers.1.weight"
    assert torch.equal(from_average[key], averaged[key])
    assert torch.equal(from_previous[key], tiny.server.models["mlp"][key])
    assert torch.equal(best[key], tiny.server.models["mlp"][key])
    assert torch.equal(other_best[key], averaged[key])


def test_the_held_out_part_of_the_pool_stops_the_distillation_without_labels(tiny: Tiny) -> None:
    def never(model: torch.nn.Module) -> float:
        raise AssertionError("labels were asked for")

    kit = replace(tiny.kit, score=never, held_out=0.25, schedule=replace(tiny.kit.schedule, steps=60, rate=1e-2))
    fused = FUSIONS["feddf"](kit)(tiny.server, trained(tiny), 1)
    for student in fused.notes["distillation"].values():
        assert student["score_before"] < student["score_after"] < 0  # minus a divergence


@pytest.mark.parametrize(("n", "share", "expected"), [(100, 0.1, 10), (4, 0.1, 1), (4, 0.9, 2), (50, 0.0, 0)])
def test_something_is_held_out_and_something_is_left(n: int, share: float, expected: int) -> None:
    kept, apart = _held_out(n, share)
    assert (len(kept), len(apart)) == (n - expected, expected)
    assert sorted([*kept.tolist(), *apart.tolist()]) == list(range(n))


def test_sampled_teachers_join_the_clients(tiny: Tiny) -> None:
    updates = trained(tiny)
    asked: list[str] = []

    def counting(votes: Any) -> torch.Tensor:
        votes = list(votes)
        asked.append(str(len(votes)))
        return avg_logits(vote.logits for vote in votes)

    kit = replace(tiny.kit, target=counting, more_teachers=partial(swag, samples=4))
    FUSIONS["feddf"](kit)(tiny.server, updates, 1)
    assert asked == [str(len(updates) + 2 * 4)]  # four of each prototype


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"start": "best", "score": None}, "needs a score"),
        ({"augment": lambda raw, generator: raw}, "needs mode = 'online'"),
        ({"mode": "online", "more_teachers": partial(swag, samples=2)}, "need mode = 'cached'"),
    ],
)
def test_what_does_not_fit_together_is_refused(tiny: Tiny, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        FUSIONS["feddf"](replace(tiny.kit, **changes))


def test_online_the_pool_may_be_augmented_and_teachers_see_what_the_student_sees(tiny: Tiny) -> None:
    black = torch.zeros_like(tiny.pool.raw[:1])

    def blacken(raw: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return black.expand(len(raw), *black.shape[1:]).clone()

    updates = trained(tiny)
    seen: list[torch.Tensor] = []

    def target(votes: Any) -> torch.Tensor:
        seen.append(avg_logits(vote.logits for vote in votes))
        return seen[-1]

    kit = replace(tiny.kit, mode="online", augment=blacken, target=target, score=None)
    FUSIONS["feddf"](kit)(tiny.server, updates, 1)
    assert all(torch.allclose(batch, batch[:1].expand_as(batch), atol=1e-6) for batch in seen[1:])


@pytest.mark.parametrize("mode", ["cached", "online"])
def test_a_teacher_whose_logits_overflow_leaves_the_average_too(mode: str) -> None:
    """Its weights pass the gate; its logits do not. The round ends as if the client had never answered."""
    tiny = make_tiny(fraction=1.0)

    def absent(job: Job) -> Update:
        if job.id == "c1":
            raise RuntimeError("away")
        return tiny.local(job)

    def overflowing(job: Job) -> Update:
        update = tiny.local(job)
        if job.id != "c1":
            return update
        huge = {key: torch.full_like(tensor, 1e4) for key, tensor in update.state.items()}
        return replace(update, state={**huge, "layers.5.bias": torch.zeros(3)})

    def overflow_at_once(raw: torch.Tensor) -> torch.Tensor:
        return raw.to(torch.float32) * 1e22

    pool = replace(tiny.pool, encode=overflow_at_once)
    fuse = FUSIONS["feddf"](replace(tiny.kit, pool=pool, mode=mode))
    closed, reference = (
        play(tiny.server, tiny.federation, engine=in_process, train=train, fuse=fuse) for train in (overflowing, absent)
    )
    assert [failure.client_id for failure in closed.failures] == ["c1"]
    assert "not finite" in closed.failures[0].reason
    assert digest(closed.server.models) == digest(reference.server.models)


def test_fusing_good_clients_gives_a_good_model() -> None:
    tiny = make_tiny(fraction=1.0)
    server = tiny.server
    fuse = FUSIONS["feddf"](tiny.kit)
    for _ in range(6):
        server = play(server, tiny.federation, engine=in_process, train=tiny.local, fuse=fuse).server
    for name, prototype in tiny.prototypes.items():
        assert accuracy(prototype.load(server.models[name]), tiny.test) > 0.9
