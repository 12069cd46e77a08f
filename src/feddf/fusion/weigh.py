"""How much each teacher counts. The paper's ensemble is uniform; these are the alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from feddf.types import Update

Weight = Callable[[Tensor], Tensor | float]
"""A teacher's logits -> how much they count (see :class:`feddf.types.Vote`)."""

Weigh = Callable[[Sequence[Update]], Mapping[str, Weight]]
"""The teachers -> the weight of each, by its id. Weights travel to workers, so they are no closures."""


def uniform(teachers: Sequence[Update]) -> dict[str, Weight]:
    """w_k = 1, as in the paper."""
    return {teacher.client_id: partial(_constant, 1.0) for teacher in teachers}


def by_examples(teachers: Sequence[Update]) -> dict[str, Weight]:
    """w_k = n_k, the number of examples that the teacher learned from."""
    return {
        teacher.client_id: partial(_constant, weight)
        for teacher, weight in zip(teachers, _positive([teacher.n_examples for teacher in teachers]), strict=True)
    }


def by_certainty(teachers: Sequence[Update]) -> dict[str, Weight]:
    """w_k(d) = exp(−H(σ(z_k(d)))) for every sample d: one over the number of classes that it wavers between."""
    return {teacher.client_id: certainty for teacher in teachers}


def by_class_counts(teachers: Sequence[Update], *, n_classes: int) -> dict[str, Weight]:
    """w_k(c) = n_kc, the number of examples of class c that the teacher learned from, where it discloses them.

    A teacher that does not is taken to have n_k / M of each; a class that nobody has gets equal weights.
    """
    rows = torch.stack([_counts(teacher, n_classes) for teacher in teachers])
    rows[:, rows.sum(dim=0) <= 0] = 1.0
    return {teacher.client_id: partial(_constant, row) for teacher, row in zip(teachers, rows, strict=True)}


def by_accuracy(
    teachers: Sequence[Update], *, examine: Callable[[Sequence[Update]], Mapping[str, float]]
) -> dict[str, Weight]:
    """w_k = the teacher's accuracy on the server's validation data, which ``examine`` measures."""
    accuracies = examine(teachers)
    weights = _positive([accuracies[teacher.client_id] for teacher in teachers])
    return {t.client_id: partial(_constant, weight) for t, weight in zip(teachers, weights, strict=True)}


def certainty(logits: Tensor) -> Tensor:
    """Return exp(−H(σ(logits))) of each row, between 1/M and 1."""
    logs = logits.to(torch.float64).log_softmax(dim=-1)
    return (logs.exp() * logs).sum(dim=-1, keepdim=True).exp()


def _positive(weights: Sequence[float]) -> list[float]:
    """Return the weights, or equal ones where all are zero."""
    return [float(weight) for weight in weights] if any(weights) else [1.0] * len(weights)


def _constant(weight: Tensor | float, logits: Tensor) -> Tensor | float:
    return weight


def _counts(teacher: Update, classes: int) -> Tensor:
    if teacher.class_counts is None or len(teacher.class_counts) != classes:
        return torch.full((classes,), teacher.n_examples / classes, dtype=torch.float64)
    return torch.tensor(teacher.class_counts, dtype=torch.float64)
