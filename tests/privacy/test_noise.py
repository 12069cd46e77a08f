"""Noise is Gaussian, and no seed decides it."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from sources import Counted

from feddf.privacy.noise import normal, uniform


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


def test_uniform_numbers_have_finite_logarithms_and_their_chances() -> None:
    ends = uniform(1, lambda n: b"\0" * n), uniform(1, lambda n: b"\xff" * n)
    assert 0 < float(ends[0]) < 1e-15 < 1 - 1e-15 < float(ends[1]) <= 1
    assert int((uniform(10_000, Counted()) < 0.3).sum()) == pytest.approx(3000, abs=150)
