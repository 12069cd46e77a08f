"""The audit: bounds that are never above the truth (but for 5 %), and canaries that find too little noise."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from feddf.cli import app
from feddf.config.privacy import PrivacyConfig
from feddf.privacy.accountant import Mechanism, PrivacyError, epsilon_of, noise_for
from feddf.privacy.audit import audit, canary_scores, lower_bounds, p_value, refutes
from feddf.privacy.plan import make_plan


@given(st.integers(1, 200), st.data(), st.floats(0, 5))
def test_without_delta_the_p_value_is_a_binomial_tail(guesses: int, data: st.DataObject, epsilon: float) -> None:
    right = data.draw(st.integers(0, guesses))
    expected = sum(
        scipy.stats.binom.pmf(k, guesses, exp(epsilon) / (1 + exp(epsilon))) for k in range(right, guesses + 1)
    )
    assert p_value(1000, guesses, right, epsilon, 0.0) == pytest.approx(min(1, expected), abs=1e-9)
    assert p_value(1000, guesses, right, epsilon, 1e-3) >= p_value(1000, guesses, right, epsilon, 0.0) - 1e-12


def test_with_all_guesses_right_the_bound_has_a_closed_form() -> None:
    m = 1600
    included = torch.arange(m) % 2 == 0
    anyhow, _ = lower_bounds(included.float(), included, Mechanism(1.0), 0.0)
    chance = (0.05 / 3) ** (1 / m)  # each of m guesses is right with this, all with the level of one of three tests
    assert anyhow == pytest.approx(log(chance / (1 - chance)), rel=2e-3)


def test_randomized_response_is_seldom_bounded_above_its_epsilon_and_not_far_below() -> None:
    epsilon, found = 1.0, []
    for seed in range(60):
        draw = np.random.default_rng(seed)
        included = draw.random(4000) < 0.5
        told = np.where(draw.random(4000) < exp(epsilon) / (1 + exp(epsilon)), included, ~included)
        scores = torch.from_numpy(told + 0.1 * draw.random(4000))
        found.append(lower_bounds(scores, torch.from_numpy(included), Mechanism(2.0), 0.0)[0])
    assert sum(one > epsilon for one in found) <= 6  # 5 % of 60 are 3
    assert np.median(found) > 0.75 * epsilon


def gaussian(noise: float, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(seed)
    included = draw.random(m) < 0.5
    return torch.from_numpy(included + noise * draw.standard_normal(m)), torch.from_numpy(included)


def test_a_gaussian_mechanism_is_seldom_refuted_and_half_its_noise_is() -> None:
    noise = noise_for(2.0, 1e-5)
    above, caught = 0, 0
    for seed in range(8):
        above += lower_bounds(*gaussian(noise, 4000, seed), Mechanism(noise), 1e-5)[1] > 2.0
        caught += lower_bounds(*gaussian(noise / 2, 4000, seed), Mechanism(noise), 1e-5)[1] > 2.0
    assert above <= 1
    assert caught == 8


def test_guesses_at_chance_refute_nothing() -> None:
    assert not refutes(1000, 1000, 500, Mechanism(50.0), 0.05)
    assert refutes(1000, 1000, 700, Mechanism(50.0), 0.05)
    assert lower_bounds(torch.rand(1000), torch.arange(1000) % 2 == 0, Mechanism(3.0), 1e-5)[0] < 0.5


PLANS = {
    "weights": (PrivacyConfig(level="client", epsilon=2.0), 2),
    "heads": (PrivacyConfig(level="record", mechanism="heads", epsilon=2.0), 1),
    "dp-sgd": (PrivacyConfig(level="record", epsilon=2.0, sampling=0.25, noise=2.37), 1),
}


@pytest.mark.parametrize("kind", PLANS)
def test_the_real_mechanisms_stay_below_the_claim_and_without_noise_twice_it_is_found(kind: str) -> None:
    privacy, rounds = PLANS[kind]
    plan = make_plan(privacy, rounds, 4)
    claimed = plan.spent(rounds)
    scores, included = canary_scores(plan, privacy, 4, 1000)
    mechanism = plan.a_round.repeated(rounds)
    found = (
        lower_bounds(scores, included, mechanism, plan.delta) if kind != "dp-sgd" else (anyhow(scores, included), 0.0)
    )
    assert max(found) <= claimed
    assert anyhow(*canary_scores(plan, privacy, 4, 4000, scale=1e-9)) >= 2 * claimed


def anyhow(scores: torch.Tensor, included: torch.Tensor) -> float:
    return lower_bounds(scores, included, Mechanism(1.0), 1e-5)[0]


def test_planted_half_the_noise_on_weights_is_caught() -> None:
    privacy, rounds = PLANS["weights"]
    plan = make_plan(privacy, rounds, 1)
    assert audit(plan, privacy, 1, 4000, scale=0.5)["of this mechanism"] > plan.spent(rounds)


def test_the_command_says_what_it_found_and_fails_where_too_little_is_private() -> None:
    words = ["audit", "demo", "privacy.level=client", "privacy.epsilon=2", "rounds=1", "--canaries", "1000"]
    good = CliRunner().invoke(app, words)
    assert good.exit_code == 0, good.output
    assert "claimed 2, lower bound" in good.output
    bad = CliRunner().invoke(app, [*words, "--scale", "0.01"])
    assert isinstance(bad.exception, PrivacyError)
    nothing = CliRunner().invoke(app, ["audit", "demo"])
    assert "nothing to audit" in str(nothing.exception)
    assert epsilon_of(Mechanism(noise_for(2, 1e-5)), 1e-5) <= 2
