"""The average whose coefficients are fitted to labeled examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from feddf.outputs import classes
from feddf.robust import fitted
from feddf.robust.fitted import PRIOR, fitted_average
from feddf.types import Examples, Inputs, Prototype, Resources, State, Update

DIMENSIONS, CLASSES, N = 4, 3, 60
PROTOTYPE = Prototype("linear", lambda: torch.nn.Linear(DIMENSIONS, CLASSES))
RESOURCES = Resources({"linear": PROTOTYPE})


def examples(n: int = N) -> Examples:
    """Points around one center for each class."""
    random = np.random.default_rng(0)
    labels = np.arange(n) % CLASSES
    points = 2 * np.eye(DIMENSIONS)[labels] + random.normal(size=(n, DIMENSIONS))
    inputs = Inputs(torch.from_numpy(points).float(), lambda raw: raw)
    return Examples(inputs, torch.from_numpy(labels), classes(CLASSES))


def state(*known: int, scale: float = 1.0, seed: int = 0) -> State:
    """A linear model that knows some of the classes."""
    weight = 0.02 * torch.randn(CLASSES, DIMENSIONS, generator=torch.Generator().manual_seed(seed))
    for one in known:
        weight[one, one] += 1.0
    return {"weight": scale * weight, "bias": torch.zeros(CLASSES)}


BEFORE: State = {"weight": torch.zeros(CLASSES, DIMENSIONS), "bias": torch.zeros(CLASSES)}


def updates_of(*states: State) -> list[Update]:
    return [Update(f"c{k}", "linear", 1, one, 10) for k, one in enumerate(states)]


def average(*states: State) -> State:
    return fitted_average(RESOURCES, examples())(BEFORE, updates_of(*states))


def objective(log_c: np.ndarray[Any, Any], states: list[State]) -> float:
    """ℓ(c) + β KL(c ‖ w) in NumPy, for updates of one length and equal n_k."""
    c = np.exp(log_c - log_c.max())
    c /= c.sum()
    weight = sum(share * one["weight"].double().numpy() for share, one in zip(c, states, strict=True))
    labeled = examples()
    logits = labeled.inputs.raw[torch.arange(N)].double().numpy() @ weight.T
    logits -= logits.max(axis=1, keepdims=True)
    lost = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(N), labeled.labels.numpy()]
    return float(lost.mean() + PRIOR * (c * np.log(c * len(c))).sum())


def test_the_coefficients_minimize_loss_and_distance_from_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted, "STEPS", 400)
    states = [state(0, seed=1), state(1, seed=2), state(1, seed=3), state(2, seed=4)]
    norms = [float(one["weight"].norm()) for one in states]
    states = [{**one, "weight": one["weight"] / norm} for one, norm in zip(states, norms, strict=True)]
    best = minimize(objective, np.zeros(4), args=(states,), method="BFGS").x
    shares = np.exp(best) / np.exp(best).sum()
    expected = sum(share * one["weight"].double() for share, one in zip(shares, states, strict=True))
    torch.testing.assert_close(average(*states)["weight"].double(), expected, rtol=0.02, atol=0.01)


def test_an_update_that_harms_loses_its_weight() -> None:
    honest = [state(k % CLASSES, seed=k) for k in range(6)]
    hostile = [state(0, 1, 2, scale=-50.0, seed=9)] * 2
    attacked, alone = average(*honest, *hostile)["weight"], average(*honest)["weight"]
    plain = torch.stack([one["weight"] for one in (*honest, *hostile)]).mean(dim=0)
    assert (attacked - alone).norm() < 0.15 * alone.norm() < 0.01 * (plain - alone).norm()


def test_copies_share_what_one_of_them_would_have() -> None:
    honest = [state(k, seed=k) for k in range(CLASSES)]
    copied = average(*honest, *[honest[0]] * 6)["weight"]
    plain = torch.stack([one["weight"] for one in (*honest, *[honest[0]] * 6)]).mean(dim=0)
    rows = copied.diagonal()[:CLASSES]
    assert rows.min() > 0.35 * rows.max()
    assert plain.diagonal()[1] < 0.2 * plain.diagonal()[0]


def test_without_examples_the_weights_stay() -> None:
    none = [Update("c", "linear", 1, state(0), 0)]
    assert fitted_average(RESOURCES, examples())(BEFORE, none) is BEFORE


def test_of_many_examples_each_step_takes_some_from_everywhere() -> None:
    first, second = fitted._batch(1000, 0), fitted._batch(1000, 1)
    assert len(first) == len(second) == fitted.BATCH
    assert first.max() > 990
    assert len(set(first.tolist()) & set(second.tolist())) < fitted.BATCH / 2
    assert fitted._batch(5, 3).tolist() == [0, 1, 2, 3, 4]


def test_an_update_far_longer_than_the_median_has_no_say() -> None:
    """Clipped, a last layer times 1,000 would still set the direction, which labeled examples like."""
    honest = [state(k % CLASSES, seed=k) for k in range(6)]
    boosted = state(0, scale=1000.0, seed=7)
    torch.testing.assert_close(average(*honest, boosted), average(*honest))
    assert not torch.equal(average(*honest, state(0, scale=2.5, seed=7))["weight"], average(*honest)["weight"])
