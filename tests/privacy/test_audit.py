"""The audit: bounds that are never above the truth (but for 5 %), and canaries that find too little noise."""

from __future__ import annotations

import json
from functools import partial
from math import exp, inf, log
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from sources import Counted
from typer.testing import CliRunner

from feddf.cli import app
from feddf.config.privacy import PrivacyConfig
from feddf.models.small import Linear
from feddf.outputs import classes
from feddf.privacy.accountant import Mechanism, Plan, PrivacyError, advantage_of, make_plan, noise_for
from feddf.privacy.audit import (
    LEVEL,
    _heads,
    canary_scores,
    confidence,
    least_epsilon,
    lower_bounds,
    membership,
    most_noise,
    p_value,
    roc,
)
from feddf.privacy.noise import Noise
from feddf.privacy.records import head_update, sensitivity
from feddf.states import init_state
from feddf.types import Examples, Inputs, Prototype


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
    found = least_epsilon(included.float(), included, 0.0)
    chance = (LEVEL / 3) ** (1 / m)  # each of m guesses is right with this, all with the level of one of three tests
    assert found == pytest.approx(log(chance / (1 - chance)), rel=2e-3)


def test_randomized_response_is_seldom_bounded_above_its_epsilon_and_not_far_below() -> None:
    epsilon, found = 1.0, []
    for seed in range(60):
        draw = np.random.default_rng(seed)
        included = draw.random(4000) < 0.5
        told = np.where(draw.random(4000) < exp(epsilon) / (1 + exp(epsilon)), included, ~included)
        scores = torch.from_numpy(told + 0.1 * draw.random(4000))
        found.append(least_epsilon(scores, torch.from_numpy(included), 0.0))
    assert sum(one > epsilon for one in found) <= 6  # 5 % of 60 are 3
    assert np.median(found) > 0.75 * epsilon


