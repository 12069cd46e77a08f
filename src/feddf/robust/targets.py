"""Ensembles that a few hostile teachers cannot speak for: targets, and trust in teachers that is kept over rounds.

A target here collects all votes before it answers, since a median cannot be streamed: n teachers × inputs × classes.
Trust is one number for each client, which :func:`feddf.robust.trust.trusted` keeps in the server's memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from feddf.outputs import Outputs, classes
from feddf.robust.rules import assumed
from feddf.runtime.device import accumulation_dtype
from feddf.types import WeightedLogits


def geometric_median(votes: Iterable[WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()) -> Tensor:
    """Return the geometric median of the teachers' probabilities for each input (Weiszfeld's iteration), weighted."""
    logits, given = _stacked(votes)
    probabilities = torch.stack([outputs.probabilities(one / temperature) for one in logits])
    return _geometric_median(probabilities, _of_inputs(given, probabilities)).float()


def cronus(votes: Iterable[WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()) -> Tensor:
    """Return averaged probabilities without those that stand out (Cronus: Chang et al. 2019; Diakonikolas et al. 2017).

    For every input, f times: the teacher whose answer is farthest from the mean along the direction in which the
    answers differ most is left out. Teachers' weights are not used: the filter counts answers.
    """
    logits, _ = _stacked(votes)
    probabilities = torch.stack([outputs.probabilities(one / temperature) for one in logits])
    left = torch.ones_like(probabilities[..., 0])
    for _ in range(assumed(len(probabilities))):
        off = probabilities - _mean_of(probabilities, left)
        covariance = torch.einsum("kn,knc,knd->ncd", left, off, off)
        direction = torch.linalg.eigh(covariance).eigenvectors[..., -1]
        distance = (off * direction).sum(dim=-1).abs().masked_fill(left == 0, -1)
        left.scatter_(0, distance.argmax(dim=0, keepdim=True), 0.0)
    return _mean_of(probabilities, left).float()


# What trust is made of


def mixture_weights(probabilities: Tensor, labels: Tensor, prior: float = 0.1, steps: int = 200) -> Tensor:
    """Return how much each teacher counts in the mixture Σ_k w_k p_k(y | x) that fits labeled examples best.

    The weights maximize Σ_i log Σ_k w_k p_k(y_i | x_i) + (βN/K) Σ_k log w_k by expectation and maximization: a teacher
    counts by the examples that it explains better than others do. β is ``prior``: with it nobody is at zero. The
    function is concave, so there is one maximum, and hostile teachers have no way to gain but to explain the examples.

    >>> right, wrong = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.1, 0.9]])
    >>> mixture_weights(torch.stack([right, wrong]), torch.tensor([0]), steps=2000).round(decimals=2).tolist()
    [0.95, 0.05]
    """
    likely = probabilities[:, torch.arange(len(labels)), labels].to(torch.float64).clamp_min(1e-12)
    count, n = likely.shape
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    for _ in range(steps):
        shares = weights[:, None] * likely
        explained = (shares / shares.sum(dim=0)).sum(dim=1)
        weights = (explained + prior * n / count) / (n + prior * n)
    return weights


def outlier_scores(probabilities: Tensor, trust: Tensor) -> Tensor:
    """Return o_k in [0, 1]: a teacher's mean distance (total variation) from the geometric median of all answers."""
    weights = trust.to(torch.float64)[:, None].expand(probabilities.shape[:2])
    center = _geometric_median(probabilities.to(torch.float64), weights)
    return (probabilities - center).abs().sum(dim=-1).mean(dim=-1) / 2


def _stacked(votes: Iterable[WeightedLogits]) -> tuple[Tensor, list[Tensor | float]]:
    given = list(votes)
    if not given:
        raise ValueError("an ensemble needs at least one teacher")
    return torch.stack([vote.logits.to(accumulation_dtype(vote.logits.device)) for vote in given]), [
        vote.weight for vote in given
    ]


def _of_inputs(weights: list[Tensor | float], like: Tensor) -> Tensor:
    """Return a weight for each teacher and input; those for classes are averaged over the teacher's own answer."""
    rows: list[Tensor] = []
    for weight, probabilities in zip(weights, like, strict=True):
        given = torch.as_tensor(weight, dtype=like.dtype, device=like.device).expand(probabilities.shape)
        rows.append((given * probabilities).sum(dim=-1))
    return torch.stack(rows)


def _mean_of(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights[..., None]).sum(dim=0) / weights.sum(dim=0)[..., None].clamp_min(1e-30)


def _geometric_median(values: Tensor, weights: Tensor, steps: int = 30) -> Tensor:
    center = _mean_of(values, weights)
    for _ in range(steps):
        inverse = weights / (values - center).norm(dim=-1).clamp_min(1e-6)
        center = _mean_of(values, inverse)
    return center
