"""Noise is Gaussian, and no seed decides it."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from sources import Counted

from feddf.privacy.noise import coins, normal, uniform


def test_the_noise_is_standard_normal() -> None:
    drawn = normal((20_000,), Counted()).numpy()
    assert scipy.stats.kstest(drawn, "norm").pvalue > 0.01
    assert scipy.stats.kstest(uniform(20_000, Counted()).numpy(), "uniform").pvalue > 0.01
    halves = drawn[:10_000], drawn[10_000:]  # the two of a pair are independent
    assert abs(scipy.stats.pearsonr(*halves).statistic) < 0.03


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert normal(shape).shape == shape
    assert normal(shape).dtype == torch.float64


def test_a_seed_decides_nothing_and_a_source_everything() -> None:
    torch.manual_seed(1)
    first = normal((50,))
    torch.manual_seed(1)
    assert not torch.equal(first, normal((50,)))
    assert torch.equal(normal((50,), Counted()), normal((50,), Counted()))


def test_coins_have_their_probability() -> None:
    assert int(coins(10_000, 0.3, Counted()).sum()) == pytest.approx(3000, abs=150)
    assert not coins(100, 0.0).any()
    assert coins(100, 1.0).all()
