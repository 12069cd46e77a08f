"""How much each teacher counts. The paper's ensemble is uniform; these are the alternatives.

Each is a function ``(teachers, resources, accuracies)`` that returns a weight for every teacher, by its id;
``accuracies(teachers)`` measures them on the server's validation data. Weights travel to workers, so those that are
functions are functions of a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from feddf.evaluate import Accuracies, Teacher
from feddf.fusion.class_counts import counts_of, number_of_classes
from feddf.outputs import CHANNELS
from feddf.runtime.device import accumulation_dtype
from feddf.types import Resources, Weight


def uniform(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k = 1, as in the paper."""
    return {teacher.id: 1.0 for teacher in teachers}


def by_examples(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k = n_k, the number of examples that the teacher learned from."""
    return _positive({teacher.id: float(teacher.n_examples) for teacher in teachers})


def by_certainty(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k(d) = exp(−H(σ(z_k(d)))) for every sample d: one over the number of classes that it wavers between."""
    return {teacher.id: certainty for teacher in teachers}


def by_class_counts(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k(c) = n_kc, the number of examples of class c that the teacher learned from, where it discloses them.

    A teacher that does not is taken to have n_k / M of each; a class that nobody has gets equal weights.
    """
    known = resources.validation.n_classes if resources.validation is not None else None
    n_classes = known or number_of_classes(teachers)
    if not n_classes:
        return by_examples(teachers, resources, accuracies)
    rows = torch.stack([counts_of(teacher, n_classes) for teacher in teachers])
    rows[:, rows.sum(dim=0) <= 0] = 1.0
    return {teacher.id: row for teacher, row in zip(teachers, rows, strict=True)}


def by_accuracy(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k = the teacher's accuracy on the server's validation data."""
    return _positive(accuracies(teachers))


def certainty(logits: Tensor) -> Tensor:
    """Return exp(−H(σ(logits))) of each row, between 1/M and 1."""
    logs = logits.to(accumulation_dtype(logits.device)).log_softmax(dim=CHANNELS)
    return (logs.exp() * logs).sum(dim=CHANNELS, keepdim=True).exp()


def _positive(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights, or equal ones where all are zero."""
    return dict(weights) if any(weights.values()) else dict.fromkeys(weights, 1.0)
