"""The figures of a fusion: accuracy and calibration of all models, their agreement, and outliers among the teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor

from feddf.evaluate import Teacher, accuracy_of, spread
from feddf.fusing.ensemble import TeacherEnsemble
from feddf.fusing.inputs import Labeled, RawInputs
from feddf.fusing.teachers import TrainedModel
from feddf.outputs import MOST_CHANNELS, Outputs
from feddf.outputs import classes as one_class
from feddf.scores import CHANNELS

BINS = 15
"""Of the confidence, for the calibration error and the reliability plot."""

ENSEMBLE, STUDENT = "ensemble", "student"


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same confidence: their number, mean confidence and accuracy."""

    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Figures:
    """One model on labeled examples: over all of them, over those of classes that it knows, and over each class.

    ``accuracy`` is the score of the kind of outputs, ``ece`` ``None`` where they say nothing of how sure they are.
    """

    accuracy: float
    own_accuracy: float
    ece: float | None
    bins: tuple[Bin, ...]
    per_class: tuple[float, ...] = ()
    measures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All figures of a fusion. ``agreement`` is the share of the pool on which two models say the same.

    Of large outputs, the pool is looked at in part: ``compared`` inputs. ``outputs`` are described where they are not
    one class for each input, and ``metric`` names their score.
    """

    teachers: tuple[dict[str, Any], ...]
    classes: tuple[str, ...]
    knows: dict[str, tuple[bool, ...]]
    pool_size: int
    names: tuple[str, ...]
    agreement: tuple[tuple[float, ...], ...]
    outliers: dict[str, str]
    sets: dict[str, dict[str, Figures]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    contributions: dict[str, dict[str, float]] = field(default_factory=dict)
    student: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    metric: str = "accuracy"
    compared: int = 0

    @property
    def kind(self) -> str:
        """What the outputs are: classes, labels or values."""
        return str(self.outputs.get("kind", "classes"))


def measure(
    answer: Callable[[RawInputs], Tensor],
    ensemble: TeacherEnsemble,
    temperature: float,
    labeled: Mapping[str, Labeled],
    **more: Any,
) -> Report:
    """Measure teachers, ensemble and student, which answers with logits; one teacher's are in memory at a time."""
    pool, models, classes = ensemble.predictions.sets["pool"], ensemble.models, ensemble.classes
    knows, outputs = {model.id: ensemble.mappings[model.id].known for model in models}, ensemble.outputs
    rows = spread(len(pool), outputs.at_once(len(pool)))
    named, sets = dict[str, Tensor](), {name: dict[str, Figures]() for name in labeled}
    for model in models:
        named[model.id] = _decided(outputs, ensemble.logits(model, "pool", rows))
        for name, one in labeled.items():
            if not ensemble.predictions.answers(model, name):
                continue
            target = outputs.probabilities(ensemble.logits(model, name))
            sets[name][model.id] = figures(target, one.labels, knows[model.id], outputs)
    together = outputs.decide(ensemble.probabilities("pool", temperature, rows))
    named |= {ENSEMBLE: together, STUDENT: _decided(outputs, answer(pool.take(rows)))}
    everything = torch.ones(len(classes), dtype=torch.bool)
    for name, one in labeled.items():
        if all(ensemble.predictions.answers(model, name) for model in models):
            sets[name][ENSEMBLE] = figures(ensemble.probabilities(name, 1.0), one.labels, everything, outputs)
        sets[name][STUDENT] = figures(outputs.probabilities(answer(one.raw)), one.labels, everything, outputs)
    agreement = [[outputs.agreement(one, other) for other in named.values()] for one in named.values()]
    return Report(
        teachers=tuple(_about(model, ensemble.predictions.kind(model)) for model in models),
        classes=classes,
        knows={name: tuple(known.tolist()) for name, known in knows.items()},
        pool_size=len(pool),
        names=tuple(named),
        agreement=tuple(map(tuple, agreement)),
        outliers=outliers({name: row[len(models)] for name, row in zip(knows, agreement, strict=False)}),
        sets=sets,
        sizes={name: len(one.labels) for name, one in labeled.items()},
        contributions={"pool": contributions(ensemble, "pool", together, rows)}
        | {name: contributions(ensemble, name, one.labels) for name, one in labeled.items() if ENSEMBLE in sets[name]},
        outputs=outputs.form,
        metric=outputs.metric,
        compared=len(rows),
        **more,
    )


def contributions(ensemble: TeacherEnsemble, name: str, labels: Tensor, rows: Tensor | None = None) -> dict[str, float]:
    """Return by how much the ensemble's score would fall without each teacher; for more than 40, for none.

    Where the labels are what all teachers together say, that is the share of answers that would be others. Without the
    only teacher of a channel, nothing is said about that.
    """
    teachers = ensemble.ensemble.teachers
    if not 1 < len(teachers) <= 40:
        return {}
    outputs = ensemble.outputs

    def score(kept: tuple[Teacher, ...]) -> float:
        voting = replace(ensemble, ensemble=replace(ensemble.ensemble, teachers=kept))
        target = voting.probabilities(name, 1.0, rows)
        if rows is not None:
            return outputs.agreement(outputs.decide(target), labels)
        return accuracy_of(outputs.raw(target), labels, outputs)

    whole = score(teachers)
    return {one.id: whole - score(tuple(other for other in teachers if other != one)) for one in teachers}


