"""SWAG teachers: models sampled from a Gaussian over the received ones (Maddox et al. 2019; Chen & Chao 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import sqrt

import torch
from torch import Tensor

from feddf.seeds import derive, torch_generator
from feddf.states import is_statistic
from feddf.types import Update


def swag(updates: Sequence[Update], seed: int, *, samples: int = 10, scale: float = 0.5) -> list[Update]:
    """Return ``samples`` models for each prototype that has at least two trained clients.

    With p_k = n_k / Σ n_k, mean m = Σ p_k x_k and deviations d_k = x_k − m,

        x = m + √scale · (√(Σ p_k d_k²) ⊙ z + √(K / (K − 1)) Σ √p_k z'_k d_k),   z, z' ~ N(0, 1):

    for the scale ½ half of the covariance is its diagonal and half its low-rank part, as in SWAG; the clients' models
    take the place of its snapshots along one trajectory (FedDistill). For equal n_k, √(p_k K / (K − 1)) is SWAG's
    1/√(K − 1).

    Only weights are sampled. BatchNorm's statistics are m's; they fit no sample, so a user of one must estimate
    them again, on unlabeled data (``recalibrate``). States are read one tensor at a time.

    Args:
        updates: the updates of a round.
        seed: decides the samples.
        samples: how many models are drawn for each prototype.
        scale: the factor of the Gaussian's covariance.
    """
    if not samples:
        return []
    trained = sorted((update for update in updates if update.n_examples > 0), key=lambda update: update.prototype)
    return [
        sample
        for prototype, group in groupby(trained, key=lambda update: update.prototype)
        for sample in _sample(prototype, list(group), derive(seed, "swag", prototype), samples, scale)
    ]


def _sample(prototype: str, updates: Sequence[Update], seed: int, samples: int, scale: float) -> Iterator[Update]:
    if len(updates) < 2:  # one model has no spread
        return
    total = sum(update.n_examples for update in updates)
    shares = torch.tensor([update.n_examples / total for update in updates], dtype=torch.float64)
    mixes = torch.randn(samples, len(updates), generator=torch_generator(derive(seed, "low rank")), dtype=torch.float64)
    states: list[dict[str, Tensor]] = [{} for _ in range(samples)]
    for key in updates[0].state:
        drawn = _draw(key, updates, shares, mixes, scale, torch_generator(derive(seed, "diagonal", key)))
        for state, tensor in zip(states, drawn, strict=True):
            state[key] = tensor
    n_examples = round(total / len(updates))
    for number, state in enumerate(states):
        yield Update(f"sample {number} of {prototype}", prototype, updates[0].round, state, n_examples)


def _draw(
    key: str, updates: Sequence[Update], shares: Tensor, mixes: Tensor, scale: float, generator: torch.Generator
) -> list[Tensor]:
    """Return one tensor of every sample: two passes over the clients' tensors, one for the mean, one for the rest."""
    first = updates[0].state[key]
    if not first.is_floating_point():
        return [first.clone() for _ in mixes]
    mean = torch.zeros(first.shape, dtype=torch.float64)
    for share, update in zip(shares, updates, strict=True):
        mean += share * update.state[key].to(torch.float64)
    if is_statistic(key):
        return [mean.to(first.dtype) for _ in mixes]
    variance = torch.zeros_like(mean)
    low_rank = torch.zeros((len(mixes), *mean.shape), dtype=torch.float64)
    for column, (share, update) in enumerate(zip(shares, updates, strict=True)):
        deviation = update.state[key].to(torch.float64) - mean
        variance += share * deviation**2
        low_rank += torch.einsum("s,...->s...", mixes[:, column], share.sqrt() * deviation)
    unbiased = sqrt(len(updates) / (len(updates) - 1))
    noise = torch.randn(low_rank.shape, generator=generator, dtype=torch.float64)
    drawn = mean + sqrt(scale) * (variance.sqrt() * noise + unbiased * low_rank)
    return list(drawn.to(first.dtype))
