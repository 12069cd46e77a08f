"""The models that were trained already as one ensemble of teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import FuseEnsembleConfig
from feddf.config.names import DROP_RULES, TARGETS, TEACHER_WEIGHTS
from feddf.evaluate import Predictions, Teacher, accuracy_of
from feddf.fusing.classes import ClassMapping, mapping_of
from feddf.fusing.predictions import PredictionCache
from feddf.fusing.teachers import TeacherError, TrainedModel
from feddf.fusion.ensemble import Ensemble
from feddf.fusion.select import dropped
from feddf.runtime.execution import Execution
from feddf.types import Examples, Resources


@dataclass(frozen=True)
class TeacherEnsemble:
    """All models with their classes among the student's, the ensemble of those that teach, and notes on the others."""

    models: Sequence[TrainedModel]
    classes: tuple[str, ...]
    mappings: Mapping[str, ClassMapping]
    predictions: PredictionCache
    ensemble: Ensemble
    notes: Mapping[str, Any]

    def probabilities(self, name: str, temperature: float) -> Tensor:
        """Return what the teachers predict together for a set of inputs; one of them is in memory at a time."""
        ensemble = replace(self.ensemble, temperature=temperature)
        return ensemble(Predictions(one.id, one.predict(name, Execution())) for one in ensemble.teachers)

    @property
    def dropped(self) -> frozenset[str]:
        """The ids of the models that are left out of everything."""
        return frozenset(self.notes.get("dropped_worst", {}).get("clients", {}))


def combine_teachers(
    models: Sequence[TrainedModel],
    classes: tuple[str, ...],
    predictions: PredictionCache,
    validation: Examples | None,
    config: FuseEnsembleConfig,
) -> TeacherEnsemble:
    """Return the ensemble that a configuration asks for, without those that its rule drops."""
    mappings = {model.id: mapping_of(model.classes, classes) for model in models}
    ordered = sorted(models, key=lambda model: model.id)
    teachers = [_teacher(model, mappings[model.id], predictions) for model in ordered]
    measure = partial(_accuracies, mappings=mappings, validation=validation, config=config)
    notes: dict[str, Any] = {}
    if config.drop_worst != "none":
        assert validation is not None, "the configuration was checked"
        accuracies = measure(teachers)
        (clients, silent), saved = dropped(DROP_RULES[config.drop_worst], accuracies, validation)
        notes["dropped_worst"] = {
            "clients": {name: accuracies[name] for name in sorted(clients)},
            "teachers": {name: accuracies[name] for name in sorted(silent)},
            "kept_as_the_best": saved,
        }
        teachers = [teacher for teacher in teachers if teacher.id not in clients | silent]
    weights = TEACHER_WEIGHTS[config.weights](teachers, Resources({}, validation=validation), measure)
    known = torch.stack([mappings[teacher.id].known for teacher in teachers]).sum(dim=0)
    if unknown := [name for name, count in zip(classes, known, strict=True) if count == 0]:
        raise TeacherError(f"no teacher (that is not left out) knows the class '{unknown[0]}'")
    weighted = tuple(replace(teacher, weight=weights[teacher.id]) for teacher in teachers)
    return TeacherEnsemble(models, classes, mappings, predictions, Ensemble(weighted, TARGETS[config.combine]), notes)


def _teacher(model: TrainedModel, mapping: ClassMapping, predictions: PredictionCache) -> Teacher:
    """Return a model as a teacher, which predicts for sets of inputs by their names."""

    def predict(name: str, execution: Execution) -> Tensor:
        return predictions.logits(model, name)

    return Teacher(model.id, predict, n_examples=model.examples, vote=mapping.vote)


def _accuracies(
    teachers: Sequence[Teacher],
    *,
    mappings: Mapping[str, ClassMapping],
    validation: Examples | None,
    config: FuseEnsembleConfig,
) -> Mapping[str, float]:
    """Return each teacher's accuracy on the validation examples; a class that it does not know it gets wrong."""
    if validation is None:
        raise ConfigError.at("ensemble.weights", config.weights, "it needs labeled examples")
    return {
        one.id: accuracy_of(mappings[one.id].logits(one.predict("validation", Execution())), validation.labels)
        for one in teachers
    }
