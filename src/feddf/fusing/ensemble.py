"""The models as one ensemble: which of them knows which class, and what they predict together.

Teacher k has logits z_k over its own classes S_k; the student has all classes C. A teacher has no opinion on a class
outside S_k: there its weight is zero, and the class is left to those that know it
(``docs/decisions/class-lists.md``)::

    z̄(c) = Σ_{k: c ∈ S_k} w_k (z_k(c) − mean_{S_k} z_k) / Σ_{k: c ∈ S_k} w_k,    target = σ(z̄ / T)

Where all know all this is AvgLogits, as logits matter up to a constant. With averaged probabilities, p_k = σ(z_k / T)
over S_k takes the place of z_k, and the sum over classes is made one again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import FuseEnsembleConfig
from feddf.config.names import DROP_RULES, TARGETS, TEACHER_WEIGHTS
from feddf.evaluate import Predictions, Teacher, accuracy_of
from feddf.fusing.classes import columns_of, missing, union
from feddf.fusing.predictions import PredictionCache
from feddf.fusing.teachers import TeacherError, TrainedModel
from feddf.fusion.ensemble import Ensemble
from feddf.fusion.select import dropped
from feddf.runtime.execution import Execution
from feddf.types import Examples, Resources, Weight, WeightedLogits

UNKNOWN = -1e9
"""The logit of a class that a teacher does not know. It has no probability, and a weight of zero removes it."""


def agree_on_classes(
    teachers: Sequence[TrainedModel], asked: Sequence[str], n_outputs: Callable[[TrainedModel], int]
) -> tuple[list[TrainedModel], tuple[str, ...]]:
    """Return the teachers, each with a class list, and the student's classes.

    ``asked`` are the student's classes where the user names them. A teacher without a list has the student's. Only if
    there is no list at all, the first teacher is evaluated: the classes are the numbers of its outputs.
    """
    classes = tuple(asked) or union([teacher.classes for teacher in teachers])
    if not classes:
        classes = tuple(str(number) for number in range(n_outputs(teachers[0])))
    listed = [one if one.classes else one.named(classes) for one in teachers]
    for teacher in listed:
        if unknown := missing(teacher.classes, classes):
            known = f"teacher {teacher.id} knows '{unknown[0]}', and the student's are {', '.join(classes[:12])}"
            raise TeacherError(f"the student cannot express all classes: {known}")
    if untaught := missing(classes, union([teacher.classes for teacher in listed])):
        raise TeacherError(f"no teacher knows the class '{untaught[0]}' of the student")
    return listed, classes


@dataclass(frozen=True)
class ClassMapping:
    """A teacher's classes among those of the student: the column of each."""

    columns: Tensor
    n_classes: int

    def logits(self, own: Tensor) -> Tensor:
        """Return a teacher's logits over all classes: centered over its own, none for the others."""
        centered = own.to(torch.float64) - own.to(torch.float64).mean(dim=1, keepdim=True)
        whole = torch.full((len(own), self.n_classes), UNKNOWN, dtype=torch.float64)
        whole[:, self.columns] = centered
        return whole

    @property
    def known(self) -> Tensor:
        """One where the teacher knows a class, zero elsewhere."""
        known = torch.zeros(self.n_classes, dtype=torch.float64)
        known[self.columns] = 1.0
        return known

    def vote(self, own: Tensor, weight: Weight) -> WeightedLogits:
        """Return the vote of a teacher's logits over its own classes; a class that it does not know has weight zero."""
        whole = self.logits(own)
        counts = weight(whole) if callable(weight) else weight
        return WeightedLogits(whole, counts if len(self.columns) == self.n_classes else counts * self.known)


@dataclass(frozen=True)
class TeacherEnsemble:
    """All models with their classes among the student's, the ensemble of those that teach, and notes on the others."""

    models: Sequence[TrainedModel]
    classes: tuple[str, ...]
    mappings: Mapping[str, ClassMapping]
    predictions: PredictionCache
    ensemble: Ensemble
    notes: Mapping[str, Any]

    def logits(self, model: TrainedModel, name: str) -> Tensor:
        """Return what one model predicts for a set of inputs, over all classes."""
        return self.mappings[model.id].logits(self.predictions.logits(model, name))

    def probabilities(self, name: str, temperature: float) -> Tensor:
        """Return what the teachers predict together for a set of inputs; one of them is in memory at a time."""
        ensemble = replace(self.ensemble, temperature=temperature)
        return ensemble(Predictions(one.id, one.predict(name, Execution())) for one in ensemble.teachers)


def combine_teachers(
    models: Sequence[TrainedModel],
    classes: tuple[str, ...],
    predictions: PredictionCache,
    validation: Examples | None,
    config: FuseEnsembleConfig,
) -> TeacherEnsemble:
    """Return the ensemble that a configuration asks for, without those that its rule drops."""
    mappings = {model.id: ClassMapping(columns_of(model.classes, classes), len(classes)) for model in models}

    def teacher(model: TrainedModel) -> Teacher:
        vote = mappings[model.id].vote
        return Teacher(model.id, lambda name, _: predictions.logits(model, name), n_examples=model.examples, vote=vote)

    def accuracies(teachers: Sequence[Teacher]) -> dict[str, float]:
        """A class that a teacher does not know it gets wrong."""
        labels = _labeled(validation, "weights", config.weights).labels
        logits = ((one.id, mappings[one.id].logits(one.predict("validation", Execution()))) for one in teachers)
        return {id: accuracy_of(found, labels) for id, found in logits}

    teachers = [teacher(model) for model in sorted(models, key=lambda one: one.id)]
    notes: dict[str, Any] = {}
    if config.drop_worst != "none":
        judges = _labeled(validation, "drop_worst", config.drop_worst)
        (gone, silent), notes = dropped(DROP_RULES[config.drop_worst], accuracies(teachers), judges)
        teachers = [one for one in teachers if one.id not in gone | silent]
    weights = TEACHER_WEIGHTS[config.weights](teachers, Resources({}, validation=validation), accuracies)
    known = torch.stack([mappings[teacher.id].known for teacher in teachers]).sum(dim=0)
    if unknown := [name for name, count in zip(classes, known, strict=True) if count == 0]:
        raise TeacherError(f"no teacher (that is not left out) knows the class '{unknown[0]}'")
    weighted = tuple(replace(teacher, weight=weights[teacher.id]) for teacher in teachers)
    return TeacherEnsemble(models, classes, mappings, predictions, Ensemble(weighted, TARGETS[config.combine]), notes)


def _labeled(validation: Examples | None, key: str, given: str) -> Examples:
    if validation is None:
        raise ConfigError.at(f"ensemble.{key}", given, "it needs labeled examples")
    return validation
