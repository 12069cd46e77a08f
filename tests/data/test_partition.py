from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from feddf.config import PartitionConfig
from feddf.config.names import PARTITIONS
from feddf.data import partition as module
from feddf.data.partition import by_shards, class_counts, dirichlet, dirichlet_equal, iid, skew, split

Scheme = Callable[..., list[Tensor]]
alphas = st.floats(1e-4, 1e4)


def deal(
    scheme: Scheme, labels: Tensor, clients: int, *, seed: int, n_classes: int = 10, **partition: float
) -> list[Tensor]:
    config = PartitionConfig(**{"min_size": 2, **partition})  # type: ignore[arg-type]
    return scheme(labels, clients, config, n_classes=n_classes, seed=seed)


def shares(labels: Tensor, shards: list[Tensor], n_classes: int) -> np.ndarray:
    counts = np.stack([np.bincount(labels[shard], minlength=n_classes) for shard in shards])
    return counts / counts.sum(axis=1, keepdims=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=40, max_size=200), st.integers(1, 12), alphas, st.integers(0, 99))
def test_every_example_is_in_exactly_one_shard(labels: list[int], clients: int, alpha: float, seed: int) -> None:
    shards = deal(dirichlet, torch.tensor(labels), clients, alpha=alpha, min_size=3, n_classes=9, seed=seed)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(len(labels)))
    assert len(shards) == clients
    assert min(len(shard) for shard in shards) >= 3


@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 99))
def test_iid_shards_are_exact_and_even(n: int, clients: int, seed: int) -> None:
    shards = deal(iid, torch.zeros(n), clients, n_classes=1, seed=seed)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(n))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("name", PARTITIONS)
def test_the_seed_decides(name: str) -> None:
    labels = torch.arange(500) % 10
    clients = 20 if name == "groups" else 5  # of ten groups, each has one
    one, same, other = (deal(PARTITIONS[name], labels, clients, alpha=0.5, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_seed_decides_the_mixes_and_who_gets_which_example_of_a_class() -> None:
    labels = torch.arange(500) % 10
    skewed = [class_counts(labels, deal(dirichlet, labels, 5, alpha=0.5, seed=seed), 10) for seed in (1, 2)]
    assert not np.array_equal(*skewed)
    even = [deal(dirichlet, labels, 5, alpha=1e9, seed=seed) for seed in (1, 2)]
    assert np.array_equal(*(class_counts(labels, shards, 10) for shards in even))
    assert not torch.equal(even[0][0], even[1][0])


def test_there_may_be_just_enough_examples() -> None:
    labels = torch.arange(12) % 3
    assert [len(one) for one in deal(dirichlet, labels, 6, alpha=0.1, n_classes=3, seed=0)] == [2] * 6
    assert [len(one) for one in deal(by_shards, labels, 6, classes_per_client=2, n_classes=3, seed=0)] == [2] * 6


def test_alpha_goes_from_one_class_a_client_to_the_same_mix_for_all() -> None:
    labels = torch.arange(20_000) % 10
    top = {
        alpha: shares(labels, deal(dirichlet, labels, 20, alpha=alpha, seed=0), 10).max(axis=1).mean()
        for alpha in (0.01, 0.1, 1.0, 100.0)
    }
    assert top[0.01] > 0.8
    assert top[0.01] > top[0.1] > top[1.0] > top[100.0]
    assert top[100.0] < 0.15


def expected_top_share(alpha: float, n_classes: int = 10, draws: int = 50_000) -> float:
    """E[max q] for q ~ Dir(α, ..., α): normalized Gamma(α) variables, in logarithms so that no small α underflows.

    Gamma(α) is Gamma(α + 1) · U^(1/α) for U uniform in (0, 1).
    """
    random = np.random.default_rng(7)
    uniform = 1 - random.random((draws, n_classes))
    logarithms = np.log(random.gamma(alpha + 1, size=(draws, n_classes))) + np.log(uniform) / alpha
    gammas = np.exp(logarithms - logarithms.max(axis=1, keepdims=True))
    return float((gammas / gammas.sum(axis=1, keepdims=True)).max(axis=1).mean())


def dealt_top_share(alpha: float) -> float:
    """The mean share of a client's largest class, over 4,000 clients of 250 examples on average."""
    labels = torch.arange(250_000) % 10
    dealt = [deal(dirichlet, labels, 1_000, alpha=alpha, seed=seed) for seed in range(4)]
    return float(np.mean([shares(labels, shards, 10).max(axis=1).mean() for shards in dealt]))


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 10.0, 100.0])
def test_alpha_is_read_per_class(alpha: float) -> None:
    """With many clients dealing out whole classes changes no mix, so a client's is a draw of Dir(α, ..., α)."""
    smaller, right, larger = (expected_top_share(factor * alpha) for factor in (0.1, 1, 10))
    tolerance = min(smaller - right, right - larger) / 4
    assert abs(dealt_top_share(alpha) - right) < tolerance
    for wrong in (alpha / 10, alpha * 10):
        assert abs(dealt_top_share(wrong) - right) > tolerance


def test_large_alpha_follows_the_prior_of_unbalanced_classes() -> None:
    labels = torch.cat([torch.zeros(9_000), torch.ones(1_000)]).long()
    mixes = shares(labels, deal(dirichlet, labels, 4, alpha=1e4, n_classes=2, seed=3), 2)
    np.testing.assert_allclose(mixes[:, 0], 0.9, atol=0.02)


