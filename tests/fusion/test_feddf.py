from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import Tiny, make_tiny
from feddf.engines import in_process
from feddf.evaluate import accuracy, logits
from feddf.fusion import FUSIONS, Schedule, feddf
from feddf.fusion.distill import kl_divergence
from feddf.fusion.ensemble import avg_logits
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
