"""The figures of a fusion: accuracy and calibration of all models, their agreement, and outliers among the teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from feddf.evaluate import Teacher, accuracy_of
from feddf.fusing.ensemble import TeacherEnsemble
from feddf.fusing.inputs import Labeled, RawInputs
from feddf.fusing.teachers import TrainedModel

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
    """One model on labeled examples: over all of them, over those of classes that it knows, and over each class."""

    accuracy: float
    own_accuracy: float
    ece: float
    bins: tuple[Bin, ...]
    per_class: tuple[float, ...] = ()


@dataclass(frozen=True)
class Report:
    """All figures of a fusion. ``agreement`` is the share of the pool on which two models name the same class."""

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


def measure(
    answer: Callable[[RawInputs], Tensor],
    ensemble: TeacherEnsemble,
    targets: Tensor,
    labeled: Mapping[str, Labeled],
    **more: Any,
) -> Report:
    """Measure teachers, ensemble and student, which answers with logits; one teacher's are in memory at a time."""
    pool, models, classes = ensemble.predictions.sets["pool"], ensemble.models, ensemble.classes
    knows = {model.id: ensemble.mappings[model.id].known for model in models}
    named, sets = dict[str, Tensor](), {name: dict[str, Figures]() for name in labeled}
    for model in models:
        named[model.id] = _predicted(ensemble.logits(model, "pool"))
        for name, one in labeled.items():
            if not ensemble.predictions.answers(model, name):
                continue
            probabilities = ensemble.logits(model, name).softmax(dim=1)
            sets[name][model.id] = figures(probabilities, one.labels, knows[model.id])
    named |= {ENSEMBLE: _predicted(targets), STUDENT: _predicted(answer(pool))}
    everything = torch.ones(len(classes))
    for name, one in labeled.items():
        if all(ensemble.predictions.answers(model, name) for model in models):
            sets[name][ENSEMBLE] = figures(ensemble.probabilities(name, 1.0), one.labels, everything)
        sets[name][STUDENT] = figures(answer(one.raw).softmax(dim=1), one.labels, everything)
    agreement = [[float((one == other).double().mean()) for other in named.values()] for one in named.values()]
    return Report(
        teachers=tuple(_about(model, ensemble.predictions.kind(model)) for model in models),
        classes=classes,
        knows={name: tuple(known.bool().tolist()) for name, known in knows.items()},
        pool_size=len(pool),
        names=tuple(named),
        agreement=tuple(map(tuple, agreement)),
        outliers=outliers({name: row[len(models)] for name, row in zip(knows, agreement, strict=False)}),
        sets=sets,
        sizes={name: len(one.labels) for name, one in labeled.items()},
        contributions={"pool": contributions(ensemble, "pool", named[ENSEMBLE].long())}
        | {name: contributions(ensemble, name, one.labels) for name, one in labeled.items() if ENSEMBLE in sets[name]},
        **more,
    )


def contributions(ensemble: TeacherEnsemble, name: str, labels: Tensor) -> dict[str, float]:
    """Return by how much the ensemble's accuracy would fall without each teacher; for more than 40, for none.

    Where the labels are what all teachers together say, that is the share of inputs about which they would say
    something else.
    """
    teachers = ensemble.ensemble.teachers
    if not 1 < len(teachers) <= 40:
        return {}

    def accuracy(kept: tuple[Teacher, ...]) -> float:
        voting = replace(ensemble, ensemble=replace(ensemble.ensemble, teachers=kept))
        return accuracy_of(voting.probabilities(name, 1.0), labels)

    whole = accuracy(teachers)
    return {one.id: whole - accuracy(tuple(other for other in teachers if other != one)) for one in teachers}


def figures(probabilities: Tensor, labels: Tensor, known: Tensor) -> Figures:
    """Return accuracy and calibration.

    ECE = Σ_b n_b / n |acc_b − conf_b| over bins of equal width (Guo, Pleiss, Sun, Weinberger 2017).
    """
    probabilities = probabilities.to(torch.float64)
    confidence, predicted = probabilities.max(dim=1)
    right = (predicted == labels).to(torch.float64)
    number = (confidence * BINS).long().clamp(max=BINS - 1)
    inside = [number == each for each in range(BINS)]
    bins = [Bin(int(one.sum()), _mean(confidence[one]), _mean(right[one])) for one in inside]
    ece = sum(one.count * abs(one.accuracy - one.confidence) for one in bins) / len(labels)
    per_class = tuple(_mean(right[labels == number]) for number in range(probabilities.shape[1]))
    return Figures(float(right.mean()), _mean(right[known[labels] > 0]), ece, tuple(bins), per_class)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


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


def _predicted(scores: Tensor) -> Tensor:
    return scores.argmax(dim=1).to(torch.int16)


def _about(teacher: TrainedModel, kind: str) -> dict[str, Any]:
    about = {"name": teacher.id, "source": teacher.source, "model": teacher.spec.model if teacher.spec else ""}
    return {
        **about, "sha256": teacher.content, "license": teacher.license, "datasets": teacher.datasets,
        **teacher.feeding.described(), "outputs": kind,
    }  # fmt: skip
