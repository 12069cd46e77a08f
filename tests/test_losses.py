"""The formulas of every kind of output against SciPy and a few lines of NumPy; gradients against differences."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logsumexp, softmax, xlogy
from scipy.stats import norm
from torch import Tensor

from feddf.evaluate import weigh_known
from feddf.fusion.ensemble import avg_logits, avg_probabilities
from feddf.losses import soft_dice
from feddf.outputs import KINDS, Outputs, classes, from_description, labels, values
from feddf.types import WeightedLogits

Array = np.ndarray[Any, np.dtype[np.float64]]
seeds = st.integers(0, 10**6)
positions = st.sampled_from([(), (3,), (2, 3)])


def drawn(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(0, 2, shape)


def some_unknown(wanted: Array, seed: int) -> Array:
    found = wanted.copy()
    found[np.random.default_rng(seed).random(found.shape) < 0.3] = np.nan
    found.flat[0] = wanted.flat[0]  # at least one is known
    return found


def tensor(array: Array) -> Tensor:
    return torch.from_numpy(array)


def votes(z: Array) -> list[WeightedLogits]:
    return [WeightedLogits(tensor(one)) for one in z]


@given(seeds, positions, st.sampled_from([0.5, 1.0, 3.0]))
def test_labels_against_scipy(seed: int, where: tuple[int, ...], temperature: float) -> None:
    z, p = drawn(seed, 5, 4, *where), expit(drawn(seed + 1, 5, 4, *where))
    y, outputs = some_unknown((p > 0.5).astype(float), seed), labels(4, where)
    known, q = ~np.isnan(y), expit(z)
    entropy = -(np.nan_to_num(y) * np.log(q) + (1 - np.nan_to_num(y)) * np.log1p(-q))
    np.testing.assert_allclose(float(outputs.loss(tensor(z), tensor(y))), entropy[known].mean(), rtol=1e-6)
    soft = expit(z / temperature)
    kl = xlogy(p, p / soft) + xlogy(1 - p, (1 - p) / (1 - soft))
    found = outputs.distance(tensor(p), tensor(z), temperature)
    np.testing.assert_allclose(float(found), kl.mean() * temperature**2, rtol=1e-6)
    np.testing.assert_allclose(outputs.raw(tensor(q)).numpy(), z, rtol=1e-6, atol=1e-9)


@given(seeds)
def test_positive_labels_can_count_more(seed: int) -> None:
    z, y = drawn(seed, 6, 3), (drawn(seed + 1, 6, 3) > 0).astype(float)
    weights = (1.0, 4.0, 0.5)
    expected = (np.array(weights) * y * np.log1p(np.exp(-z)) + (1 - y) * np.log1p(np.exp(z))).mean()
    np.testing.assert_allclose(float(labels(3, pos_weight=weights).loss(tensor(z), tensor(y))), expected, rtol=1e-6)


@given(seeds, positions)
def test_values_against_numpy(seed: int, where: tuple[int, ...]) -> None:
    z, y, outputs = drawn(seed, 5, 2, *where), some_unknown(drawn(seed + 1, 5, 2, *where), seed), values(2, where)
    expected = np.nanmean((z - y) ** 2)
    np.testing.assert_allclose(float(outputs.loss(tensor(z), tensor(y))), expected, rtol=1e-9)
    np.testing.assert_allclose(float(outputs.distance(tensor(y), tensor(z), 1.0)), expected, rtol=1e-9)
    np.testing.assert_allclose(
        avg_logits(votes(np.stack([z, z + 1])), 1.0, outputs).numpy(), z + 0.5, rtol=1e-5, atol=1e-6
    )


@given(seeds, positions)
def test_values_with_variances_against_scipy(seed: int, where: tuple[int, ...]) -> None:
    """The loss is a Gaussian's likelihood; combined moments are the mixture's, found here by sampling-free sums."""
    z, y = drawn(seed, 3, 5, 4, *where), drawn(seed + 1, 5, 2, *where)
    outputs = values(2, where, variance=True)
    mean, deviation = z[:, :, :2], np.exp(z[:, :, 2:] / 2)
    likelihood = -norm.logpdf(y, mean[0], deviation[0]).mean() - np.log(2 * np.pi) / 2
    np.testing.assert_allclose(float(outputs.loss(tensor(z[0]), tensor(y))), likelihood, rtol=1e-9, atol=1e-12)
    middle = mean.mean(axis=0)
    variance = (deviation**2 + (mean - middle) ** 2).mean(axis=0)
    mixture = outputs.raw(avg_probabilities(votes(z), 1.0, outputs).double()).numpy()
    np.testing.assert_allclose(mixture[:, :2], middle, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.exp(mixture[:, 2:]), variance, rtol=1e-3, atol=1e-4)
    v, s = variance, deviation[0] ** 2
    kl = (np.log(s / v) + (v + (middle - mean[0]) ** 2) / s - 1) / 2
    target = np.concatenate([middle, middle**2 + v], axis=1)
    np.testing.assert_allclose(float(outputs.distance(tensor(target), tensor(z[0]), 1.0)), kl.mean(), rtol=1e-6)
    assert outputs.likelihood is not None
    density = norm.pdf(y, middle, np.sqrt(v))
    np.testing.assert_allclose(outputs.likelihood(tensor(target), tensor(y)).numpy(), density.ravel(), rtol=1e-6)


@given(seeds, st.floats(0.1, 2))
def test_soft_dice_is_added_to_the_divergence(seed: int, weight: float) -> None:
    z, p = drawn(seed, 2, 3, 4, 4), softmax(drawn(seed + 1, 2, 3, 4, 4), axis=1)
    q = softmax(z, axis=1)
    per_class = [2 * (p[:, c] * q[:, c]).sum() / (p[:, c] ** 2 + q[:, c] ** 2).sum() for c in range(3)]
    plain, both = (classes(3, (4, 4), dice=dice).distance(tensor(p), tensor(z), 1.0) for dice in (0.0, weight))
    np.testing.assert_allclose(float(both - plain), weight * (1 - np.mean(per_class)), rtol=1e-6)
    assert float(soft_dice(tensor(p), tensor(p))) == pytest.approx(1)


def test_ignored_positions_change_nothing() -> None:
    z, y = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2, -100, -100], [2, 2, -100, -100, -100]])
    outputs = classes(3, (5,), score="1/perplexity")
    other = torch.where((y < 0).unsqueeze(1), torch.randn(2, 3, 5), z)
    for function in (outputs.loss, outputs.score, *outputs.measures.values()):
        torch.testing.assert_close(function(z, y), function(other, y))


# Gradients


CASES: list[tuple[str, Outputs, Callable[[Tensor], Tensor]]] = [
    ("classes", classes(3, (2, 2), dice=0.5), lambda z: z.softmax(dim=1)),
    ("classes with a background", classes(3, (2, 2), background=0), lambda z: z.softmax(dim=1)),
    ("labels", labels(3, (2, 2)), torch.sigmoid),
    ("values", values(3, (2, 2)), lambda z: z),
    ("values with variances", values(2, (2, 2), variance=True), lambda z: torch.cat([z[:, :2], z[:, :2] ** 2 + 1], 1)),
]


@pytest.mark.parametrize(("outputs", "target"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_gradients_against_differences(outputs: Outputs, target: Callable[[Tensor], Tensor]) -> None:
    shape = tuple(int(size or 0) for size in outputs.shape)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, *shape, generator=generator, dtype=torch.float64, requires_grad=True)
    wanted = target(torch.randn(2, *shape, generator=generator, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda raw: outputs.distance(wanted, raw, 2.0), (z,))
    truth = outputs.decide(wanted)
    known = torch.tensor([True, True, False][: outputs.channels])
    for kind in (outputs, outputs.knowing(known)):
        assert torch.autograd.gradcheck(lambda raw, kind=kind: kind.loss(raw, truth), (z,))


# Partial knowledge


def mask(*known: int, of: int = 4) -> Tensor:
    found = torch.zeros(of, dtype=torch.bool)
    found[list(known)] = True
    return found


def conditional(z: Array, known: list[list[int]]) -> Array:
    """ConDistFL's principle in ten lines: mean log-odds against "nothing that I know", of those who know a class."""
    n_classes, odds = z.shape[2], []
    for one, mine in zip(z, known, strict=True):
        others = [c for c in range(n_classes) if c not in mine or c == 0]
        background = logsumexp(one[:, others], axis=1)
        odds.append([one[:, c] - background if c in mine and c else None for c in range(n_classes)])
    logits = [np.zeros_like(z[0, :, 0])]
    for c in range(1, n_classes):
        logits.append(np.mean([mine[c] for mine in odds if mine[c] is not None], axis=0))
    return np.asarray(softmax(np.stack(logits, axis=1), axis=1))


