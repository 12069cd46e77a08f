"""Client level: sums that one client moves by the sensitivity at the most, noise as planned, and nothing else seen."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import Counted
from torch import Tensor

from feddf.config.privacy import PrivacyConfig
from feddf.fusion.average import fedavg, uniform_average
from feddf.fusion.ensemble import CachedTargets, EnsembleTargets
from feddf.outputs import classes
from feddf.privacy.accountant import Mechanism, PrivacyError, epsilon_of
from feddf.privacy.clients import (
    clipped_changes,
    deal,
    noisy_answers,
    noisy_groups,
    noisy_targets,
    noisy_votes,
    on_simplex,
    split_noise,
    votes,
)
from feddf.privacy.noise import Noise
from feddf.privacy.releases import Releases
from feddf.types import Fused, ServerState, Update, WeightedLogits


def zero(n: int) -> bytes:
    """Bytes for which normal numbers are nearly 0: u is nearly 1 in all of them."""
    return b"\xff" * n


def client(k: int, *values: float, prototype: str = "m") -> Update:
    return Update(f"c{k}", prototype, 1, {"w": torch.tensor(values), "steps": torch.tensor(3)}, 1)


SERVER = ServerState(0, {"m": {"w": torch.tensor([1.0, 1.0]), "steps": torch.tensor(0)}})


def fused(updates: Sequence[Update], seen: list[Update] | None = None, **keys: object) -> Fused:
    inner = fedavg(uniform_average)

    def spy(server: ServerState, given: Sequence[Update], seed: int) -> Fused:
        if seen is not None:
            seen.extend(given)
        return inner(server, given, seed)

    config = PrivacyConfig.model_validate({"clip": 2.0, **keys})
    return noisy_groups(spy, Releases(), noise=Noise(1.0, zero), config=config)(SERVER, updates, 5)


def test_without_noise_it_is_the_average_of_clipped_changes() -> None:
    updates = [client(0, 2.0, 1.0), client(1, 1.0, 11.0), client(2, 1.0, 1.0)]  # by (1, 0), (0, 10) and nothing
    after = fused(updates).server.models["m"]
    torch.testing.assert_close(after["w"], torch.tensor([1 + 1 / 3, 1 + 2 / 3]), rtol=1e-5, atol=1e-5)
    assert int(after["steps"]) == 0


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=2, max_size=6), st.floats(0.1, 50))
def test_a_client_moves_the_sum_by_the_clip_at_the_most(values: list[list[float]], clip: float) -> None:
    updates = [client(k, *value) for k, value in enumerate(values)]
    with_it, _ = clipped_changes(SERVER.models["m"], updates, clip)
    without, _ = clipped_changes(SERVER.models["m"], updates[1:], clip)
    assert float((with_it["w"] - without["w"]).norm()) <= clip * (1 + 1e-9)


def test_the_noise_on_weights_has_the_planned_deviation() -> None:
    server = ServerState(0, {"m": {"w": torch.zeros(20_000)}})
    updates = [Update(f"c{k}", "m", 1, {"w": torch.zeros(20_000)}, 1) for k in range(5)]
    fuse = noisy_groups(
        fedavg(uniform_average), Releases(), noise=Noise(3.0, Counted()), config=PrivacyConfig(clip=0.5)
    )
    after = fuse(server, updates, 0).server.models["m"]["w"]
    assert float(after.std()) == pytest.approx(3.0 * 0.5 / 5, rel=0.03)


def test_the_method_sees_groups_and_no_client() -> None:
    seen: list[Update] = []
    updates = [client(k, float(k), 0.0) for k in range(7)]
    fused(updates, seen, groups=3, clip=100.0)
    assert [one.client_id for one in seen] == ["m group-0", "m group-1", "m group-2"]
    dealt = deal(updates, 3, 5)
    assert sorted(one.client_id for group in dealt.values() for one in group) == [f"c{k}" for k in range(7)]
    assert sorted(map(len, dealt.values())) == [2, 2, 3]
    for one in seen:
        mean = torch.stack([member.state["w"] for member in dealt[one.client_id]]).mean(dim=0)
        torch.testing.assert_close(one.state["w"], mean, rtol=1e-4, atol=1e-3)


def test_an_adaptive_clip_goes_to_the_quantile_and_costs_the_same() -> None:
    sizes = torch.linspace(0.1, 10, 60)
    server, clips = SERVER, []
    for _ in range(60):
        updates = [
            client(k, float(server.models["m"]["w"][0] + size), float(server.models["m"]["w"][1]))
            for k, size in enumerate(sizes)
        ]
        config = PrivacyConfig(clip=0.2, quantile=0.5)
        fuse = noisy_groups(fedavg(uniform_average), Releases(), noise=Noise(1.0, Counted()), config=config)
        one = fuse(server, updates, 1)
        server = one.server
        clips.append(float(one.notes["clip"]))
    assert clips[0] == pytest.approx(0.2)
    assert np.mean(clips[-15:]) == pytest.approx(5.05, rel=0.15)
    on_changes = split_noise(1.5, 4.0)
    one = epsilon_of(Mechanism(1.5), 1e-5)
    together = 1 / sqrt(on_changes**-2 + 8.0**-2)  # two Gaussian mechanisms; the second moves by 1/2
    assert epsilon_of(Mechanism(together), 1e-5) == pytest.approx(one)
    with pytest.raises(PrivacyError, match="above 15 clients"):
        split_noise(1.5, 0.5)


# Answers and votes


def ensemble_of(tables: Tensor) -> Callable[..., EnsembleTargets]:
    return lambda updates, seed, past: EnsembleTargets(CachedTargets(tables[: len(updates)].mean(dim=0)), None, {})


def answers_of(tables: Tensor, noise: float, source: Callable[[int], bytes] = os.urandom) -> Tensor:
    updates = [client(k, 0.0, 0.0) for k in range(len(tables))]
    released: list[Tensor] = []

    def draw(mean: Tensor, clients: int) -> Tensor:
        released.append(noisy_answers(mean, clients, noise=Noise(noise, source), config=PrivacyConfig()))
        return released[0]

    taught = noisy_targets(ensemble_of(tables), Releases(), draw)(updates, 0, {})
    assert taught.ensemble is None
    assert isinstance(taught.targets, CachedTargets)
    assert torch.allclose(taught.targets.probabilities.sum(dim=1), torch.ones(tables.shape[1]), atol=1e-5)
    return released[0]


def test_noise_on_answers_is_for_the_sensitivity_over_the_whole_pool() -> None:
    n, clients = 400, 8
    tables = torch.rand(clients, n, 10).softmax(dim=2)
    noisy = answers_of(tables, 2.0, Counted())
    spread = float((noisy - tables.double().mean(dim=0)).std()) * clients
    assert spread == pytest.approx(2.0 * sqrt(n), rel=0.05)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_a_client_moves_the_sum_of_answers_by_the_root_of_the_pool_at_the_most(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables = (8 * torch.randn(3, 30, 4, generator=generator)).softmax(dim=2).double()
    assert float((tables.sum(dim=0) - tables[1:].sum(dim=0)).norm()) <= sqrt(30)
    sure = torch.nn.functional.one_hot(torch.zeros(30, dtype=torch.long), 4).double()
    assert float(sure.norm()) == pytest.approx(sqrt(30))  # one that is sure everywhere reaches it


@settings(max_examples=25)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6))
def test_the_projection_is_the_nearest_point_of_the_simplex(row: list[float]) -> None:
    found = on_simplex(torch.tensor([row], dtype=torch.float64))[0].numpy()
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)
    start = np.full(len(row), 1 / len(row))
    sums_to_one = {"type": "eq", "fun": lambda p: p.sum() - 1}
    best = scipy.optimize.minimize(
        lambda p: ((p - row) ** 2).sum(), start, bounds=[(0, 1)] * len(row), constraints=[sums_to_one]
    )
    assert ((found - row) ** 2).sum() <= best.fun + 1e-6


def voted(counts: Tensor, clients: int, source: Callable[[int], bytes], **keys: float) -> Tensor:
    updates = [client(k, 0.0, 0.0) for k in range(clients)]
    noise = Noise(keys.pop("noise", 1.0), source)
    config = PrivacyConfig.model_validate({"threshold": 0.6, "answered": 5, **keys})
    inner = lambda updates, seed, past: EnsembleTargets(CachedTargets(counts / clients), None, {})  # noqa: E731
    taught = noisy_targets(inner, Releases(), partial(noisy_votes, noise=noise, config=config))(updates, 0, {})
    assert isinstance(taught.targets, CachedTargets)
    return taught.targets.probabilities


def test_only_clear_majorities_are_answered_and_no_more_than_planned() -> None:
    counts = torch.tensor([[9.0, 1, 0], [4, 3, 3], [0, 0, 10], [5, 5, 0]])
    found = voted(counts, 10, zero)
    assert found.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert voted(counts, 10, zero, answered=1).sum() == 1
    student = torch.randn(4, 3, requires_grad=True)
    classes(3).distance(found, student, 1.0).backward()
    assert not student.grad[[1, 3]].any()  # nothing is learned from an input without an answer
    assert student.grad[[0, 2]].any()


def test_noise_on_votes_costs_what_the_plan_says() -> None:
    n, most, clients, noise = 3000, 1500, 1000, 0.5
    counts = torch.zeros(n, 2)
    counts[:, 0] = clients * 0.6  # at the threshold: half of the noisy tests pass
    counts[:, 1] = clients * 0.4
    labels = voted(counts, clients, Counted(), noise=noise, answered=most)
    assert int(labels.sum()) == pytest.approx(n / 2, rel=0.08)
    wrong = float(labels[:, 1].sum() / labels.sum())
    gap = clients * 0.2 / (noise * sqrt(2 * most) * sqrt(2))  # the difference of two noisy counts
    assert wrong == pytest.approx(scipy.stats.norm.cdf(-gap), abs=0.03)
    tests, answers = n / (noise * sqrt(2 * n)) ** 2, most / (noise * sqrt(2 * most)) ** 2
    assert tests + answers == pytest.approx(noise**-2)  # of one Gaussian mechanism


def test_votes_are_counted() -> None:
    logits = torch.tensor([[[3.0, 1.0]], [[0.0, 1.0]], [[5.0, 1.0]]])
    found = votes((WeightedLogits(one) for one in logits), 1.0, classes(2))
    torch.testing.assert_close(found, torch.tensor([[2 / 3, 1 / 3]]))
