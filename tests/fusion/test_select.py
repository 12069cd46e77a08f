from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from conftest import Tiny, stripes, update_of
from feddf.config import with_values
from feddf.engines import in_process
from feddf.evaluate import teacher_of
from feddf.fusion.select import Dropped, drop_worst, random_guessers, released_rule, validation_accuracies
from feddf.robust.rules import assumed, lowest
from feddf.runs.methods import fedavg, make_method
from feddf.states import digest
from feddf.types import Fusion, Job, Refusal, Update


def test_the_papers_rule_drops_those_that_guess() -> None:
    found = {"guess": 0.1, "lucky": 0.115, "learned": 0.2}
    assert random_guessers(found, n_classes=10, n_examples=1000) == Dropped(frozenset({"guess", "lucky"}))
    assert random_guessers(found, n_classes=10, n_examples=100_000) == Dropped(frozenset({"guess"}))


def test_the_papers_rule_allows_two_standard_errors() -> None:
    """√(0.1 · 0.9 / 100) is 0.03."""
    found = {"at chance": 0.159, "above": 0.161}
    assert random_guessers(found, n_classes=10, n_examples=100).clients == {"at chance"}


@pytest.mark.parametrize("clients", [3, 5, 10, 20])
def test_the_filter_against_hostile_clients_drops_the_lowest(clients: int) -> None:
    accuracies = {f"c{number}": number / 100 for number in reversed(range(clients))}
    found = lowest(accuracies, 10, 100).clients
    assert found == {f"c{number}" for number in range(assumed(clients))}


def test_the_released_rule_keeps_who_is_exactly_at_its_cut() -> None:
    assert released_rule({"a": 1.2 / 10, "b": 0.13, "c": 0.6}, 10, 1000).clients == frozenset()


def test_the_released_rule_falls_back_on_the_spread() -> None:
    assert released_rule({"a": 0.11, "b": 0.13, "c": 0.6}, 10, 1000) == Dropped(frozenset({"a"}))
    low = released_rule({**{str(i): 0.6 for i in range(9)}, "low": 0.3}, 10, 1000)
    assert low == Dropped(frozenset(), frozenset({"low"}))
    assert released_rule({"a": 0.5, "b": 0.5}, 10, 1000) == Dropped(frozenset())


def updates_of(tiny: Tiny, broken: set[str]) -> list[Update]:
    """Some clients always say the same class."""
    found = []
    for client in tiny.federation.clients:
        update = update_of(tiny.local(Job(client, 1, tiny.server.models[client.prototype], 7)))
        if client.id in broken:
            constant = {key: torch.zeros_like(tensor) for key, tensor in update.state.items()}
            update = Update(client.id, client.prototype, 1, constant, update.n_examples)
        found.append(update)
    return found


@pytest.fixture
def fuse(tiny: Tiny) -> Fusion:
    resources = replace(tiny.resources, validation=stripes(300, 8))
    accuracies = validation_accuracies(resources, in_process)

    def measure(updates: Sequence[Update]) -> Mapping[str, float]:
        return accuracies([teacher_of(update, tiny.prototypes) for update in updates])

    inner = fedavg(resources, tiny.settings, in_process)
    return drop_worst(random_guessers, measure, resources.labeled, inner)


def test_those_that_learned_nothing_take_no_part(tiny: Tiny, fuse: Fusion) -> None:
    updates = updates_of(tiny, broken={"c1", "c2"})
    fused = fuse(tiny.server, updates, 1)
    dropped = set(fused.notes["dropped_worst"]["clients"])
    assert {"c1", "c2"} <= dropped
    assert fused.notes["dropped_worst"]["kept_as_the_best"] is None
    left = [update for update in updates if update.client_id not in dropped]
    rest = fedavg(tiny.resources, tiny.settings, in_process)(tiny.server, left, 1)
    assert digest(fused.server.models) == digest(rest.server.models)


def test_a_rule_is_used_by_its_name_as_it_is_directly(tiny: Tiny, fuse: Fusion) -> None:
    updates = updates_of(tiny, broken={"c1", "c2"})
    resources = replace(tiny.resources, validation=stripes(300, 8))
    settings = with_values(tiny.settings, {"fusion.method": "fedavg", "fusion.drop_worst": "paper"})
    directly = fuse(tiny.server, updates, 1)
    by_name = make_method(resources, settings, in_process).fuse(tiny.server, updates, 1)
    assert by_name.notes["dropped_worst"] == directly.notes["dropped_worst"]
    assert digest(by_name.server.models) == digest(directly.server.models)


def test_a_client_whose_model_cannot_be_asked_is_refused(tiny: Tiny, fuse: Fusion) -> None:
    updates = updates_of(tiny, broken=set())
    updates[2] = Update("c2", "cnn", 1, {"nothing": torch.ones(1)}, 20)
    with pytest.raises(Refusal, match="c2: its model could not be asked"):
        fuse(tiny.server, updates, 1)


def test_when_all_would_go_the_best_stays_and_the_record_says_so(tiny: Tiny, fuse: Fusion) -> None:
    updates = updates_of(tiny, broken={client.id for client in tiny.federation.clients})
    note = fuse(tiny.server, updates, 1).notes["dropped_worst"]
    assert note["kept_as_the_best"] == "c0"
    assert len(note["clients"]) == 5
