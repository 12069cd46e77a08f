"""The formulas behind the kinds of output: targets, losses, distances, and what becomes of channels that are not known.

Raw outputs (z: logits, real numbers) and targets are n × channels × positions. A mask of ``known`` channels has one
entry for each. Labels and values that are not a number are not known either; of classes, those below zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf.runtime.device import accumulation_dtype
from feddf.scores import CHANNELS, IGNORED

UNKNOWN = -1e9  # the logit of a class that a model does not know: it has no probability


def channelwise(values: Tensor, like: Tensor) -> Tensor:
    """Return one value for each channel in the shape that broadcasts over inputs and positions."""
    return values.view(-1, *[1] * (like.ndim - 2))


def _mean_of_known(values: Tensor, known: Tensor) -> Tensor:
    return values.where(known, 0).sum() / known.sum().clamp_min(1)


# Classes: one of the channels is right


def class_probabilities(logits: Tensor) -> Tensor:
    """Return σ(z), over the channels."""
    return logits.softmax(dim=CHANNELS)


def scale_to_one(target: Tensor) -> Tensor:
    """Return a weighted mean of probabilities as probabilities: weights by class make their sum another than one."""
    return target / target.sum(dim=CHANNELS, keepdim=True)


def rest_to_background(target: Tensor, *, background: int) -> Tensor:
    """Return probabilities in which the background has what the others leave: no teacher knows it from the unknown."""
    place = torch.tensor([background], device=target.device)
    others = target.index_fill(CHANNELS, place, 0.0)
    rest = (1 - others.sum(dim=CHANNELS, keepdim=True)).clamp_min(0)
    return scale_to_one(others.index_copy(CHANNELS, place, rest))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return −log σ(z)_y, the mean over all answers that have a label (:data:`~feddf.scores.IGNORED` has none)."""
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def kl_divergence(target: Tensor, logits: Tensor, temperature: float = 1.0, *, dice: float = 0.0) -> Tensor:
    """Return T² KL(p ‖ σ(z / T)), the mean over inputs and positions, plus ``dice`` times one minus the soft Dice."""
    logs = F.log_softmax(logits / temperature, dim=CHANNELS)
    loss = F.kl_div(logs, target, reduction="batchmean") * temperature**2
    if logits.ndim > 2:
        loss = loss / logits[0, 0].numel()
    return loss + dice * (1 - soft_dice(target, logs.exp())) if dice else loss


def soft_dice(target: Tensor, probabilities: Tensor) -> Tensor:
    """Return 2 Σ p q / Σ (p² + q²) of each class over the batch and all positions, the mean over classes.

    With squares (Milletari et al. 2016) it is 1 exactly where both agree, also for soft targets.
    """
    rest = [axis for axis in range(target.ndim) if axis != CHANNELS]
    both, each = (target * probabilities).sum(dim=rest), (target.square() + probabilities.square()).sum(dim=rest)
    return (2 * both / each.clamp_min(1e-12)).mean()


def log_probabilities(target: Tensor) -> Tensor:
    """Return log p, finite also where p is 0."""
    return target.clamp_min(torch.finfo(torch.float32).tiny).log()


def likely_classes(target: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of each label that is known."""
    found = target.gather(CHANNELS, labels.clamp_min(0).unsqueeze(CHANNELS)).squeeze(CHANNELS)
    return found[labels >= 0]


def confident_classes(target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest probability of each answer that has a label, and whether it is the label's."""
    confidence, said = target.max(dim=CHANNELS)
    return confidence[labels >= 0], (said == labels)[labels >= 0]


def restrict_classes(logits: Tensor, known: Tensor, *, background: int | None) -> Tensor:
    """Return logits without the unknown classes: their probability is the background's, if there is one.

    So the loss of a client that knows some of the classes is the marginal one (Shi et al. 2021; ConDistFL, Wang et al.
    2023): what is background to it may be any class that it does not know.
    """
    among = logits.masked_fill(channelwise(~known, logits), UNKNOWN)
    if background is None:
        return among
    place = torch.tensor([background], device=logits.device)
    merged = known.index_fill(0, place, False)
    rest = logits.masked_fill(channelwise(merged, logits), UNKNOWN).logsumexp(dim=CHANNELS, keepdim=True)
    return among.index_copy(CHANNELS, place, rest)


def hide_classes(labels: Tensor, known: Tensor, *, background: int | None) -> Tensor:
    """Return labels in which unknown classes are background, or nothing if there is none."""
    there = known[labels.clamp_min(0)] | (labels < 0)
    return labels.where(there, IGNORED if background is None else background)


def center_classes(logits: Tensor, known: Tensor, *, background: int | None) -> Tensor:
    """Return logits relative to the background's, or to the mean of the known ones, so that teachers are comparable."""
    wide = logits.to(accumulation_dtype(logits.device))
    mask = channelwise(known, wide)
    mean = wide.where(mask, 0).sum(dim=CHANNELS, keepdim=True) / known.sum()
    return (wide - (mean if background is None else wide[:, background : background + 1])).where(mask, UNKNOWN)


# Labels: each of the channels may be right


def binary_cross_entropy(logits: Tensor, labels: Tensor, *, pos_weight: tuple[float, ...] | None = None) -> Tensor:
    """Return −w y log σ(z) − (1 − y) log(1 − σ(z)), the mean over known labels; w is the weight of positive ones."""
    known = ~labels.isnan()
    weight = None if pos_weight is None else channelwise(torch.tensor(pos_weight, device=logits.device), logits)
    wanted = labels.nan_to_num().to(logits.dtype)
    loss = F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="none")
    return _mean_of_known(loss, known)