def naive(z: Array, known: list[list[int]]) -> Array:
    """The background as one more class, which everybody knows."""
    rows = [
        softmax(np.where(np.isin(np.arange(z.shape[2]), mine), one, -1e9), axis=1)
        for one, mine in zip(z, known, strict=True)
    ]
    total = np.stack(rows).sum(axis=0) / np.array([sum(c in mine for mine in known) for c in range(z.shape[2])])
    return np.asarray(total / total.sum(axis=1, keepdims=True))


def combined(outputs: Outputs, z: Array, known: list[list[int]], combine: Any = avg_logits) -> Array:
    given = [
        weigh_known(tensor(one), 1.0, outputs=outputs, known=mask(*mine, of=z.shape[2]))
        for one, mine in zip(z, known, strict=True)
    ]
    return np.asarray(combine(given, 1.0, outputs).numpy())


HOSPITALS = [[0, 1], [0, 2], [0, 2, 3]]


@given(seeds)
def test_classes_of_hospitals_are_combined_by_conditional_probabilities(seed: int) -> None:
    z, outputs = drawn(seed, 3, 6, 4), classes(4, background=0)
    np.testing.assert_allclose(combined(outputs, z, HOSPITALS), conditional(z, HOSPITALS), rtol=1e-4, atol=1e-6)
    q = combined(outputs, z, HOSPITALS, avg_probabilities)
    own = [np.exp(z[k, :, mine] - logsumexp(z[k], axis=1)) for k, mine in enumerate([[1], [2], [2, 3]])]
    marginal = np.stack([own[0][0], (own[1][0] + own[2][0]) / 2, own[2][1]], axis=1)
    marginal = np.concatenate([np.maximum(0, 1 - marginal.sum(axis=1, keepdims=True)), marginal], axis=1)
    np.testing.assert_allclose(q, marginal / marginal.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-6)


