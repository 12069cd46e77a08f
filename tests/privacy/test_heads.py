"""Private heads: the solver against SciPy, the sensitivity against neighbors, the noise against its deviation."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import Counted

from feddf.config.privacy import PrivacyConfig
from feddf.privacy.noise import Noise
from feddf.privacy.records import BIAS, TOLERANCE, extended, released, sensitivity, solve_heads


def sphere(n: int, d: int, seed: int) -> torch.Tensor:
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True)


def by_scipy(inputs: np.ndarray, labels: np.ndarray, channels: int, regularization: float) -> np.ndarray:
    def objective(flat: np.ndarray) -> float:
        heads = flat.reshape(channels, -1)
        logits = inputs @ heads.T
        losses = scipy.special.logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]
        return float(losses.sum() + regularization / 2 * (flat**2).sum())

    start = np.zeros(channels * inputs.shape[1])
    return scipy.optimize.minimize(objective, start, method="BFGS", options={"gtol": 1e-7}).x.reshape(channels, -1)


@pytest.mark.parametrize("regularization", [0.3, 5.0])
def test_the_solver_finds_the_minimum(regularization: float) -> None:
    inputs, labels = sphere(30, 4, 0), torch.arange(30) % 3
    found = solve_heads(inputs[None], labels[None], 3, regularization)[0].numpy()
    expected = by_scipy(inputs.numpy(), labels.numpy(), 3, regularization)
    assert np.linalg.norm(found - expected) <= TOLERANCE / regularization + 1e-4


def test_many_clients_at_once_are_each_alone_and_padding_is_nothing() -> None:
    inputs = torch.stack([sphere(12, 5, seed) for seed in range(3)])
    labels = torch.arange(36).reshape(3, 12) % 4
    labels[1, 8:] = -1
    together = solve_heads(inputs, labels, 4, 1.0)
    for k, n in enumerate((12, 8, 12)):
        alone = solve_heads(inputs[k : k + 1, :n], labels[k : k + 1, :n], 4, 1.0)[0]
        assert float((together[k] - alone).norm()) <= 2 * TOLERANCE


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 25), st.integers(2, 5), st.floats(0.05, 20), st.booleans())
def test_one_record_moves_a_head_by_the_sensitivity_at_the_most(
    seed: int, n: int, channels: int, regularization: float, alike: bool
) -> None:
    inputs = sphere(n + 1, 3, seed)
    labels = torch.randint(0, channels, (n + 1,), generator=torch.Generator().manual_seed(seed))
    if alike:  # the last one contradicts all others, who agree
        inputs[:] = inputs[0]
        labels[:], labels[-1] = 0, 1
    both = torch.stack([inputs, inputs])
    neighbors = torch.stack([labels, labels])
    neighbors[1, -1] = -1
    with_it, without = solve_heads(both, neighbors, channels, regularization)
    assert float((with_it - without).norm()) <= sensitivity(regularization)


def test_the_sensitivity_is_not_far_from_what_a_record_can_do() -> None:
    inputs = torch.zeros(1, 20, 2, dtype=torch.float64)
    inputs[..., 0] = 1
    labels = torch.zeros(1, 20, dtype=torch.long)
    labels[:, -1] = 1  # against nineteen, who are sure of the other class
    without = labels.clone()
    without[:, -1] = -1
    moved = float((solve_heads(inputs, labels, 2, 0.5) - solve_heads(inputs, without, 2, 0.5)).norm())
    first = float(solve_heads(inputs[:, :1], labels[:, :1], 10, 50.0).norm())  # the only record
    assert first > 0.6 * sensitivity(50.0)
    assert moved <= sensitivity(0.5)


def test_rows_are_cut_to_the_clip() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    found = extended(rows, 1.0)
    assert float(found.norm(dim=1).max()) <= 1 + 1e-12
    torch.testing.assert_close(found[0, :2] / sqrt(1 - BIAS**2), torch.tensor([0.6, 0.8]).double())
    torch.testing.assert_close(found[1, :2] / sqrt(1 - BIAS**2), torch.tensor([0.3, 0.4]).double())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_record_that_is_no_number_spoils_no_head(value: float) -> None:
    """Such a record must not be told from any other by a head that cannot be solved."""
    inputs, labels = sphere(12, 3, 2), torch.arange(12) % 2
    inputs[-1] = value
    both, neighbors = torch.stack([inputs, inputs]), torch.stack([labels, labels])
    neighbors[1, -1] = -1
    with_it, without = solve_heads(extended(both, 1.0), neighbors, 2, 0.5)
    assert float((with_it - without).norm()) <= sensitivity(0.5)


@pytest.mark.parametrize("change", ["label", "features"])
def test_to_replace_a_record_moves_a_head_by_twice_the_sensitivity_at_the_most(change: str) -> None:
    moved = []
    for seed in range(10):
        inputs, labels = sphere(9, 3, seed), torch.arange(9) % 3
        both, neighbors = torch.stack([inputs, inputs]), torch.stack([labels, labels])
        if change == "label":
            neighbors[1, 0] = 2
        else:
            both[1, 0] *= -1
        a, b = solve_heads(both, neighbors, 3, 0.2)
        moved.append(float((a - b).norm()))
    assert max(moved) <= 2 * sensitivity(0.2)
    assert min(moved) > 0


def test_noise_is_of_the_sensitivity_and_heads_are_for_the_features_as_they_are() -> None:
    inputs, labels = 4 * sphere(40, 30, 1)[None], (torch.arange(40) % 10)[None]
    config = PrivacyConfig(clip=4.0, regularization=2.0)
    heads = solve_heads(extended(inputs, 4.0), labels, 10, 2.0)
    exact, drawn = released(heads, Noise(0.0), config), released(heads, Noise(3.0, Counted()), config)
    spread = float((drawn[0] - exact[0]).std()) * 4 / sqrt(1 - BIAS**2)
    assert spread == pytest.approx(3.0 * sensitivity(2.0), rel=0.1)
    logits = inputs[0].double() @ exact[0][0].mT + exact[1][0]
    torch.testing.assert_close(logits, (extended(inputs, 4.0) @ heads.mT)[0], rtol=1e-6, atol=1e-8)
