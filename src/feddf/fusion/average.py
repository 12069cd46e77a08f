"""Averaging of weights: the start of every fusion, and all of FedAvg."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from feddf.fusion.class_counts import counts_of, number_of_classes
from feddf.states import weighted_mean
from feddf.types import Fused, Fusion, Rule, ServerState, State, Update


def fedavg(rule: Rule) -> Fusion:
    """FedAvg (McMahan et al. 2017), per prototype: the next model is the weighted average of its clients' models."""

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        averaged = average_by_prototype(rule, server, updates)
        return Fused(server.next(averaged), averaged)

    return fuse


def average(previous: State, updates: Sequence[Update]) -> State:
    """Return Σ n_k x̂_k / Σ n_k over the updates of one prototype (line 11 of Algorithm 3).

    BatchNorm's running statistics are averaged like weights (``docs/decisions/batchnorm.md``).
    Without any trained update the prototype keeps its previous weights.
    """
    trained = [update for update in updates if update.n_examples > 0]
    if not trained:
        return previous
    return weighted_mean([update.state for update in trained], [update.n_examples for update in trained])


def uniform_average(previous: State, updates: Sequence[Update]) -> State:
    """Return the plain mean of the trained updates: what the released code does instead of weighting by n_k."""
    trained = [update for update in updates if update.n_examples > 0]
    return weighted_mean([update.state for update in trained], [1] * len(trained)) if trained else previous


def class_average(previous: State, updates: Sequence[Update]) -> State:
    """Return the average in which the last layer's row of class c is Σ n_kc x̂_kc / Σ n_kc: of those who have seen it.

    With a loss that is adjusted by a client's own class prior, the row of a class that the client lacks hardly moves,
    so that FedAvg's average of a rare class's row is mostly of rows that nobody has trained. All else, and the row of
    a class that nobody has, is averaged as in :func:`average`. The last layer is the only linear one with a row and a
    bias for each class; where there are several, or none, it is averaged like the others.
    """
    averaged = average(previous, updates)
    trained = [update for update in updates if update.n_examples > 0]
    n_classes = number_of_classes(trained)
    layer = _last_layer(averaged, n_classes)
    if not layer:
        return averaged
    counts = torch.stack([counts_of(update, n_classes) for update in trained])
    counts[:, counts.sum(dim=0) <= 0] = torch.tensor([[float(update.n_examples)] for update in trained]).double()
    rows = {key: _row_mean([update.state[key] for update in trained], counts) for key in layer}
    return {**averaged, **rows}


def _last_layer(state: State, n_classes: int) -> tuple[str, ...]:
    """Return the names of the last layer's weight and bias, whatever order the state is in; none if that is unclear."""
    pairs = [(key, key.removesuffix("weight") + "bias") for key in state if key.endswith("weight")]
    layers = [
        (weight, bias)
        for weight, bias in pairs
        if bias in state and state[weight].ndim == 2 and len(state[weight]) == n_classes == state[bias].numel()
    ]
    return layers[0] if len(layers) == 1 else ()


def _row_mean(tensors: Sequence[Tensor], counts: Tensor) -> Tensor:
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, count in zip(tensors, counts, strict=True):
        total += tensor.to(torch.float64) * count.view(-1, *[1] * (tensor.ndim - 1))
    return (total / counts.sum(dim=0).view(-1, *[1] * (total.ndim - 1))).to(tensors[0].dtype)


def average_by_prototype(rule: Rule, server: ServerState, updates: Sequence[Update]) -> dict[str, State]:
    """Apply a rule within each prototype's group of clients (lines 9 to 11 of Algorithm 3).

    Args:
        rule: how the weights of one prototype's clients are averaged, for example :func:`average`.
        server: the state whose models a prototype without updates keeps.
        updates: the updates of a round, of all prototypes.
    """
    return {
        prototype: rule(previous, [update for update in updates if update.prototype == prototype])
        for prototype, previous in sorted(server.models.items())
    }
