"""Class counts as a payload: clients that tell how many examples they have of each class, for weights and averages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mode
from typing import Protocol

import torch
from torch import Tensor, nn

from feddf.types import Form, Job, Part, Payload, Reply, Resources, Sent, Steps, TensorForm, Training

CLASS_COUNTS = "class counts"
"""What n_kc, the number of a client's examples of each class, is called in a payload."""

MOST_OF_A_CLASS = 1e9
"""Beyond it a sum of counts could overflow and add up to anything."""


class Counted(Protocol):
    """An update or a teacher: something that learned from examples and may have told how many of each class."""

    @property
    def n_examples(self) -> int:
        """n_k."""
        ...

    @property
    def payload(self) -> Payload:
        """What came beside the weights."""
        ...


def tell(model: nn.Module, training: Training) -> Steps:
    """Tell the server how many examples of each class the client has."""
    counts = torch.bincount(training.labels.flatten(), minlength=training.outputs.channels or 0)
    return Steps(finish=lambda: Sent(payload={CLASS_COUNTS: {"counts": counts}}))


def form(job: Job, *, n_classes: int | None) -> Form:
    """Ask for one count for each class; where the server does not know how many there are, the clients do."""
    return {CLASS_COUNTS: {"counts": TensorForm((n_classes,), torch.int64, 0, MOST_OF_A_CLASS)}}


def complaint(reply: Reply) -> str | None:
    """Return what is wrong with a client's counts: they must add up to its n_k."""
    total = int(reply.payload[CLASS_COUNTS]["counts"].sum())
    return None if total == reply.n_examples else f"its class counts do not add up to its n_k = {reply.n_examples}"


def class_counts(resources: Resources) -> Part:
    """Return the part of a method that weighs or averages by n_kc."""
    return Part(half=tell, form=partial(form, n_classes=resources.outputs.channels), complaint=complaint)


def told(update: Counted) -> Tensor | None:
    """Return the counts that a client told, if it did."""
    return update.payload[CLASS_COUNTS]["counts"] if CLASS_COUNTS in update.payload else None


def number_of_classes(updates: Sequence[Counted]) -> int:
    """Return the number of classes that most clients have counted; 0 where none has."""
    lengths = [len(counts) for update in updates if (counts := told(update)) is not None]
    return mode(lengths) if lengths else 0


def counts_of(update: Counted, classes: int) -> Tensor:
    """Return n_kc of every class c, or n_k / M where the client does not tell.

    They are scaled to n_k, which may be less than the client said (:func:`feddf.robust.guard.bounded_counts`).
    """
    counts = told(update)
    if counts is None or len(counts) != classes:
        return torch.full((classes,), update.n_examples / classes, dtype=torch.float64)
    total = int(counts.sum())
    return counts.to(torch.float64) * (update.n_examples / total if total != update.n_examples and total else 1.0)