def figures(target: Tensor, labels: Tensor, known: Tensor, outputs: Outputs = one_class()) -> Figures:
    """Return score and calibration of a target (for classes, probabilities).

    ECE = Σ_b n_b / n |acc_b − conf_b| over bins of equal width (Guo, Pleiss, Sun, Weinberger 2017). The confidence is
    that in the answer, in each label, or the level of a central interval of values with variances.
    """
    raw, hidden = outputs.raw(target.to(torch.float64)), outputs.hide(labels, known.bool())
    own = float(outputs.score(raw, hidden))
    bins, ece = list[Bin](), None
    if outputs.confidence is not None:
        confidence, right = outputs.confidence(target.to(torch.float64), labels)
        number = (confidence * BINS).long().clamp(max=BINS - 1)
        inside = [number == each for each in range(BINS)]
        bins = [Bin(int(one.sum()), _mean(confidence[one]), _mean(right[one].double())) for one in inside]
        ece = sum(one.count * abs(one.accuracy - one.confidence) for one in bins) / max(1, len(right))
    score = own if outputs.has_units else float(outputs.score(raw, labels))
    measures = outputs.measure(raw, labels)
    return Figures(score, own if isfinite(own) else 0.0, ece, tuple(bins), _per_channel(raw, labels, outputs), measures)


def _per_channel(raw: Tensor, labels: Tensor, outputs: Outputs) -> tuple[float, ...]:
    """Return of each class the share that is found, of labels and values the score of each; of many, nothing."""
    channels = range(outputs.channels or raw.shape[CHANNELS])
    if len(channels) > MOST_CHANNELS:
        return ()
    if outputs.one_is_right:
        right = (raw.argmax(dim=CHANNELS) == labels).double()
        return tuple(_mean(right[labels == number]) for number in channels)
    pairs = ((raw.narrow(CHANNELS, one, 1), labels.narrow(CHANNELS, one, 1)) for one in channels)
    return tuple(float(outputs.score(*pair)) for pair in pairs)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


SHOWN = 4  # masks in the card's picture


def some_masks(
    answer: Callable[[RawInputs], Tensor], ensemble: TeacherEnsemble, labeled: Mapping[str, Labeled]
) -> dict[str, Tensor]:
    """Return a few images with their masks by whose they are; nothing where answers are no masks of images."""
    outputs, sets = ensemble.outputs, ensemble.predictions.sets
    name = list(labeled)[-1] if labeled else "pool"
    rows = sets[name].rows
    if len(outputs.positions) != 2 or not outputs.one_is_right or not isinstance(rows, Tensor) or rows.ndim != 4:
        return {}
    chosen = spread(len(rows), SHOWN)
    known = [one for one in ensemble.models if ensemble.predictions.answers(one, name)]
    shown = {one.id: _decided(outputs, ensemble.logits(one, name, chosen)) for one in known[:4]}
    if len(known) == len(ensemble.models):
        shown[ENSEMBLE] = outputs.decide(ensemble.probabilities(name, 1.0, chosen))
    said = {"label": labeled[name].labels[chosen]} if labeled else {}
    return {"image": rows[chosen], **said, **shown, STUDENT: _decided(outputs, answer(sets[name].take(chosen)))}


def outliers(agreement: Mapping[str, float]) -> dict[str, str]:
    """Return the teachers that agree with the ensemble far less than the others do, and how much.

    Far is three deviations below the median, a deviation being 1.4826 times the median distance from it.

    >>> outliers({"a": 0.8, "b": 0.82, "c": 0.79, "d": 0.81, "e": 0.1})
    {'e': 'agrees with the ensemble on 10.0 % of the pool, the median teacher on 80.0 %'}
    """
    if len(agreement) < 4:
        return {}
    middle = median(agreement.values())
    spread = 1.4826 * median(abs(value - middle) for value in agreement.values())
    return {
        name: f"agrees with the ensemble on {100 * value:.1f} % of the pool, the median teacher on {100 * middle:.1f} %"
        for name, value in agreement.items()
        if value < middle - 3 * max(spread, 0.01)
    }


def _decided(outputs: Outputs, raw: Tensor) -> Tensor:
    return outputs.decide(outputs.probabilities(raw))


def _about(teacher: TrainedModel, kind: str) -> dict[str, Any]:
    about = {"name": teacher.id, "source": teacher.source, "model": teacher.spec.model if teacher.spec else ""}
    return {
        **about, "sha256": teacher.content, "license": teacher.license, "datasets": teacher.datasets,
        **teacher.feeding.described(), "outputs": kind,
    }  # fmt: skip
