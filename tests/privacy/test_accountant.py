"""ε against closed forms, SciPy and an independent library."""

from __future__ import annotations

from math import inf, sqrt

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from feddf.privacy.accountant import MOST_NOISE, Mechanism, epsilon_of, gaussian_delta, noise_for

dp_accounting = pytest.importorskip("dp_accounting")
PLDAccountant = pytest.importorskip("dp_accounting.pld").PLDAccountant
RdpAccountant = pytest.importorskip("dp_accounting.rdp").RdpAccountant


def hockey_stick(epsilon: float, noise: float) -> float:
    """δ by its definition, ∫ max(0, p − e^ε q), for N(1, z²) and N(0, z²)."""
    p, q = scipy.stats.norm(1, noise), scipy.stats.norm(0, noise)
    begin = 0.5 + epsilon * noise**2  # where p = e^ε q
    value, _ = scipy.integrate.quad(lambda x: p.pdf(x) - np.exp(epsilon) * q.pdf(x), begin, 1 + 40 * noise, limit=500)
    return value


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_delta_of_a_gaussian_is_its_definition(noise: float, epsilon: float) -> None:
    assert gaussian_delta(epsilon, noise) == pytest.approx(hockey_stick(epsilon, noise), abs=1e-9)


@pytest.mark.parametrize("noise", [1.0, 6.0])
@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_privacy_loss_distributions_agree_with_the_closed_form_and_renyi_is_above(
    noise: float, times: int, delta: float
) -> None:
    ours = epsilon_of(Mechanism(noise, times), delta)
    event = dp_accounting.GaussianDpEvent(noise)
    library = PLDAccountant().compose(event, times).get_epsilon(delta)
    assert library == pytest.approx(ours, abs=1e-3 * max(1, ours))
    assert RdpAccountant().compose(event, times).get_epsilon(delta) >= ours


@given(st.floats(0.3, 20), st.integers(1, 50))
def test_many_releases_are_one_with_less_noise(noise: float, times: int) -> None:
    assert epsilon_of(Mechanism(noise, times), 1e-5) == pytest.approx(epsilon_of(Mechanism(noise / sqrt(times)), 1e-5))


@pytest.mark.parametrize(
    ("sampling", "times", "epsilon"), [(1.0, 1, 0.5), (1.0, 20, 8.0), (0.05, 200, 2.0), (0.2, 9, 1.0)]
)
def test_the_noise_for_an_epsilon_spends_it_and_no_more(sampling: float, times: int, epsilon: float) -> None:
    noise = noise_for(epsilon, 1e-5, times, sampling)
    assert epsilon_of(Mechanism(noise, times, sampling), 1e-5) <= epsilon
    assert epsilon_of(Mechanism(noise * 0.99, times, sampling), 1e-5) > epsilon


def test_the_textbook_noise_is_not_used_where_it_does_not_hold() -> None:
    textbook = sqrt(2 * np.log(1.25 / 1e-5)) / 30  # is for ε ≤ 1
    assert epsilon_of(Mechanism(textbook), 1e-5) > 30
    assert noise_for(30, 1e-5) > textbook


def test_secret_sampling_amplifies_and_a_fixed_cohort_does_not() -> None:
    fixed = epsilon_of(Mechanism(2.0, 30), 1e-5)
    assert fixed == pytest.approx(epsilon_of(Mechanism(2.0 / sqrt(30)), 1e-5))
    assert epsilon_of(Mechanism(2.0, 30, sampling=0.1), 1e-5) < fixed / 3


@pytest.mark.parametrize(("noise", "sampling", "times"), [(1.0, 0.05, 100), (0.8, 0.02, 400), (3.0, 0.3, 30)])
def test_opacus_says_the_same_of_sampled_batches(noise: float, sampling: float, times: int) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    ours, theirs = epsilon_of(Mechanism(noise, times, sampling), 1e-5), {}
    for name in ("prv", "rdp"):
        other = accountants.create_accountant(name)
        other.history = [(noise, sampling, times)]
        theirs[name] = other.get_epsilon(1e-5)
    assert theirs["prv"] == pytest.approx(ours, rel=0.02)
    assert theirs["rdp"] >= ours
    event = dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(noise))
    assert RdpAccountant().compose(event, times).get_epsilon(1e-5) == pytest.approx(theirs["rdp"], rel=0.02)


def test_the_ends() -> None:
    assert epsilon_of(Mechanism(1.0, 0), 1e-5) == 0
    assert epsilon_of(Mechanism(1e-4), 1e-5) == inf  # beyond any floating-point number, and beyond any meaning
    assert epsilon_of(Mechanism(1e6), 1e-5) == 0
    assert noise_for(1e-4, 1e-9, 1000) == MOST_NOISE


def test_noise_without_end_costs_nothing() -> None:
    assert epsilon_of(Mechanism(inf), 1e-5) == epsilon_of(Mechanism(inf, 3, 0.1), 1e-5) == 0.0
