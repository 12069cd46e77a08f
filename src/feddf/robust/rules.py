"""Averages that a few hostile clients cannot move far: rules for the weights that a fusion starts from.

Each rule looks at the changes Δ_k = x̂_k − x of n updates, of which up to f may be anything. Norm clipping and Krum
choose coefficients c_k of x + Σ c_k Δ_k, and need nothing but the inner products ⟨Δ_i, Δ_j⟩; these are summed up tensor
by tensor, so that updates may stay on disk. The median and the trimmed mean go coordinate by coordinate, again one
tensor at a time. Counters (integer buffers) are the largest of all, as in the plain average.

Norms and distances are over parameters. BatchNorm's running statistics are most of ‖Δ_k‖² in the first rounds, and a
hostile change of the parameters would hide behind them; they are averaged coordinate by coordinate, trimmed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil

import torch
from torch import Tensor

from feddf.fusion.average import trained
from feddf.fusion.select import Dropped
from feddf.states import is_statistic, weighted_mean
from feddf.types import Rule, State, Update

Columns = Callable[[Tensor, int], Tensor]
"""(a row for each update, f) -> one row."""

ASSUMED = 0.25  # the share of hostile clients that the rules assume
MOST_EXAMPLES_OF_MEDIAN = 10.0  # times the cohort's median is the most that an n_k counts: it is a client's claim


def assumed(n: int) -> int:
    """Return f for n clients: a quarter of them, rounded up, and always less than half.

    >>> [assumed(n) for n in (1, 2, 3, 10, 20)]
    [0, 0, 1, 3, 5]
    """
    return min(ceil(ASSUMED * n), (n - 1) // 2)


# Coefficients, from the inner products of the changes


def norm_clipping(products: Tensor, weights: Tensor) -> Tensor:
    """Return c_k = w_k min(1, m / ‖Δ_k‖), m the median norm: none moves the average further than the median client.

    Sun et al., "Can You Really Backdoor Federated Learning?" (2019), with the cohort's median for the threshold.

    >>> norm_clipping(torch.diag(torch.tensor([1.0, 1.0, 1e4])), torch.ones(3))
    tensor([1.0000, 1.0000, 0.0100])
    """
    norms = products.diagonal().clamp_min(0).sqrt()
    return weights * (norms.median() / norms.clamp_min(1e-30)).clamp_max(1)


def krum(products: Tensor, weights: Tensor) -> Tensor:
    """Return 1 for the update that is nearest to its n − f − 1 nearest others (Blanchard et al. 2017), else 0."""
    n = len(products)
    squares = products.diagonal()
    distances = (squares[:, None] + squares[None, :] - 2 * products).clamp_min(0).fill_diagonal_(0)
    scores = distances.sort(dim=1).values[:, 1 : max(2, n - assumed(n))].sum(dim=1)
    chosen = torch.zeros(n, dtype=products.dtype)
    chosen[scores.argmin()] = 1
    return chosen


def change_products(previous: State, updates: Sequence[Update]) -> Tensor:
    """Return ⟨Δ_i, Δ_j⟩ in float64, one tensor of the states at a time."""
    products = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for rows in _changes(previous, [update.state for update in updates]):
        products += rows @ rows.T
    return products


def change_norms(previous: State, states: Sequence[State]) -> Tensor:
    """Return ‖state − previous‖ of each state, in float64."""
    squares = torch.zeros(len(states), dtype=torch.float64)
    for rows in _changes(previous, states):
        squares += rows.square().sum(dim=1)
    return squares.sqrt()


def _changes(previous: State, states: Sequence[State]) -> Iterator[Tensor]:
    """Yield the changes of every parameter (floating tensors but running statistics), a row for each state.

    In the order of the tensors' names: a state that was read from a file has its tensors in any order, and a sum that
    follows it would differ in its last bit between a run and a resumed one.
    """
    for key in sorted(previous):
        before = previous[key]
        if before.is_floating_point() and before.numel() and not is_statistic(key):
            tensors = [state[key].to(torch.float64) - before.to(torch.float64) for state in states]
            yield torch.stack([tensor.flatten() for tensor in tensors])


def example_weights(updates: Sequence[Update]) -> Tensor:
    """Return n_k / Σ n_k, each n_k counted as at most :data:`MOST_EXAMPLES_OF_MEDIAN` times the median of all."""
    counts = torch.tensor([float(update.n_examples) for update in updates], dtype=torch.float64)
    bounded = counts.clamp_max(MOST_EXAMPLES_OF_MEDIAN * counts.median())
    return bounded / bounded.sum()


def by_coefficients(choose: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Return the rule x + Σ c_k Δ_k; ``choose`` makes the c_k of the changes' inner products and n_k / Σ n_k.

    For coefficients like these it is a mean of x and the updates. Running statistics are trimmed means.
    """

    def rule(previous: State, updates: Sequence[Update]) -> State:
        if not (used := trained(updates)):
            return previous
        return moved(previous, used, choose(change_products(previous, used), example_weights(used)))

    return rule


def moved(previous: State, updates: Sequence[Update], coefficients: Tensor) -> State:
    """Return x + Σ c_k Δ_k; running statistics are trimmed means."""
    rest = max(0.0, 1 - float(coefficients.sum()))
    mean = weighted_mean([previous, *(update.state for update in updates)], [rest, *coefficients.tolist()])
    statistics = [key for key in mean if is_statistic(key) and mean[key].is_floating_point()]
    return {**mean, **{key: _by_column(trimmed_mean, key, updates, assumed(len(updates))) for key in statistics}}


def _by_column(columns: Columns, key: str, updates: Sequence[Update], f: int) -> Tensor:
    """Return what ``columns`` makes of one floating tensor of the updates."""
    first = updates[0].state[key]
    rows = torch.stack([update.state[key].to(torch.float64).flatten() for update in updates])
    return columns(rows, f).reshape(first.shape).to(first.dtype)


clipped_average = by_coefficients(norm_clipping)
by_krum = by_coefficients(krum)


# Coordinate by coordinate


def coordinate_median(values: Tensor, f: int) -> Tensor:
    """Return the median of every column; of an even number, the mean of the two in the middle (Yin et al. 2018)."""
    ordered, n = values.sort(dim=0).values, len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed_mean(values: Tensor, f: int) -> Tensor:
    """Return the mean of every column without its f smallest and f largest values (Yin et al. 2018).

    >>> trimmed_mean(torch.tensor([[1.0], [2.0], [3.0], [1e9]]), 1)
    tensor([2.5000])
    """
    return values.sort(dim=0).values[f : len(values) - f].mean(dim=0)


def by_coordinate(columns: Columns) -> Rule:
    """Return a rule that treats every coordinate by itself."""

    def rule(previous: State, updates: Sequence[Update]) -> State:
        if not (used := trained(updates)):
            return previous
        return {
            key: _by_column(columns, key, used, assumed(len(used)))
            if before.is_floating_point()
            else torch.stack([update.state[key] for update in used]).amax(dim=0)
            for key, before in previous.items()
        }

    return rule


median = by_coordinate(coordinate_median)
trimmed = by_coordinate(trimmed_mean)


def lowest(accuracies: Mapping[str, float], n_classes: float, n_examples: int) -> Dropped:
    """A filter against hostile clients: the f clients with the lowest accuracies, f as in the robust rules."""
    order = sorted(accuracies, key=lambda client: (accuracies[client], client))
    return Dropped(frozenset(order[: assumed(len(order))]))
