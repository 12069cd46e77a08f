"""The robust rules against ByzFL, against a few lines of NumPy, and for what they promise."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from feddf.config.names import AVERAGES
from feddf.fusion.average import average
from feddf.robust import rules as robust
from feddf.types import State, Update


def byzfl() -> Any:
    """ByzFL's rules; its package as a whole would want torchvision."""
    if "byzfl.aggregators" not in sys.modules:
        found = find_spec("byzfl")
        if found is None:
            pytest.skip("byzfl is not installed")
        package = ModuleType("byzfl")
        package.__path__ = list(found.submodule_search_locations or [])
        sys.modules["byzfl"] = package
    import byzfl.aggregators as rules

    return rules


def vectors(n: int, dimension: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(n, dimension))


def updates_of(rows: np.ndarray[Any, Any], counts: list[int] | None = None) -> list[Update]:
    """Each row as a model of two tensors and a counter; float64, so that nothing is rounded."""
    return [
        Update(f"c{k:02d}", "m", 1, state_of(row), (counts or [10] * len(rows))[k])
        for k, row in enumerate(torch.from_numpy(rows))
    ]


def state_of(row: torch.Tensor, steps: int = 3) -> State:
    return {"a": row[:2].clone(), "b": row[2:].reshape(1, -1).clone(), "steps": torch.tensor(steps)}


def flat(state: State) -> np.ndarray[Any, Any]:
    return torch.cat([state["a"], state["b"].flatten()]).numpy()


ZERO = state_of(torch.zeros(7, dtype=torch.float64), steps=0)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("median", lambda rules, f: rules.Median()),
        ("trimmed-mean", lambda rules, f: rules.TrMean(f)),
        ("krum", lambda rules, f: rules.Krum(f)),
    ],
)
@pytest.mark.parametrize("n", [5, 9, 20])
def test_rules_agree_with_byzfl(name: str, make: Any, n: int) -> None:
    rows = vectors(n, 7, n)
    if name == "median" and n % 2 == 0:
        n, rows = n - 1, rows[:-1]  # of an even number its median is the lower of the two in the middle
    expected = make(byzfl(), robust.assumed(n))(rows.copy())
    np.testing.assert_allclose(flat(AVERAGES[name](ZERO, updates_of(rows))), expected, rtol=1e-7, atol=1e-9)


def test_norm_clipping_is_what_its_formula_says() -> None:
    rows, counts = vectors(7, 7, 5) * np.arange(1, 8)[:, None], [5, 1, 4, 2, 3, 9, 7]
    norms = np.linalg.norm(rows, axis=1)
    clipped = rows * np.minimum(1, np.median(norms) / norms)[:, None]
    expected = np.average(clipped, axis=0, weights=counts)
    np.testing.assert_allclose(flat(AVERAGES["norm-clipped"](ZERO, updates_of(rows, counts))), expected, rtol=1e-12)


def test_a_claimed_number_of_examples_is_bounded() -> None:
    rows = vectors(5, 7, 6)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    greedy = flat(robust.clipped_average(ZERO, updates_of(rows, [10, 10, 10, 10, 10**9])))
    weights = np.array([10, 10, 10, 10, 100]) / 140
    np.testing.assert_allclose(greedy, weights @ rows, rtol=1e-12)


ROBUST = sorted(set(AVERAGES) - {"examples", "uniform", "class-counts"})


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("how", ["scaled", "sign", "far"])
def test_hostile_minority_cannot_carry_the_average_away(name: str, how: str) -> None:
    rows = 1 + 0.1 * vectors(12, 7, 7)
    rows[:3] = {"scaled": rows[:3] * 1000, "sign": -rows[:3], "far": rows[:3] * 0 + 9e3}[how]
    honest = rows[3:].mean(axis=0)
    off = np.linalg.norm(flat(AVERAGES[name](ZERO, updates_of(rows))) - honest)
    plain = np.linalg.norm(flat(average(ZERO, updates_of(rows))) - honest)
    bound = 1.6 if name == "norm-clipped" else 0.8
    assert off < bound < (plain if how != "sign" else 2)


@pytest.mark.parametrize("name", ROBUST)
def test_equal_updates_come_back(name: str) -> None:
    rows = np.repeat(vectors(1, 7, 8), 6, axis=0)
    np.testing.assert_allclose(flat(AVERAGES[name](ZERO, updates_of(rows))), rows[0], rtol=1e-9)


@pytest.mark.parametrize("name", ROBUST)
def test_few_or_no_updates(name: str) -> None:
    rule = AVERAGES[name]
    assert rule(ZERO, []) is ZERO
    assert rule(ZERO, updates_of(vectors(2, 7, 9), [0, 0])) is ZERO
    for n in (1, 2, 3):
        assert np.isfinite(flat(rule(ZERO, updates_of(vectors(n, 7, n))))).all()
    alone = updates_of(vectors(1, 7, 9))
    np.testing.assert_allclose(flat(rule(ZERO, alone)), flat(alone[0].state), rtol=1e-9)
    assert int(rule(ZERO, alone)["steps"]) == 3  # counters are the largest


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_tensors_changes_no_bit(seed: int) -> None:
    """A state that was read from a file has its tensors in any order; a sum must not follow it."""
    generator = torch.Generator().manual_seed(seed)

    def state() -> State:
        return {name: torch.randn(7 + 3 * place, generator=generator) for place, name in enumerate("hgfedcba")}

    previous, states = state(), [state() for _ in range(4)]
    shuffled = [dict(sorted(one.items(), reverse=seed % 2 == 0)) for one in (previous, *states)]
    mixed = {key: shuffled[0][key] for key in ("c", "a", "h", "e", "b", "g", "d", "f")}

    def updates(found: list[State]) -> list[Update]:
        return [Update(str(number), "net", 1, one, 5) for number, one in enumerate(found)]

    expected = robust.change_products(previous, updates(states)), robust.change_norms(previous, states)
    for before in (mixed, shuffled[0]):
        assert torch.equal(robust.change_products(before, updates(shuffled[1:])), expected[0])
        assert torch.equal(robust.change_norms(before, shuffled[1:]), expected[1])
