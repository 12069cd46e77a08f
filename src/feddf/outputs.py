"""What a model's output means: how it is learned from labels, combined over teachers, distilled and scored.

The outputs of n inputs are n × channels × positions numbers, without positions where there is one answer for each
input. A task has one such value, and the code that trains, combines or scores goes through it. There are three kinds:

* :func:`classes`: one of the channels is right at every position (a softmax over them);
* :func:`labels`: any of the channels may be (a sigmoid each);
* :func:`values`: a real number for each channel, perhaps with a variance.

A teacher may know only some of the channels: see :meth:`Outputs.vote`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf import label_forms as forms
from feddf import losses, scores
from feddf.losses import channelwise
from feddf.runtime.device import accumulation_dtype
from feddf.runtime.packages import MissingPackageError
from feddf.scores import CHANNELS, Score

MOST_CHANNELS = 1000  # of one answer, for it to be small
MOST_NUMBERS = 2**22  # of larger ones that are held at once: 32 MB in float64


def as_it_is(outputs: Tensor, *_: Any) -> Tensor:
    """Return what is given."""
    return outputs


@dataclass(frozen=True)
class Outputs:
    """One kind of output. *Raw* outputs are what a network gives; a *target* is what a student should say.

    Args:
        channels: the answers at one position: the classes, labels or values; ``None`` on a server that only its clients
            could tell.
        probabilities: raw outputs -> a target: σ for classes and labels.
        normalize: makes a valid target of a mean of targets in which channels have different weights.
        loss: (raw outputs, labels) -> what a client minimizes.
        distance: (target, raw outputs, temperature) -> what a student minimizes.
        score: (raw outputs, labels) -> how good they are: at most 1, higher is better.
        positions: the answers for one input: none (one answer), H × W, or T.
        kind: the name of the function that makes it, and ``options`` what it was called with besides.
        metric: the name of ``score``; ``measures`` are further ones, for the record.
        raw: target -> raw outputs that stand for it.
        decide: target -> the labels that it speaks for; ``names`` says them as texts, given the channels' names.
        likelihood: (target, labels) -> how likely each label was, in one row; ``None`` where a target does not say.
        confidence: (target, labels) -> how sure each answer is, and whether it is right; ``None`` as above.
        wrong: (labels, outputs) -> what is wrong with the labels, or ``None``.
        groups: (labels, outputs) -> a number for each example, such that examples of one number are alike.
        restrict: (raw outputs, known channels) -> those of a model that knows no others.
        hide: (labels, known channels) -> the labels where no others are looked for.
        center: (raw outputs, known channels) -> raw outputs that can be averaged with those of other teachers.
        guesses: one over the score of guessing: the number of classes; infinite where guessing scores 0.
        numbers: the raw numbers in each channel: 2 for values with variances.
        one_is_right: whether exactly one channel is right at every position, as of a softmax.
        has_units: whether raw outputs are in the units of the labels, so that a temperature means nothing.
    """

    channels: int | None = None
    probabilities: Callable[[Tensor], Tensor] = as_it_is
    normalize: Callable[[Tensor], Tensor] = as_it_is
    loss: Callable[[Tensor, Tensor], Tensor] = losses.squared_error
    distance: Callable[[Tensor, Tensor, float], Tensor] = losses.squared_distance
    score: Score = scores.r2
    positions: tuple[int, ...] = ()
    kind: str = "own"
    options: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "score"
    measures: Mapping[str, Score] = field(default_factory=dict)
    raw: Callable[[Tensor], Tensor] = as_it_is
    decide: Callable[[Tensor], Tensor] = as_it_is
    names: Callable[[Tensor, Sequence[str]], list[str]] = forms.as_numbers
    likelihood: Callable[[Tensor, Tensor], Tensor] | None = None
    confidence: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    wrong: Callable[[Tensor, Outputs], str | None] = forms.no_complaint
    groups: Callable[[Tensor, Outputs], Tensor] = forms.all_alike
    restrict: Callable[[Tensor, Tensor], Tensor] = as_it_is
    hide: Callable[[Tensor, Tensor], Tensor] = losses.hide_numbers
    center: Callable[[Tensor, Tensor], Tensor] = as_it_is
    guesses: float = inf
    numbers: int = 1
    one_is_right: bool = False
    has_units: bool = False

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the raw outputs for one input."""
        return (None if self.channels is None else self.channels * self.numbers, *self.positions)

    @property
    def title(self) -> str:
        """The kind as a message names it: 'classes' at 32×32 positions."""
        return f"'{self.kind}'" + (f" at {'×'.join(map(str, self.positions))} positions" if self.positions else "")

    @property
    def counts_classes(self) -> bool:
        """Whether each example has exactly one class, so that classes can be counted."""
        return self.one_is_right and not self.positions

    @property
    def is_large(self) -> bool:
        """Whether the outputs for an input are so large that those for all inputs may be too many for memory."""
        return bool(self.positions) or (self.channels or 0) > MOST_CHANNELS

    def at_once(self, n: int) -> int:
        """Return for how many of n inputs outputs are held in memory at once: for all where they are small."""
        return max(1, min(n, MOST_NUMBERS // prod(one or 1 for one in self.shape))) if self.is_large else n

    def agreement(self, one: Tensor, other: Tensor) -> float:
        """Return the share of decided answers that are the same; of values, the mean of their correlations."""
        if not self.has_units:
            return float((one == other).double().mean())
        a, b = (each.double().transpose(0, CHANNELS).flatten(1) for each in (one, other))
        a, b = (each - each.mean(dim=1, keepdim=True) for each in (a, b))
        return float(F.cosine_similarity(a, b).mean())

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the further scores of raw outputs; those whose library is not installed are left out."""
        found: dict[str, float] = {}
        for name, score in self.measures.items():
            if name == self.metric:
                continue
            with suppress(MissingPackageError):
                found[name] = float(score(outputs, labels))
        return found

    def describe(self) -> dict[str, Any]:
        """Return it as JSON, of which :func:`from_description` makes it again."""
        return {"kind": self.kind, "channels": self.channels, "positions": list(self.positions), **self.options}

    @property
    def form(self) -> dict[str, Any]:
        """What has to be written beside a model: nothing where it has one class for each input, as most have."""
        return {} if self.counts_classes and not self.options else self.describe()

    # What a teacher does not know is left to those who do

    def knowing(self, known: Tensor) -> Outputs:
        """Return the outputs of a client that knows only these channels (a mask), as its local training sees them."""
        return replace(self, loss=partial(_loss_of_known, outputs=self, known=known))

    def vote(self, outputs: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return raw outputs of a teacher that knows only these channels, and how much each of its channels counts.

        What it says of classes are conditional probabilities, P(c | one of those that it knows). So logits are taken
        relative to the background (without one, to the mean of the known): an average has each teacher's odds among
        what that teacher knows. An average of probabilities leaves to the background what all others leave of one. To
        average the background as if it were one more class is the naive way: every teacher says "background" of all
        that it does not know. (ConDistFL, arXiv 2308.04070, has the same principle in a client's loss.)
        """
        known = known.to(outputs.device)
        counts = known.to(accumulation_dtype(outputs.device)).repeat(self.numbers)
        counts = counts.clamp_min(1e-30)  # so that a class that no teacher knows keeps a logit that is none
        return self.center(self.restrict(outputs, known), known), channelwise(counts, outputs)

    def forget(self, target: Tensor, known: Tensor) -> Tensor:
        """Return a target that says nothing (NaN) of channels that no teacher knows."""
        return target.where(channelwise(known.to(target.device).repeat(self.numbers), target), torch.nan)


def _loss_of_known(raw: Tensor, labels: Tensor, *, outputs: Outputs, known: Tensor) -> Tensor:
    known = known.to(raw.device)
    return outputs.loss(outputs.restrict(raw, known), outputs.hide(labels, known))


def _distance_of_known(target: Tensor, raw: Tensor, temperature: float, *, outputs: Outputs) -> Tensor:
    """Return the distance over the channels that some teacher knows: those of a target that are numbers."""
    known = ~target.transpose(0, CHANNELS).flatten(1)[:, 0].isnan()
    return outputs.distance(target.nan_to_num(), outputs.restrict(raw, known), temperature)


def _scored(kind: str, metric: str, known: Mapping[str, Score]) -> dict[str, Any]:
    """Return the fields of a kind whose score has a name."""
    if metric not in known:
        raise ValueError(f"score = {metric!r}: {kind} are scored by {', '.join(known)}")
    return {"kind": kind, "metric": metric, "score": known[metric]}


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, 0, False)}