@given(seeds)
def test_without_a_background_the_mean_of_the_known_is_the_reference(seed: int) -> None:
    z, known = drawn(seed, 3, 6, 4), [[0, 1], [1, 2], [0, 2, 3]]
    logits = np.full((3, 6, 4), np.nan)
    for k, mine in enumerate(known):
        logits[k][:, mine] = z[k][:, mine] - z[k][:, mine].mean(axis=1, keepdims=True)
    expected = softmax(np.nanmean(logits, axis=0), axis=1)
    np.testing.assert_allclose(combined(classes(4), z, known), expected, rtol=1e-4, atol=1e-6)


def test_the_naive_way_loses_an_organ_to_those_who_do_not_know_it() -> None:
    """One hospital is rather sure that a pixel is its organ; two that do not know the organ say background."""
    z = np.array([[[0.0, 0.5, -20, -20]], [[9.0, -20, 0, -20]], [[9.0, -20, 0, 0]]])
    known = [[0, 1], [0, 2], [0, 3]]
    q, p = combined(classes(4, background=0), z, known), naive(z, known)
    np.testing.assert_allclose(combined(classes(4), z, known, avg_probabilities), p, rtol=1e-5)
    assert q.argmax(axis=1) == [1]
    assert p.argmax(axis=1) == [0]
    np.testing.assert_allclose(q[0, 1] / q[0, 0], np.exp(0.5), rtol=1e-4)  # the odds of the one who knows it


@given(seeds, positions)
def test_teachers_that_know_everything_are_combined_as_ever(seed: int, where: tuple[int, ...]) -> None:
    z = drawn(seed, 3, 2, 4, *where)
    for outputs in (classes(4, where), classes(4, where, background=2), labels(4, where), values(4, where)):
        for combine in (avg_logits, avg_probabilities):
            expected = combine(votes(z), 1.0, outputs).numpy()
            found = combined(outputs, z, [[0, 1, 2, 3]] * 3, combine)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@given(seeds)