def gaussian(noise: float, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(seed)
    included = draw.random(m) < 0.5
    return torch.from_numpy(included + noise * draw.standard_normal(m)), torch.from_numpy(included)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_a_gaussian_mechanism_is_seldom_refuted_and_half_its_noise_is(epsilon: float) -> None:
    noise = noise_for(epsilon, 1e-5)
    above = sum(most_noise(*gaussian(noise, 8000, seed), Mechanism(noise)) < noise for seed in range(60))
    caught = sum(most_noise(*gaussian(noise / 2, 8000, seed), Mechanism(noise)) < noise for seed in range(20))
    assert above <= 4  # 1.7 % of 60 are 1
    assert caught >= 18


def test_guesses_at_chance_refute_nothing() -> None:
    assert least_epsilon(torch.rand(1000), torch.arange(1000) % 2 == 0, 1e-5) < 0.5
    assert most_noise(torch.zeros(4000), torch.arange(4000) % 2 == 0, Mechanism(3.0)) == inf


@pytest.mark.parametrize("noise", [0.7, 2.0])
def test_the_advantage_is_the_total_variation(noise: float) -> None:
    whole = 2 * scipy.stats.norm.cdf(0.5 / noise) - 1
    assert advantage_of(Mechanism(noise)) == pytest.approx(whole)
    assert advantage_of(Mechanism(noise, times=4)) == pytest.approx(2 * scipy.stats.norm.cdf(1 / noise) - 1)
    assert advantage_of(Mechanism(noise, sampling=0.3)) == pytest.approx(0.3 * whole, rel=1e-2)


PLANS = {
    "weights": (PrivacyConfig(level="client", epsilon=1.0, groups=2), 2),
    "answers": (PrivacyConfig(level="client", epsilon=1.0, mechanism="answers"), 2),
    "votes": (PrivacyConfig(level="client", epsilon=2.0, mechanism="votes"), 1),
    "heads": (PrivacyConfig(level="record", mechanism="heads", epsilon=1.0, clip=3.0, regularization=2.0), 1),
    "dp-sgd": (PrivacyConfig(level="record", epsilon=1.0, sampling=0.25), 1),
}


def bounds(plan: Plan, scale: float, m: int) -> dict[str, float]:
    return lower_bounds(plan, *canary_scores(plan, m, scale, Counted()))


@pytest.mark.parametrize("kind", PLANS)
def test_the_real_mechanisms_stay_below_the_claim_and_half_the_noise_and_none_do_not(kind: str) -> None:
    plan = make_plan(*PLANS[kind], 4)
    planned, halved, bare = bounds(plan, 1.0, 2000), bounds(plan, 0.5, 5000), bounds(plan, 1e-9, 2000)
    claimed = planned["claimed"]
    assert max(planned["lower bound"], planned["bound for this mechanism"]) <= claimed <= PLANS[kind][0].epsilon
    assert halved["bound for this mechanism"] > claimed
    assert bare["lower bound"] >= 2 * claimed


def test_the_canary_of_heads_moves_one_by_nearly_the_sensitivity() -> None:
    for regularization, least in ((0.1, 0.86), (1.0, 0.93), (10.0, 0.95)):
        privacy = PrivacyConfig(level="record", mechanism="heads", epsilon=1.0, regularization=regularization)
        scores = _heads(torch.tensor([False, True]), Plan(privacy, Mechanism(1.0), 1), Noise(0.0))
        assert float(scores[0]) == 0.0
        assert least < float(scores[1].sqrt()) / sensitivity(regularization) <= 1.0


def test_the_command_says_what_it_found_and_fails_where_too_little_is_private() -> None:
    words = ["audit", "demo", "privacy.level=client", "privacy.epsilon=2", "rounds=1", "--canaries", "1000"]
    good = CliRunner().invoke(app, words)
    assert good.exit_code == 0, good.output
    assert "claimed 2, lower bound" in good.output
    bad = CliRunner().invoke(app, [*words, "--scale", "0.01"])
    assert isinstance(bad.exception, PrivacyError)
    assert bad.exception.exit_code == 2
    nothing = CliRunner().invoke(app, ["audit", "demo"])
    assert "nothing to audit" in str(nothing.exception)
    servers = CliRunner().invoke(app, [*words, "--clients", "8"])
    assert "must be 'record'" in str(servers.exception)


def test_the_command_attacks_answers_and_draws_both_attacks(tmp_path: Path) -> None:
    words = [
        "audit",
        "demo",
        "data.name=digits",
        "prototypes=['linear']",
        "fusion.method=fedavg",
        "pool.sources=['train']",
    ]
    words += ["privacy.level=record", "privacy.mechanism=heads", "privacy.epsilon=1", "privacy.regularization=0.01"]
    words += ["rounds=1", "data.train_size=400", "clients.total=16", "--canaries", "1000", "--clients", "8"]
    quiet = CliRunner().invoke(app, [*words, "--picture", str(tmp_path / "roc.svg"), "--json"])
    assert quiet.exit_code == 0, quiet.exception
    found = json.loads(quiet.stdout)
    assert (tmp_path / "roc.svg").stat().st_size > 5000
    assert {"lower bound by answers", "AUC of canaries", "AUC of membership from answers"} < set(found)
    assert found["lower bound by answers"] <= 1.0


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 0.8, 1.0), (4.0, 0.35, 0.65)])
def test_members_are_found_by_answers_alone_unless_there_is_noise(noise: float, low: float, high: float) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs, pool = torch.randn(40, 30, generator=draw), torch.randn(100, 30, generator=draw)
    examples = Examples(Inputs(inputs, lambda rows: rows), torch.randint(0, 2, (40,), generator=draw), classes(2))
    prototype = Prototype("linear", lambda: Linear((30,), 2))
    config = PrivacyConfig(clip=5.0, regularization=0.01)
    train = partial(head_update, train=examples, noise=Noise(noise), config=config)
    start = init_state(prototype, 0)
    false, true = roc(*membership(train, prototype, start, examples, Inputs(pool, lambda rows: rows), 48, 20))
    assert low < float(torch.trapezoid(true, false)) < high


def test_confidence_is_the_log_odds_and_rates_are_counted() -> None:
    logits, labels = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    p = logits.softmax(dim=1)[0, 0]
    assert float(confidence(logits, labels)) == pytest.approx(float((p / (1 - p)).log()), rel=1e-5)
    false, true = roc(torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.tensor([True, False, True, False]))
    assert (false.tolist(), true.tolist()) == ([0, 0.5, 0.5, 1], [0.5, 0.5, 1, 1])