# Classes

CLASS_SCORES: dict[str, Score] = {
    "accuracy": scores.accuracy,
    "mean IoU": scores.mean_iou,
    "Dice": scores.mean_dice,
    "1/perplexity": scores.inverse_perplexity,
}
_MASK_MEASURES = {name: CLASS_SCORES[name] for name in ("mean IoU", "Dice", "accuracy")}
_TEXT_MEASURES = {"accuracy": scores.accuracy, "perplexity": scores.perplexity}


def classes(
    number: int | None = None,
    positions: tuple[int, ...] = (),
    *,
    background: int | None = None,
    dice: float = 0.0,
    score: str | None = None,
) -> Outputs:
    """Return outputs that are logits of a softmax over so many classes, one class being right at every position.

    Args:
        number: the classes. At a position whose label is −100, nothing is learned or scored.
        positions: H and W of a mask, or the length of a text; none if an input has one class.
        background: the class of whatever is none of the others. A teacher that does not know some class takes it for
            background, and is not believed in that (:meth:`Outputs.vote`).
        dice: the weight of the soft Dice loss in the distillation, besides the KL divergence.
        score: ``accuracy``, ``mean IoU``, ``Dice`` or ``1/perplexity`` (default: mean IoU for masks, else accuracy).

    >>> classes(10).shape
    (10,)
    """
    masks = len(positions) > 1
    made = Outputs(
        number,
        losses.class_probabilities,
        losses.scale_to_one,
        losses.cross_entropy,
        partial(losses.kl_divergence, dice=dice) if dice else losses.kl_divergence,
        positions=tuple(positions),
        options=_given(dice=dice, score=score) | ({} if background is None else {"background": background}),
        raw=losses.log_probabilities,
        decide=partial(torch.argmax, dim=CHANNELS),
        names=forms.largest,
        likelihood=losses.likely_classes,
        confidence=losses.confident_classes,
        wrong=forms.wrong_classes,
        groups=forms.main_class,
        restrict=partial(losses.restrict_classes, background=background),
        hide=partial(losses.hide_classes, background=background),
        center=partial(losses.center_classes, background=background),
        guesses=number or inf,
        one_is_right=True,
        **_scored("classes", score or ("mean IoU" if masks else "accuracy"), CLASS_SCORES),
        measures=_MASK_MEASURES if masks else _TEXT_MEASURES if positions else {},
    )
    return made if background is None else with_background(made, background)