def test_labels_and_values_are_left_to_those_who_know_them(seed: int) -> None:
    z, known = drawn(seed, 3, 5, 4), [[0, 1], [1, 2], [1, 3]]
    alone = np.stack([z[0, :, 0], z[:, :, 1].mean(axis=0), z[1, :, 2], z[2, :, 3]], axis=1)
    np.testing.assert_allclose(combined(values(4), z, known), alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(combined(labels(4), z, known), expit(alone), rtol=1e-5, atol=1e-6)


@given(seeds)
def test_a_client_learns_only_from_what_it_knows(seed: int) -> None:
    """Classes that it does not know are background, whose probability is then the sum of all of them."""
    z, y = drawn(seed, 8, 4), np.random.default_rng(seed).integers(0, 4, 8)
    found = classes(4, background=0).knowing(mask(0, 2)).loss(tensor(z), torch.from_numpy(y))
    p = softmax(z, axis=1)
    expected = -np.log(np.where(y == 2, p[:, 2], p[:, [0, 1, 3]].sum(axis=1))).mean()
    np.testing.assert_allclose(float(found), expected, rtol=1e-6)
    seen = np.isin(y, [1, 2])
    if seen.any():  # without a background, an example of another class teaches nothing
        own = softmax(z[seen][:, [1, 2]], axis=1)[np.arange(seen.sum()), y[seen] - 1]
        found = classes(4).knowing(mask(1, 2)).loss(tensor(z), torch.from_numpy(y))
        np.testing.assert_allclose(float(found), -np.log(own).mean(), rtol=1e-6)
    wanted = drawn(seed + 1, 8, 4)
    squared = values(4).knowing(mask(1, 3)).loss(tensor(z), tensor(wanted))
    np.testing.assert_allclose(float(squared), ((z - wanted)[:, [1, 3]] ** 2).mean(), rtol=1e-6)


@given(seeds)
def test_nothing_is_learned_about_channels_that_no_teacher_knows(seed: int) -> None:
    some = mask(0, 2)
    for outputs in (classes(4, (2,), background=0), labels(4, (2,)), values(4, (2,))):
        z = tensor(drawn(seed, 3, 4, 2)).requires_grad_()
        target = outputs.forget(outputs.probabilities(tensor(drawn(seed + 1, 3, 4, 2))), some)
        assert torch.equal(target.isnan().any(dim=2).all(dim=0), ~some)
        outputs.distance(target, z, 1.0).backward()
        assert z.grad is not None
        assert bool(z.grad[:, 2].any())
        if not outputs.one_is_right:  # of classes, those that nobody knows are where the background is
            assert not z.grad[:, ~some].any()


# What labels may be, and what is written down


WRONG: list[tuple[Outputs, Tensor, str]] = [
    (classes(3), torch.zeros(4), "float32"),
    (classes(3), torch.tensor([0, 3]), "0 to 2"),
    (classes(3, (2,)), torch.tensor([[0, -1]]), "0 to 2"),
    (classes(3, (2,)), torch.zeros(4, dtype=torch.int64), "shape"),
    (labels(3), torch.zeros(4, 2), "shape"),
    (labels(3), torch.full((4, 3), 2.0), "0 to 1"),
    (values(1), torch.zeros(4), "shape"),
    (values(1), torch.full((4, 1), torch.inf), "NaN"),
]


@pytest.mark.parametrize(("outputs", "given", "said"), WRONG, ids=lambda one: str(one)[:20])
def test_wrong_labels_are_named(outputs: Outputs, given: Tensor, said: str) -> None:
    wrong = outputs.wrong(given, outputs)
    assert wrong is not None
    assert said in wrong
    assert "\n" not in wrong


MADE = [
    classes(3), classes(5, (4, 4), background=0, dice=0.5), classes(9, (7,), score="1/perplexity"),
    labels(3, pos_weight=(1.0, 2.0, 3.0)), labels(2, (4,), score="AUROC"), values(2), values(1, (3, 3), variance=True),
]  # fmt: skip


@pytest.mark.parametrize("outputs", MADE, ids=lambda one: str(one.describe()))
def test_outputs_can_be_written_down_and_travel(outputs: Outputs) -> None:
    again = from_description(outputs.describe())
    assert again.describe() == outputs.describe()
    assert (again.shape, again.metric) == (outputs.shape, outputs.metric)
    assert pickle.loads(pickle.dumps(outputs)).describe() == outputs.describe()
    assert outputs.wrong(outputs.decide(torch.zeros(3, *again.shape)), outputs) is None  # type: ignore[arg-type]


def test_a_kind_or_score_that_is_unknown_is_named() -> None:
    with pytest.raises(ValueError, match="classes, labels, values"):
        from_description({"kind": "boxes"})
    for make in (classes, labels):
        with pytest.raises(ValueError, match="are scored by"):
            make(3, score="beauty")
    assert set(KINDS) == {"classes", "labels", "values"}


def test_groups_are_of_examples_that_are_alike() -> None:
    assert classes(3).groups(torch.tensor([2, 0]), classes(3)).tolist() == [2, 0]
    masks = classes(3, (2, 2), background=0)
    given = torch.tensor([[[0, 0], [0, 2]], [[1, 1], [2, 0]]])
    assert masks.groups(given, masks).tolist() == [2, 1]
    several = torch.tensor([[1.0, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert labels(3).groups(several, labels(3)).tolist() == [0, 1, 0, 3]
    assert values(1).groups(torch.arange(20.0).flip(0)[:, None], values(1)).tolist() == [9 - i // 2 for i in range(20)]
