"""Scores: how good outputs are, given labels. Each is one number, on the device that the outputs are on.

Outputs are raw ones (logits, real numbers), n × channels × positions. What no label says anything about does not count:
classes below zero, and labels or values that are not a number. Counting needs no library; what is easily gotten wrong
(average precision, the area under a ROC curve) is scikit-learn's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf.runtime.device import CPU, accumulation_dtype
from feddf.runtime.packages import scikit_learn

CHANNELS = 1  # the dimension of outputs along which one answer is given: the positions come after it
IGNORED = -100  # the label of what has no class: padding, or a class that was not looked for

Score = Callable[[Tensor, Tensor], Tensor]
"""(raw outputs, labels) -> one number."""


def accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the share of answers whose largest channel is the label."""
    counted = labels >= 0
    right = (outputs.argmax(dim=CHANNELS) == labels) & counted
    return right.to(accumulation_dtype(outputs.device)).sum() / counted.sum()


def mean_iou(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return |A ∩ B| / |A ∪ B| of each class over all positions of all inputs; the mean over classes that occur."""
    both, one, other = _class_overlap(outputs, labels)
    return _mean_share(both, one + other - both)


def mean_dice(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return 2 |A ∩ B| / (|A| + |B|) of each class over all positions; the mean over classes that occur."""
    both, one, other = _class_overlap(outputs, labels)
    return _mean_share(2 * both, one + other)


def inverse_perplexity(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return exp of the mean of log p(label): one over the perplexity."""
    logs = outputs.to(accumulation_dtype(outputs.device)).log_softmax(dim=CHANNELS)
    return (-F.nll_loss(logs, labels, ignore_index=IGNORED)).exp()


def perplexity(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return exp of the mean of −log p(label): among how many classes alike the model would be as uncertain."""
    return 1 / inverse_perplexity(outputs, labels)


def macro_f1(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of F1 over the channels that occur; a label is predicted where its logit is above 0."""
    known, said, true = ~labels.isnan(), outputs > 0, labels > 0.5
    rest = [axis for axis in range(outputs.ndim) if axis != CHANNELS]
    both, one, other = ((some & known).sum(dim=rest) for some in (said & true, said, true))
    return _mean_share(2 * both, one + other)


def average_precision(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean average precision over the channels that have both positive and negative labels."""
    return _ranked(outputs, labels, scikit_learn().average_precision_score)


def auroc(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the area under the ROC curve, the mean over the channels that have both kinds of labels."""
    return _ranked(outputs, labels, scikit_learn().roc_auc_score)


def r2(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return 1 − Σ (y − ŷ)² / Σ (y − ȳ)², the mean over channels. Outputs may have variances as well."""
    known, wanted, rest = _known_values(labels)
    off = (outputs[:, : labels.shape[CHANNELS]].to(wanted.dtype) - wanted) * known
    mean = (wanted * known).sum(dim=rest, keepdim=True) / known.sum(dim=rest, keepdim=True)
    total = ((wanted - mean) * known).square().sum(dim=rest)
    return (1 - off.square().sum(dim=rest) / total.clamp_min(1e-12)).mean()


def mean_absolute_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of |y − ŷ|."""
    known, wanted, _ = _known_values(labels)
    off = (outputs[:, : labels.shape[CHANNELS]].to(wanted.dtype) - wanted).abs() * known
    return off.sum() / known.sum()


def coverage(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the share of values within 1.96 deviations of the mean: 0.95 for a calibrated model with variances."""
    known, wanted, _ = _known_values(labels)
    mean, log_variance = outputs.to(wanted.dtype).chunk(2, dim=CHANNELS)
    return (((mean - wanted).abs() <= 1.96 * (log_variance / 2).exp()) & known).sum() / known.sum()


def _class_overlap(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each class the positions that are both predicted and labeled as it, predicted, and labeled."""
    counted, n = labels >= 0, outputs.shape[CHANNELS]
    said, true = outputs.argmax(dim=CHANNELS)[counted], labels[counted]
    return tuple(torch.bincount(some, minlength=n) for some in (said[said == true], said, true))  # type: ignore[return-value]


def _mean_share(parts: Tensor, wholes: Tensor) -> Tensor:
    occurs = wholes > 0
    return (parts.to(accumulation_dtype(parts.device)) / wholes.clamp_min(1)).sum() / occurs.sum().clamp_min(1)


def _known_values(labels: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Return which values are known, the values (zero where they are not), and all axes but that of channels."""
    wanted = labels.to(accumulation_dtype(labels.device)).nan_to_num()
    return ~labels.isnan(), wanted, [axis for axis in range(labels.ndim) if axis != CHANNELS]


def _ranked(outputs: Tensor, labels: Tensor, score: Callable[..., Any]) -> Tensor:
    """Return the mean over channels of a score by ranks, over the known labels of each."""
    found = []
    for said, true in zip(outputs.to(CPU).unbind(CHANNELS), labels.to(CPU).unbind(CHANNELS), strict=True):
        known = ~true.isnan()
        positive = true[known] > 0.5
        if positive.any() and not positive.all():
            found.append(float(score(positive.numpy(), said[known].float().numpy())))
    return torch.tensor(found, dtype=accumulation_dtype(CPU)).mean() if found else torch.zeros(())
