from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import Tiny, make_tiny, update_of
from feddf.config import with_values
from feddf.config.names import TARGETS
from feddf.engines import in_process
from feddf.fusion.select import Dropped
from feddf.fusion.weights import CLASS_COUNTS, counts_of
from feddf.robust import trust as targets
from feddf.robust.defense import bounded_counts, check_models, guard
from feddf.robust.rules import lowest
from feddf.robust.trust import TRUST, expguard, mixture, weigh_by_trust
from feddf.runs.methods import make_method
from feddf.runs.store import pack, unpack
from feddf.states import digest
from feddf.types import Fused, Job, Refusal, ServerState, State, Update, WeightedLogits


def honest(n: int = 8, inputs: int = 40, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Logits of teachers that are right, less or more sure, and the classes."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(inputs) % classes
    right = 3 * torch.nn.functional.one_hot(labels, classes).double()
    return right + 0.7 * torch.randn(n, inputs, classes, generator=generator, dtype=torch.float64), labels


ROBUST = ["geometric-median", "cronus", "probabilities"]


@pytest.mark.parametrize("name", ROBUST)
def test_two_of_eight_loud_liars_are_outvoted(name: str) -> None:
    logits, labels = honest()
    logits[:2] = 1000 * logits[:2].roll(1, dims=-1)
    said = TARGETS[name](WeightedLogits(one) for one in logits)
    assert (said.argmax(dim=1) == labels).double().mean() > 0.95
    assert (TARGETS["logits"](WeightedLogits(one) for one in logits).argmax(dim=1) == labels).double().mean() < 0.1
    torch.testing.assert_close(said.sum(dim=1), torch.ones(len(labels)))


@pytest.mark.parametrize("name", ROBUST)
def test_one_teacher_is_its_own_ensemble(name: str) -> None:
    logits, _ = honest(1)
    expected = (logits[0] / 2).softmax(dim=-1).float()
    torch.testing.assert_close(TARGETS[name]([WeightedLogits(logits[0])], 2.0), expected)
    with pytest.raises(ValueError, match="at least one teacher"):
        TARGETS[name]([])


def test_cronus_is_a_mean_without_the_farthest() -> None:
    """With two classes all answers lie on a line, where the farthest from the mean is plain to see."""
    logits, _ = honest(5, inputs=6, classes=2)
    probabilities = logits.softmax(dim=-1).numpy()
    for column in range(6):
        left = list(probabilities[:, column])
        for _ in range(2):
            mean = np.mean(left, axis=0)
            left.pop(int(np.argmax([abs(one[0] - mean[0]) for one in left])))
        said = targets.cronus(WeightedLogits(one) for one in logits)[column]
        np.testing.assert_allclose(said.numpy(), np.mean(left, axis=0), rtol=1e-5)


def test_the_geometric_median_heeds_weights_of_every_kind() -> None:
    logits, _ = honest(3, 4, 3)
    for weight in (2.0, torch.full((4, 1), 2.0), torch.full((3,), 2.0)):
        same = targets.geometric_median(WeightedLogits(one, weight) for one in logits)
        torch.testing.assert_close(same, targets.geometric_median(WeightedLogits(one) for one in logits))
    alone = targets.geometric_median([WeightedLogits(logits[0]), WeightedLogits(logits[1], 0.0)])
    torch.testing.assert_close(alone, logits[0].softmax(dim=-1).float())


def test_mixture_weights_are_at_the_maximum() -> None:
    logits, labels = honest(4)
    logits[3] = logits[3].roll(1, dims=-1)
    probabilities = logits.softmax(dim=-1)
    found = targets.mixture_weights(probabilities, labels, steps=3000)
    assert found[3] < 0.05 < found[:3].min()
    n = len(labels)

    def value(weights: Tensor) -> float:
        likely = probabilities[:, torch.arange(n), labels]
        return float((weights @ likely).log().sum() + 0.1 * n / 4 * weights.log().sum())

    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        near = (found + 0.01 * torch.rand(4, generator=generator)).clamp_min(1e-9)
        assert value(found) >= value(near / near.sum()) - 1e-9


def updates_of(tiny: Tiny, broken: set[str] = frozenset()) -> list[Update]:  # type: ignore[assignment]
    jobs = [Job(client, 1, tiny.server.models[client.prototype], 7) for client in tiny.federation.clients]
    found = [update_of(tiny.local(job)) for job in jobs]
    return [replace(one, state=backwards(one.state)) if one.client_id in broken else one for one in found]


def backwards(state: State) -> State:
    """Return the model with its last layer turned around."""
    name = [key for key in state if key.endswith("weight")][-1]
    bias = name.replace("weight", "bias")
    return {**state, name: -20 * state[name], bias: -20 * state[bias]}


@pytest.fixture(scope="module")
def trained() -> Tiny:
    """Clients that have learned something, with labeled data at the server."""
    tiny = make_tiny()
    members = [replace(one, indices=torch.arange(20 * k, 20 * k + 20)) for k, one in enumerate(tiny.federation.clients)]
    states = dict(tiny.server.models)
    for number in range(10):
        for client in members:
            states[client.prototype] = tiny.local(Job(client, number, states[client.prototype], number)).state
    federation = replace(tiny.federation, clients=members)
    return replace(tiny, server=ServerState(0, states), federation=federation)


@pytest.mark.parametrize("rule", [mixture, expguard])
def test_trust_leaves_the_hostile_and_is_remembered(trained: Tiny, rule: object) -> None:
    seen: dict[str, float] = {}

    def inner(server: ServerState, updates: list[Update], seed: int) -> Fused:
        seen.update({update.client_id: update.trust for update in updates})
        return Fused(server.next(server.models), server.models)

    fuse = weigh_by_trust(rule(trained.resources, in_process), inner)  # type: ignore[operator,arg-type]
    updates = updates_of(trained, {"c1"})
    fused = fuse(trained.server, updates, 1)
    assert min(seen, key=lambda name: seen[name]) == "c1"
    assert max(seen.values()) == 1.0
    assert set(fused.notes["trust"]) == {update.client_id for update in updates}
    kept = unpack(pack(fused.server))  # as a checkpoint keeps it
    assert float(kept.memory[TRUST]["clients"]["c1"]) == seen["c1"]
    before = seen["c1"]
    fuse(kept, updates, 2)
    assert seen["c1"] < before if rule is expguard else seen["c1"] == before


def test_trust_that_was_lost_for_hundreds_of_rounds_leaves_an_ensemble(trained: Tiny) -> None:
    rule = expguard(trained.resources, in_process)  # type: ignore[arg-type]
    updates = updates_of(trained, {"c1"})
    trust = rule(updates, {update.client_id: 1e-323 if update.client_id == "c1" else 1.0 for update in updates})
    assert 0 < trust["c1"] < 1e-5
    for least in (trust["c1"], 0.0):
        alone = [update for update in updates if update.client_id == "c1"]
        assert rule(alone, {"c1": least}) == {"c1": 1.0}  # a round of nobody else has to make do with it


def test_non_finite_logits_are_refused_under_every_method(tiny: Tiny) -> None:
    settings = with_values(tiny.settings, {"fusion.method": "fedavg"})
    fuse = make_method(tiny.resources, settings, in_process).fuse
    updates = updates_of(tiny)
    huge = {key: torch.full_like(tensor, 1e38) for key, tensor in updates[1].state.items()}
    updates[1] = replace(updates[1], state=huge)
    with pytest.raises(Refusal, match="c1: its model's logits are not finite"):
        fuse(tiny.server, updates, 1)


def test_a_fused_model_that_overflows_is_not_kept(tiny: Tiny) -> None:
    def inner(server: ServerState, updates: list[Update], seed: int) -> Fused:
        broken = {key: torch.full_like(tensor, 1e38) for key, tensor in server.models["mlp"].items()}
        return Fused(server.next({**server.models, "mlp": broken}), server.models)

    fused = check_models(inner, tiny.resources, in_process)(tiny.server, updates_of(tiny), 1)  # type: ignore[arg-type]
    assert fused.notes["guard"]["kept_previous"] == ["mlp"]
    assert digest(fused.server.models) == digest(tiny.server.models)


@pytest.mark.parametrize("labeled", [True, False])
def test_a_worse_model_is_fused_again_or_not_kept(trained: Tiny, labeled: bool) -> None:
    resources = trained.resources if labeled else replace(trained.resources, validation=None)

    def bad(server: ServerState, updates: list[Update], seed: int) -> Fused:
        return Fused(server.next({name: backwards(state) for name, state in server.models.items()}), server.models)

    def good(server: ServerState, updates: list[Update], seed: int) -> Fused:
        return Fused(server.next(server.models), server.models, {"again": True})

    updates = updates_of(trained)
    abandoned = guard(0.05, bad, resources, in_process)(trained.server, updates, 1)  # type: ignore[arg-type]
    assert digest(abandoned.server.models) == digest(trained.server.models)
    assert abandoned.server.round == 1
    assert set(abandoned.notes["guard"]["kept_previous"]) == {"cnn", "mlp"}
    again = guard(0.05, bad, resources, in_process, lambda: good)(trained.server, updates, 1)  # type: ignore[arg-type,return-value]
    assert again.notes["again"]
    assert again.notes["guard"]["kept_previous"] == []
    fine = guard(0.05, good, resources, in_process)(trained.server, updates, 1)  # type: ignore[arg-type]
    assert "guard" not in fine.notes


def test_a_claimed_count_is_bounded_by_the_cohort() -> None:
    counts: list[tuple[int, list[float]]] = []

    def inner(server: ServerState, updates: list[Update], seed: int) -> Fused:
        counts.extend((update.n_examples, counts_of(update, 2).tolist()) for update in updates)
        return Fused(server.next({}), {})

    updates = [Update(f"c{k}", "m", 1, {}, n) for k, n in enumerate([10, 12, 9])]
    told = {CLASS_COUNTS: {"counts": torch.tensor([75 * 10**7, 25 * 10**7])}}
    greedy = Update("greedy", "m", 1, {}, 10**9, {}, told)
    fused = bounded_counts(inner)(ServerState(0, {}), [*updates, greedy], 1)  # type: ignore[arg-type]
    assert [n for n, _ in counts] == [10, 12, 9, 100]
    assert counts[-1][1] == pytest.approx([75, 25])  # class counts shrink in proportion
    assert fused.notes["bounded_counts"] == {"most": 100, "claimed": {"greedy": 10**9}}


def test_the_count_of_a_class_is_bounded_by_those_who_claim_it() -> None:
    """A client may have all of a rare class, but not say that it has a hundred times as many as others have."""
    claimed = [(5, 1, 4), (3, 2, 5), (7, 0, 3), (0, 1000, 0)]
    updates = [
        Update(f"c{k}", "m", 1, {}, sum(row), {}, {CLASS_COUNTS: {"counts": torch.tensor(row)}})
        for k, row in enumerate(claimed)
    ]
    found: list[list[float]] = []

    def inner(server: ServerState, updates: list[Update], seed: int) -> Fused:
        found.extend(counts_of(update, 3).tolist() for update in updates)
        return Fused(server.next({}), {})

    bounded_counts(inner)(ServerState(0, {}), updates, 1)  # type: ignore[arg-type]
    assert found == [[5, 1, 4], [3, 2, 5], [7, 0, 3], [0, 20, 0]]  # the median of 1, 2 and 1,000 is 2


def test_the_validation_filter_drops_as_many_as_are_reckoned_with() -> None:
    accuracies = {f"c{k}": k / 10 for k in range(8)}
    assert lowest(accuracies, 10, 100) == Dropped(frozenset({"c0", "c1"}))
