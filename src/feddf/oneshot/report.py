"""What came of a fusion, in figures: accuracy and calibration of everybody, who agrees with whom, and who is odd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from feddf.evaluate import logits
from feddf.oneshot.classes import same
from feddf.oneshot.combined import Asking, Combined
from feddf.oneshot.teachers import TrainedModel
from feddf.oneshot.unlabeled_inputs import Labelled
from feddf.runtime.device import CPU
from feddf.saved.preprocess import Preprocess, described

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
    """One model on labelled examples: over all of them, and over those of classes that it knows."""

    accuracy: float
    own_accuracy: float
    ece: float
    bins: tuple[Bin, ...]


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

    def describe(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return asdict(self)


def reported(
    module: nn.Module,
    preprocess: Preprocess | None,
    teachers: Sequence[TrainedModel],
    classes: tuple[str, ...],
    asking: Asking,
    together: Combined,
    targets: Tensor,
    labelled: Mapping[str, Labelled],
    notes: Mapping[str, Any],
) -> Report:
    """Measure everybody, the student on the device that it is on; one teacher's answers are in memory at a time."""
    pool = asking.pool
    said: dict[str, Tensor] = {}
    sets: dict[str, dict[str, Figures]] = {name: {} for name in labelled}
    for teacher in teachers:
        place = together.seats[teacher.id]
        said[teacher.id] = _named(place.logits(asking.logits(teacher, pool)))
        for name, examples in labelled.items():
            probabilities = place.logits(asking.logits(teacher, examples.raw)).softmax(dim=1)
            sets[name][teacher.id] = figures(probabilities, examples.labels, place.known)
    said[ENSEMBLE] = _named(targets)
    said[STUDENT] = _named(logits(module, pool.stored(preprocess)).to(CPU))
    everything = torch.ones(len(classes))
    for name, examples in labelled.items():
        sets[name][ENSEMBLE] = figures(together.about(examples.raw, at_one=True), examples.labels, everything)
        answers = logits(module, examples.raw.stored(preprocess)).to(CPU).softmax(dim=1)
        sets[name][STUDENT] = figures(answers, examples.labels, everything)
    names = tuple(said)
    agreement = tuple(tuple(accuracy_of_names(said[one], said[other]) for other in names) for one in names)
    return Report(
        tuple(_about(teacher) for teacher in teachers),
        classes,
        {teacher.id: _knows(teacher, classes) for teacher in teachers},
        len(pool),
        names,
        agreement,
        outliers({teacher.id: agreement[row][len(teachers)] for row, teacher in enumerate(teachers)}),
        sets,
        {name: len(examples.labels) for name, examples in labelled.items()},
        dict(notes),
    )


def figures(probabilities: Tensor, labels: Tensor, known: Tensor) -> Figures:
    """Return accuracy and calibration.

    ECE = Σ_b n_b / n |acc_b − conf_b| over bins of equal width (Guo, Pleiss, Sun, Weinberger 2017).
    """
    probabilities = probabilities.to(torch.float64)
    confidence, predicted = probabilities.max(dim=1)
    right = (predicted == labels).to(torch.float64)
    number = (confidence * BINS).long().clamp(max=BINS - 1)
    bins = tuple(
        Bin(int(inside.sum()), float(confidence[inside].mean()), float(right[inside].mean()))
        if bool((inside := number == each).any())
        else Bin(0, 0.0, 0.0)
        for each in range(BINS)
    )
    ece = sum(one.count * abs(one.accuracy - one.confidence) for one in bins) / len(labels)
    own = known[labels] > 0
    own_accuracy = float(right[own].mean()) if bool(own.any()) else 0.0
    return Figures(float(right.mean()), own_accuracy, ece, bins)


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


def accuracy_of_names(one: Tensor, other: Tensor) -> float:
    """Return the share of inputs on which two models name the same class."""
    return float((one == other).double().mean())


def _named(answers: Tensor) -> Tensor:
    return answers.argmax(dim=1).to(torch.int16)


def _knows(teacher: TrainedModel, classes: Sequence[str]) -> tuple[bool, ...]:
    own = {same(name) for name in teacher.classes}
    return tuple(same(name) in own for name in classes)


def _about(teacher: TrainedModel) -> dict[str, Any]:
    return {
        "name": teacher.id,
        "source": teacher.source,
        "model": teacher.spec.model if teacher.spec else "",
        "sha256": teacher.content,
        "preprocessing": described(teacher.preprocess) if teacher.preprocess else None,
        "outputs": teacher.outputs,
    }
