"""Bounds on BatchNorm's running statistics from the cohort, and robust rules that do not look at them for distances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from feddf.config.names import AVERAGES
from feddf.robust import rules
from feddf.robust.statistics import MOST_MEAN, bounded_statistics
from feddf.types import Fused, ServerState, State, Update

CHANNELS = 16


def state(seed: int, *, weight: float = 0.0) -> State:
    """A layer with a weight and statistics; those of different clients are close together."""
    random = np.random.default_rng(seed)
    deviation = np.linspace(0.5, 2.0, CHANNELS)
    return {
        "w": torch.full((4,), weight),
        "bn.running_mean": torch.from_numpy(deviation * (3 + 0.1 * random.normal(size=CHANNELS))).float(),
        "bn.running_var": torch.from_numpy(deviation**2 * np.exp(0.1 * random.normal(size=CHANNELS))).float(),
        "bn.num_batches_tracked": torch.tensor(7),
    }


def updates_of(*states: State, prototype: str = "m") -> list[Update]:
    return [Update(f"{prototype}{k}", prototype, 1, one, 10) for k, one in enumerate(states)]


def fused_updates(updates: list[Update]) -> tuple[list[Update], Fused]:
    seen: list[Update] = []

    def inner(server: ServerState, updates: list[Update], seed: int) -> Fused:
        seen.extend(updates)
        return Fused(server.next({}), {})

    return seen, bounded_statistics(inner)(ServerState(0, {}), updates, 1)  # type: ignore[arg-type]


def test_honest_updates_pass_as_they_are() -> None:
    updates = updates_of(*map(state, range(6)))
    seen, fused = fused_updates(updates)
    assert all(one is other for one, other in zip(seen, updates, strict=True))
    assert not fused.notes


def usual(states: list[State], which: str) -> np.ndarray[Any, Any]:
    """The cohort's median, of variances by their logarithms."""
    rows = np.stack([one[f"bn.{which}"].double().numpy() for one in states])
    return np.median(rows, axis=0) if which == "running_mean" else np.exp(np.median(np.log(rows + 1e-5), axis=0)) - 1e-5


@pytest.mark.parametrize("shift", [0.9, 5.0, 1e4])
def test_shifted_means_become_the_cohorts_median(shift: float) -> None:
    forged = dict(state(9, weight=3.0))
    forged["bn.running_mean"] = forged["bn.running_mean"] + shift * forged["bn.running_var"].sqrt()
    honest = [state(k) for k in range(5)]
    seen, fused = fused_updates(updates_of(*honest, forged))
    expected = usual([*honest, forged], "running_mean")
    np.testing.assert_allclose(seen[-1].state["bn.running_mean"].numpy(), expected, rtol=1e-6)
    assert list(fused.notes["bounded_statistics"]) == ["m5"]
    assert fused.notes["bounded_statistics"]["m5"] == pytest.approx(shift / MOST_MEAN, rel=0.1)
    assert seen[-1].state["w"].tolist() == [3.0] * 4
    assert list(seen[-1].state) == list(forged)
    assert all(one.state is before for one, before in zip(seen[:-1], honest, strict=True))


@pytest.mark.parametrize(("factor", "caught"), [(3.0, False), (5.0, True), (1e-2, True), (0.0, True)])
def test_variances_are_bounded_by_their_logarithms(factor: float, caught: bool) -> None:
    honest, own = [state(k) for k in range(5)], state(9)["bn.running_var"]
    forged = {**state(9), "bn.running_var": factor * own}
    seen, _ = fused_updates(updates_of(*honest, forged))
    expected = usual([*honest, forged], "running_var") if caught else (factor * own).numpy()
    np.testing.assert_allclose(seen[-1].state["bn.running_var"].numpy(), expected, rtol=1e-5)


def test_fewer_than_four_of_a_prototype_are_left_to_the_gate() -> None:
    forged = {**state(9), "bn.running_mean": torch.full((CHANNELS,), 1e4)}
    few, many = updates_of(state(0), state(1), forged), updates_of(*map(state, range(4)), prototype="n")
    seen, fused = fused_updates([*few, *many])
    assert seen[2].state["bn.running_mean"][0] == 1e4
    assert not fused.notes


@pytest.mark.parametrize("name", sorted(set(AVERAGES) - {"examples", "uniform", "class-counts"}))
def test_robust_rules_do_not_let_weights_hide_beside_statistics(name: str) -> None:
    """Statistics move far in the first round. A client that flips its weights and keeps them is still clipped."""
    before = {**state(0), "bn.running_mean": torch.zeros(CHANNELS), "bn.running_var": torch.ones(CHANNELS)}
    random = np.random.default_rng(0)
    honest = [{**state(k), "w": torch.from_numpy(1 + 0.1 * random.normal(size=4)).float()} for k in range(7)]
    hostile = {**state(8), "w": torch.full((4,), -50.0)}
    found = AVERAGES[name](before, updates_of(*honest, hostile))
    assert float(found["w"].mean()) > 0.7
    centers = torch.stack([one["bn.running_mean"] for one in honest])
    assert bool((found["bn.running_mean"] >= centers.amin(dim=0) - 1e-3).all())
    assert bool((found["bn.running_mean"] <= centers.amax(dim=0) + 1e-3).all())


def test_norms_are_of_the_parameters() -> None:
    before = {**state(0), "w": torch.zeros(4)}
    moved = {**state(1), "w": torch.full((4,), 2.0), "bn.running_mean": torch.full((CHANNELS,), 100.0)}
    assert rules.change_norms(before, [moved]).tolist() == [4.0]
