"""What a model's output means: how it is learned from labels, combined over teachers, distilled and scored.

The outputs of n inputs are n × channels × positions numbers, without positions where there is one answer for each
input. A task has one such value, and the code that trains, combines or scores goes through it. So far there is one
kind, :func:`classes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

CHANNELS = 1  # the dimension of outputs along which one answer is given: the positions come after it


def class_probabilities(logits: Tensor) -> Tensor:
    """Return σ(z), over the channels."""
    return logits.softmax(dim=CHANNELS)


def scale_to_one(target: Tensor) -> Tensor:
    """Return a weighted mean of probabilities as probabilities: weights by class make their sum another than one."""
    return target / target.sum(dim=CHANNELS, keepdim=True)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return −log σ(z)_y, the mean over the batch."""
    return F.cross_entropy(logits, labels)


def kl_divergence(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T² KL(p ‖ σ(z / T)), the mean over the batch."""
    loss = F.kl_div(F.log_softmax(logits / temperature, dim=CHANNELS), target, reduction="batchmean")
    return loss * temperature**2


def is_right(predictions: Tensor, labels: Tensor) -> Tensor:
    """Return for each answer whether its largest channel, of logits or probabilities, is the label."""
    return predictions.argmax(dim=CHANNELS) == labels


@dataclass(frozen=True)
class Outputs:
    """One kind of output.

    Args:
        channels: the numbers of one answer: the classes; ``None`` on a server that only its clients could tell.
        probabilities: what raw outputs stand for, and the form of a target: σ for classes.
        normalize: makes a valid target of a mean of targets in which channels have different weights.
        loss: (outputs, labels) -> what a client minimizes.
        distance: (target, outputs, temperature) -> what a student minimizes.
        correct: (outputs or targets, labels) -> how good each answer is, between 0 and 1; a score is the mean.
        positions: the answers for one input: none (one answer), H × W, or T.
    """

    channels: int | None = None
    probabilities: Callable[[Tensor], Tensor] = class_probabilities
    normalize: Callable[[Tensor], Tensor] = scale_to_one
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    distance: Callable[[Tensor, Tensor, float], Tensor] = kl_divergence
    correct: Callable[[Tensor, Tensor], Tensor] = is_right
    positions: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the outputs for one input."""
        return (self.channels, *self.positions)


def classes(number: int | None = None) -> Outputs:
    """Return outputs that are logits of a softmax over so many classes, one class being right.

    >>> classes(10).shape
    (10,)
    """
    return Outputs(number)
