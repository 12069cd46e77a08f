"""What ``fusion.defense = "robust"`` chooses, and from what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import Tiny, make_tiny, update_of
from feddf.config import with_values
from feddf.engines import in_process
from feddf.fusion.average import average
from feddf.robust import defense
from feddf.robust import rules as robust
from feddf.runs.methods import make_method, robust_settings
from feddf.states import digest
from feddf.types import Job, ServerState, State, Update


@pytest.fixture(scope="module")
def trained() -> tuple[Tiny, list[Update]]:
    """Six clients that have learned all classes for a while, and what they send next."""
    tiny = make_tiny()
    members = [replace(one, indices=torch.arange(20 * k, 20 * k + 20)) for k, one in enumerate(tiny.federation.clients)]
    states = dict(tiny.server.models)
    for number in range(10):
        for client in members:
            states[client.prototype] = tiny.local(Job(client, number, states[client.prototype], number)).state
    updates = [update_of(tiny.local(Job(client, 1, states[client.prototype], 7))) for client in members]
    return replace(tiny, server=ServerState(0, states)), updates


def mlps(updates: list[Update]) -> list[Update]:
    return [update for update in updates if update.prototype == "mlp"]


def same(a: State, b: State) -> bool:
    return digest({"": a}) == digest({"": b})


def test_without_an_attack_the_start_is_the_plain_average(trained: tuple[Tiny, list[Update]]) -> None:
    tiny, updates = trained
    previous, mine = tiny.server.models["mlp"], mlps(updates)
    assert same(defense.robust_start(average, tiny.resources)(previous, mine), average(previous, mine))


def test_a_start_that_is_too_far_away_is_no_candidate(trained: tuple[Tiny, list[Update]]) -> None:
    """A last layer times 1,000 is as accurate as before: accuracy alone would let it pass."""
    tiny, updates = trained
    previous, mine = tiny.server.models["mlp"], mlps(updates)
    loud = {key: tensor * 1000 if key.startswith("layers.5") else tensor for key, tensor in mine[0].state.items()}
    attacked = [replace(mine[0], state=loud, trust=0.0), *mine[1:]]
    start = defense.robust_start(average, tiny.resources)(previous, attacked)
    norms = robust.change_norms(previous, [start, *(update.state for update in mine[1:]), average(previous, attacked)])
    assert norms[0] <= norms[1:3].max() * 1.001
    assert norms[3] > 10 * norms[0]


def test_those_trusted_least_are_left_out_and_nobody_else(trained: tuple[Tiny, list[Update]]) -> None:
    tiny, updates = trained
    previous = tiny.server.models["mlp"]
    mine = [replace(one, trust=trust) for one, trust in zip(mlps(updates), (0.1, 1.0, 0.4), strict=True)]
    found = defense.without_least_trusted(average)(previous, mine)
    assert same(found, average(previous, mine[1:]))  # f is one of three
    believed = [replace(one, trust=0.9) for one in mine]
    assert same(defense.without_least_trusted(average)(previous, believed), average(previous, believed))


@pytest.mark.parametrize(
    ("labeled", "pooled", "expected"),
    [(True, True, ("mixture", 0.05)), (False, True, ("expguard", 0.05)), (False, False, ("none", None))],
)
def test_the_parts_follow_from_what_the_server_has(
    tiny: Tiny, labeled: bool, pooled: bool, expected: tuple[str, float | None]
) -> None:
    settings = with_values(tiny.settings, {"fusion.method": "fedavg", "fusion.defense": "robust"})
    resources = replace(
        tiny.resources,
        validation=tiny.resources.validation if labeled else None,
        pool=tiny.resources.pool if pooled else None,
    )
    found = robust_settings(settings, resources)
    assert (found.fusion.trust, found.fusion.guard) == expected
    assert found.ensemble.combine == "probabilities"
    chosen = with_values(settings, {"ensemble.combine": "cronus", "fusion.guard": 0.5})
    kept = robust_settings(chosen, tiny.resources)
    assert (kept.ensemble.combine, kept.fusion.guard) == ("cronus", 0.5)  # the user's own choice stays
    jobs = [Job(one, 1, tiny.server.models[one.prototype], 7) for one in tiny.federation.clients]
    updates = [update_of(tiny.local(job)) for job in jobs]
    fused = make_method(resources, settings, in_process).fuse(tiny.server, updates, 1)
    assert fused.server.round == 1


def test_validation_data_without_examples_are_none(tiny: Tiny) -> None:
    settings = with_values(tiny.settings, {"fusion.method": "fedavg", "fusion.defense": "robust"})
    empty = replace(tiny.resources, validation=tiny.resources.labeled.take(torch.arange(0)))
    assert robust_settings(settings, empty).fusion.trust == "expguard"


def negated(state: State) -> State:
    weights = {key for key, tensor in state.items() if tensor.is_floating_point() and "running" not in key}
    return {key: -30 * tensor if key in weights else tensor for key, tensor in state.items()}


def test_the_guard_falls_back_on_the_robust_rules(trained: tuple[Tiny, list[Update]]) -> None:
    """Without a defense, but with a guard: a poisoned average is fused again."""
    tiny, updates = trained
    poisoned = [replace(one, state=negated(one.state)) if one.client_id in ("c0", "c1") else one for one in updates]
    settings = with_values(tiny.settings, {"fusion.method": "fedavg", "fusion.guard": 0.05})
    fused = make_method(tiny.resources, settings, in_process).fuse(tiny.server, poisoned, 1)
    note = fused.notes["guard"]
    again = {name: note["fused_again"][name] for name in note["before"] if name not in note["kept_previous"]}
    assert all(again[name] >= note["before"][name] - 0.05 for name in again)
    assert any(note["fused"][name] < note["before"][name] - 0.05 for name in note["before"])