def binary_kl(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T² KL(p ‖ σ(z / T)) of two Bernoulli variables, the mean over all channels that are known."""
    known, wanted = ~target.isnan(), target.nan_to_num()
    loss = F.binary_cross_entropy_with_logits(logits / temperature, wanted, reduction="none")
    entropy = torch.special.entr(wanted) + torch.special.entr(1 - wanted)
    return _mean_of_known(loss - entropy, known) * temperature**2


def log_odds(target: Tensor) -> Tensor:
    """Return log p / (1 − p), finite also at 0 and 1."""
    return target.clamp(1e-12, 1 - torch.finfo(target.dtype).eps).logit()


def likely_labels(target: Tensor, labels: Tensor) -> Tensor:
    """Return p where a known label is positive, and 1 − p where it is not."""
    return torch.where(labels > 0.5, target, 1 - target)[~labels.isnan()]


def confident_labels(target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of each label that is known, and whether it is positive."""
    known = ~labels.isnan()
    return target[known], labels[known] > 0.5


def hide_numbers(labels: Tensor, known: Tensor) -> Tensor:
    """Return labels or values that are not a number in unknown channels."""
    return labels.masked_fill(channelwise(~known, labels), torch.nan)


# Values: real numbers, perhaps with a variance; then raw outputs are (μ, log σ²) and targets (μ, μ² + σ²)


def squared_error(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return (z − y)², the mean over the values that are known."""
    known = ~wanted.isnan()
    return _mean_of_known((outputs - wanted.nan_to_num().to(outputs.dtype)).square(), known)


def squared_distance(target: Tensor, outputs: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the squared error of a student; values have units, so there is no temperature."""
    return squared_error(outputs, target)


def gaussian_likelihood(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return −log N(y; μ, σ²) without its constant, the mean over the values that are known."""
    (mean, log_variance), known = outputs.chunk(2, dim=CHANNELS), ~wanted.isnan()
    off = mean - wanted.nan_to_num().to(outputs.dtype)
    return _mean_of_known((log_variance + off.square() * (-log_variance).exp()) / 2, known)


def moments(outputs: Tensor) -> Tensor:
    """Return (μ, μ² + σ²): the mean of several teachers' moments are those of the mixture of their distributions."""
    mean, log_variance = outputs.chunk(2, dim=CHANNELS)
    return torch.cat([mean, mean.square() + log_variance.exp()], dim=CHANNELS)


def mean_and_log_variance(target: Tensor) -> Tensor:
    """Return (μ, log σ²) of moments."""
    mean, square = target.chunk(2, dim=CHANNELS)
    return torch.cat([mean, (square - mean.square()).clamp_min(1e-12).log()], dim=CHANNELS)


def gaussian_kl(target: Tensor, outputs: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(N(m, v) ‖ N(μ, σ²)) = ½ (log σ²/v + (v + (m − μ)²)/σ² − 1), the mean over what is known."""
    (m, square), (mean, log_variance) = target.chunk(2, dim=CHANNELS), outputs.chunk(2, dim=CHANNELS)
    known, m = ~m.isnan(), m.nan_to_num()
    v = (square.nan_to_num(1.0) - m.square()).clamp_min(1e-12)
    ratio = (v + (m - mean).square()) * (-log_variance).exp()
    return _mean_of_known((log_variance - v.log() + ratio - 1) / 2, known)


def likely_values(target: Tensor, labels: Tensor) -> Tensor:
    """Return the density N(y; m, v) of each known value."""
    mean, log_variance = mean_and_log_variance(target).chunk(2, dim=CHANNELS)
    logs = -((labels - mean).square() * (-log_variance).exp() + log_variance + 1.8378770664093453) / 2  # log 2π
    return logs.exp()[~labels.isnan()]


def confident_values(target: Tensor, labels: Tensor, levels: int = 15) -> tuple[Tensor, Tensor]:
    """Return levels of confidence, and whether each known value is within the central interval of that level."""
    mean, log_variance = mean_and_log_variance(target).chunk(2, dim=CHANNELS)
    needed = torch.erf((labels - mean).abs() * (-log_variance / 2).exp() / 2**0.5)[~labels.isnan()]
    grid = (torch.arange(levels).to(needed) + 0.5) / levels
    return grid.expand(len(needed), -1).flatten(), (needed.unsqueeze(1) <= grid).flatten()