def with_background(outputs: Outputs, background: int) -> Outputs:
    """Return classes one of which is the background: it has what others leave, and the place of what is unknown."""
    normalize = partial(losses.rest_to_background, background=background)
    return replace(outputs, normalize=normalize, distance=partial(_distance_of_known, outputs=outputs))


# Labels

LABEL_SCORES: dict[str, Score] = {
    "macro F1": scores.macro_f1,
    "mean average precision": scores.average_precision,
    "AUROC": scores.auroc,
}


def labels(
    number: int | None = None,
    positions: tuple[int, ...] = (),
    *,
    pos_weight: tuple[float, ...] | None = None,
    score: str | None = None,
) -> Outputs:
    """Return outputs that are a logit for each of so many labels, any of which may be right.

    Args:
        number: the labels. Those of an example are floats, n × labels × positions: 1, 0, or NaN if it is not known.
        positions: H and W, or the length of a text; none if an input has one set of labels.
        pos_weight: how much positive examples of each label count in a client's loss, where they are rare.
        score: ``macro F1`` (the default), ``mean average precision`` or ``AUROC``.

    >>> labels(14).metric
    'macro F1'
    """
    if pos_weight is not None and len(pos_weight) != number:
        raise ValueError(f"pos_weight has {len(pos_weight)} weights, and there are {number} labels")
    weighted = partial(losses.binary_cross_entropy, pos_weight=tuple(pos_weight or ()))
    return Outputs(
        number,
        torch.sigmoid,
        as_it_is,
        weighted if pos_weight else losses.binary_cross_entropy,
        losses.binary_kl,
        positions=tuple(positions),
        options=_given(pos_weight=pos_weight, score=score),
        raw=losses.log_odds,
        decide=_positive,
        names=forms.all_positive,
        likelihood=losses.likely_labels,
        confidence=losses.confident_labels,
        wrong=forms.wrong_labels,
        groups=forms.rarest_label,
        **_scored("labels", score or "macro F1", LABEL_SCORES),
        measures=LABEL_SCORES,
    )


def _positive(target: Tensor) -> Tensor:
    return (target > 0.5).to(target.dtype)


# Values


def values(number: int | None = None, positions: tuple[int, ...] = (), *, variance: bool = False) -> Outputs:
    """Return outputs that are a real number for each of so many channels.

    Args:
        number: the values. Those of an example are floats, n × values × positions, NaN if it is not known.
        positions: H and W, or a length; none if an input has one set of values.
        variance: whether a model also gives a log variance for each value: then the loss is a Gaussian's likelihood,
            and ``ensemble.combine = "probabilities"`` gives the mean and variance of the teachers' mixture.

    >>> values(1, variance=True).shape
    (2,)
    """
    made = Outputs(
        number,
        positions=tuple(positions),
        options=_given(variance=variance),
        wrong=forms.wrong_values,
        groups=forms.decile,
        has_units=True,
        **_scored("values", "R²", {"R²": scores.r2}),
        measures={"MAE": scores.mean_absolute_error},
    )
    return with_variance(made) if variance else made


def with_variance(outputs: Outputs) -> Outputs:
    """Return values of which a model gives mean and log variance."""
    return replace(
        outputs,
        probabilities=losses.moments,
        loss=losses.gaussian_likelihood,
        distance=losses.gaussian_kl,
        raw=losses.mean_and_log_variance,
        decide=_means,
        likelihood=losses.likely_values,
        confidence=losses.confident_values,
        measures={**outputs.measures, "coverage of 95 %": scores.coverage},
        numbers=2,
    )


def _means(target: Tensor) -> Tensor:
    return target.chunk(2, dim=CHANNELS)[0]


KINDS: dict[str, Callable[..., Outputs]] = {"classes": classes, "labels": labels, "values": values}


def from_description(given: Mapping[str, Any]) -> Outputs:
    """Return outputs from their JSON; :class:`ValueError` or :class:`TypeError` says what is wrong with it."""
    kind, number, positions = given.get("kind"), given.get("channels"), tuple(map(int, given.get("positions", ())))
    if kind not in KINDS:
        raise ValueError(f"outputs are one of {', '.join(KINDS)}, not {kind!r}")
    rest = {name: value for name, value in given.items() if name not in ("kind", "channels", "positions")}
    return KINDS[kind](number, positions, **rest)