def test_impossible_requests_say_why() -> None:
    with pytest.raises(ValueError, match="Input should be greater than 0"):
        PartitionConfig(alpha=0.0)
    with pytest.raises(ValueError, match="6 clients of at least 2 examples need 12, and there are 10"):
        deal(dirichlet, torch.zeros(10).long(), 6, alpha=1.0, n_classes=1, seed=0)


@given(st.integers(1, 300), st.floats(0, 0.99), st.integers(0, 9))
def test_split_is_exact(n: int, share: float, seed: int) -> None:
    rest, held_out = split(n, share, seed)
    assert torch.equal(torch.cat([rest, held_out]).sort().values, torch.arange(n))
    assert len(held_out) == round(share * n)


@pytest.mark.parametrize("clients", [7, 20, 25])
@pytest.mark.parametrize("alpha", [0.01, 1.0, 100.0])
def test_the_released_scheme_gives_equal_shards_of_all_examples(alpha: float, clients: int) -> None:
    labels = torch.arange(2000) % 10
    shards = deal(dirichlet_equal, labels, clients, alpha=alpha, seed=3)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(2000))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    again = deal(dirichlet_equal, labels, clients, alpha=alpha, seed=3)
    assert all(torch.equal(one, two) for one, two in zip(shards, again, strict=True))


def test_the_released_scheme_softens_alpha() -> None:
    """At α = 0.01 and 20 clients of 2,250 the mean top-class share is 0.65 to 0.87, below the paper's scheme."""
    labels = torch.arange(45_000) % 10
    shares = {
        scheme: np.mean(
            [
                skew(class_counts(labels, deal(scheme, labels, 20, alpha=0.01, seed=seed), 10)).top_class_share
                for seed in range(5)
            ]
        )
        for scheme in (dirichlet, dirichlet_equal)
    }
    assert 0.65 <= shares[dirichlet_equal] <= 0.87 < shares[dirichlet]


@given(st.integers(2, 12), st.integers(1, 4), st.integers(0, 99))
def test_shards_give_each_client_about_so_many_classes(clients: int, per_client: int, seed: int) -> None:
    labels = torch.arange(600) % 10
    shards = deal(by_shards, labels, clients, classes_per_client=per_client, seed=seed)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(600))
    pieces_of_a_class = clients * per_client / 10
    if pieces_of_a_class >= 1:  # a piece lies in two classes at the most
        assert all(len(set(labels[shard].tolist())) <= 2 * per_client for shard in shards)


def test_shards_that_divide_the_classes_have_exactly_so_many() -> None:
    labels = torch.arange(1000) % 10
    counts = class_counts(labels, deal(by_shards, labels, 10, classes_per_client=1, seed=0), 10)
    assert (counts > 0).sum(axis=1).tolist() == [1] * 10
    with pytest.raises(ValueError, match="600 clients of 2 pieces need more than 1000 examples"):
        deal(by_shards, labels, 600, classes_per_client=2, seed=0)


def test_skew_says_what_it_should_at_the_extremes() -> None:
    even = skew(np.full((4, 10), 7))
    assert (even.top_class_share, even.smallest, even.largest, even.absent) == (pytest.approx(0.1), 70, 70, 0)
    assert even.effective_classes == pytest.approx(10)
    single = skew(np.eye(3, 5, dtype=np.int64) * 9)
    assert (single.top_class_share, single.effective_classes, single.absent) == (1.0, 1.0, 2)
    assert skew(np.array([[4, 4], [0, 0]])).smallest == 0


def test_the_released_scheme_deals_to_groups_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def recorded(members: np.ndarray, labels: np.ndarray, clients: int, *rest: object) -> list[np.ndarray]:
        seen.append((len(members), clients))
        return np.array_split(members, clients)

    monkeypatch.setattr(module, "_dealt_fairly", recorded)
    deal(dirichlet_equal, torch.arange(2500) % 10, 25, alpha=1.0, seed=0)
    assert seen == [(1000, 10), (1000, 10), (500, 5)]


@given(st.floats(0.2, 10), st.integers(2, 10), st.integers(0, 99))
def test_in_a_group_who_has_a_fair_share_gets_no_further_class(alpha: float, clients: int, seed: int) -> None:
    """And the smallest has half the mean, as in the released code, which draws again until it has."""
    labels = np.arange(600) % 10
    fair = 600 / clients
    dealt = module._dealt_fairly(np.arange(600), labels, clients, alpha, 10, np.random.default_rng(seed))
    counts = np.stack([np.bincount(labels[shard], minlength=10) for shard in dealt])
    before_the_last = [row.sum() - row[np.flatnonzero(row)[-1]] for row in counts]
    assert max(before_the_last) < fair
    assert counts.sum(axis=1).min() >= fair / 2
    assert counts.sum() == 600


@pytest.mark.parametrize(("sizes", "filled"), [([0, 9, 8], [4, 7, 6]), ([0, 100, 10], [4, 96, 10])])
def test_a_small_shard_takes_from_the_largest_half_of_what_it_can_spare(sizes: list[int], filled: list[int]) -> None:
    shards = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    found = module._fill_up(shards, 4, np.random.default_rng(0))
    assert [len(shard) for shard in found] == filled
    assert sorted(np.concatenate(found)) == list(range(sum(sizes)))


def test_skew_leaves_out_who_has_nothing() -> None:
    found = skew(np.array([[0, 0, 0], [1, 0, 0], [5, 5, 0], [9, 0, 0]]))
    assert found.top_class_share == pytest.approx((1 + 0.5 + 1) / 3)
    assert found.effective_classes == pytest.approx((1 + 2 + 1) / 3)
    assert (found.smallest, found.median, found.largest, found.absent) == (0, 5.0, 10, 1)
