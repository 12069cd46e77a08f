"""Ensembles that a few hostile teachers cannot speak for: targets, and trust in teachers that is kept over rounds.

A target here collects all votes before it answers, since a median cannot be streamed: n teachers × inputs × classes.
Trust is one number for each client, which :func:`feddf.robust.trust.trusted` keeps in the server's memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from feddf.fusion.ensemble import avg_logits
from feddf.robust.rules import assumed
from feddf.runtime.device import wide
from feddf.types import Vote


def clipped_logits(votes: Iterable[Vote], temperature: float = 1.0) -> Tensor:
    """AvgLogits with every teacher's answer, less its mean, no longer than the median answer to the same input.

    >>> loud = [Vote(torch.tensor([[1.0, -1.0]])), Vote(torch.tensor([[1.0, -1.0]])), Vote(torch.tensor([[-9e3, 9e3]]))]
    >>> clipped_logits(loud).argmax().item(), avg_logits(loud).argmax().item()
    (0, 1)
    """
    logits, weights = _stacked(votes)
    centred = logits - logits.mean(dim=-1, keepdim=True)
    lengths = centred.norm(dim=-1, keepdim=True)
    shorter = centred * (lengths.median(dim=0).values / lengths.clamp_min(1e-30)).clamp_max(1)
    return avg_logits(map(Vote, shorter, weights), temperature)


def tempered_logits(votes: Iterable[Vote], temperature: float = 1.0) -> Tensor:
    """AvgLogits with a temperature for each teacher: one whose logits are larger than the median teacher's is cooled.

    T_k = max(1, s_k / median_j s_j), s_k the root of the teacher's mean squared (centred) logit over all inputs.
    """
    logits, weights = _stacked(votes)
    centred = logits - logits.mean(dim=-1, keepdim=True)
    scales = centred.square().mean(dim=(1, 2)).sqrt()
    temperatures = (scales / scales.median().clamp_min(1e-30)).clamp_min(1)
    return avg_logits(map(Vote, centred / temperatures[:, None, None], weights), temperature)


def geometric_median(votes: Iterable[Vote], temperature: float = 1.0, steps: int = 30) -> Tensor:
    """Return the geometric median of the teachers' probabilities for each input (Weiszfeld's iteration), weighted."""
    logits, given = _stacked(votes)
    probabilities = (logits / temperature).softmax(dim=-1)
    return _geometric_median(probabilities, _of_inputs(given, probabilities), steps).float()


def cronus(votes: Iterable[Vote], temperature: float = 1.0) -> Tensor:
    """Return averaged probabilities without those that stand out (Cronus: Chang et al. 2019; Diakonikolas et al. 2017).

    For every input, f times: the teacher whose answer is farthest from the mean along the direction in which the
    answers differ most is left out. Teachers' weights are not used: the filter counts answers.
    """
    logits, _ = _stacked(votes)
    probabilities = (logits / temperature).softmax(dim=-1)  # teachers × inputs × classes
    left = torch.ones_like(probabilities[..., 0])
    for _ in range(assumed(len(probabilities))):
        off = probabilities - _mean_of(probabilities, left)
        covariance = torch.einsum("kn,knc,knd->ncd", left, off, off)
        direction = torch.linalg.eigh(covariance).eigenvectors[..., -1]
        distance = (off * direction).sum(dim=-1).abs().masked_fill(left == 0, -1)
        left.scatter_(0, distance.argmax(dim=0, keepdim=True), 0.0)
    return _mean_of(probabilities, left).float()


def median_scores(votes: Iterable[Vote], temperature: float = 1.0) -> Tensor:
    """FedRAD (Sturluson et al. 2021): a teacher counts by how often its logit is the median, over inputs and classes.

    Deviation: of an even number of teachers the lower of the two in the middle is the median.
    """
    logits, _ = _stacked(votes)
    holders = logits.median(dim=0).indices.flatten()
    scores = torch.bincount(holders, minlength=len(logits)).to(torch.float64)
    return avg_logits((Vote(one, float(score)) for one, score in zip(logits, scores, strict=True)), temperature)


# What trust is made of


def mixture_weights(probabilities: Tensor, labels: Tensor, prior: float = 0.1, steps: int = 200) -> Tensor:
    """Return how much each teacher counts in the mixture Σ_k w_k p_k(y | x) that fits labelled examples best.

    The weights maximise Σ_i log Σ_k w_k p_k(y_i | x_i) + (βN/K) Σ_k log w_k by expectation and maximisation: a teacher
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
    centre = _geometric_median(probabilities.to(torch.float64), weights)
    return (probabilities - centre).abs().sum(dim=-1).mean(dim=-1) / 2


def _stacked(votes: Iterable[Vote]) -> tuple[Tensor, list[Tensor | float]]:
    given = list(votes)
    if not given:
        raise ValueError("an ensemble needs at least one teacher")
    return torch.stack([vote.logits.to(wide(vote.logits.device)) for vote in given]), [vote.weight for vote in given]


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
    centre = _mean_of(values, weights)
    for _ in range(steps):
        inverse = weights / (values - centre).norm(dim=-1).clamp_min(1e-6)
        centre = _mean_of(values, inverse)
    return centre
