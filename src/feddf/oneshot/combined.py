"""The models that were trained already as one ensemble of teachers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import EnsembleConfig
from feddf.config.names import DROP_RULES, TARGETS, TEACHER_WEIGHTS
from feddf.evaluate import Answer, Teacher, accuracy_of
from feddf.fusion.ensemble import Ensemble
from feddf.fusion.select import dropped
from feddf.oneshot.cached_answers import Memory
from feddf.oneshot.classes import Seat, seat
from feddf.oneshot.teachers import TeacherError, TrainedModel, fed
from feddf.oneshot.unlabeled_inputs import Labelled, Raw
from feddf.runtime.execution import Execution
from feddf.saved.preprocess import Preprocess
from feddf.types import Examples, Resources


@dataclass(frozen=True)
class Asking:
    """How teachers are asked: what is remembered, the pool, and how those are fed that have no preprocessing."""

    memory: Memory
    pool: Raw
    otherwise: Preprocess | None

    def n_outputs(self, teacher: TrainedModel) -> int:
        """Return a teacher's number of outputs."""
        return self.memory.n_outputs(teacher, self.pool, fed(teacher, self.otherwise))

    def logits(self, teacher: TrainedModel, raw: Raw) -> Tensor:
        """Return a teacher's logits over its own classes."""
        return self.memory.logits(teacher, raw, fed(teacher, self.otherwise))

    def teacher(self, model: TrainedModel, place: Seat) -> Teacher:
        """Return a model as a teacher: its answers come from its file, or from what is remembered of it."""

        def predict(raw: Raw, execution: Execution) -> Tensor:
            return self.logits(model, raw)

        return Teacher(model.id, predict, n_examples=model.examples, vote=place.vote)


@dataclass(frozen=True)
class Combined:
    """The ensemble of those that teach, where each one's classes are among the student's, and a note on the others."""

    ensemble: Ensemble
    seats: Mapping[str, Seat]
    notes: Mapping[str, Any]

    def about(self, raw: Raw, *, at_one: bool = False) -> Tensor:
        """Return what the teachers say together about inputs; one of them is in memory at a time.

        Students learn it at the temperature of the distillation; ``at_one`` it is as it would be asked for.
        """
        ensemble = replace(self.ensemble, temperature=1.0) if at_one else self.ensemble
        return ensemble(_answers(ensemble.teachers, raw))


def _answers(teachers: Iterable[Teacher], raw: Raw) -> Iterable[Answer]:
    return (Answer(teacher.id, teacher.predict(raw, Execution())) for teacher in teachers)


def combined(
    models: Sequence[TrainedModel],
    classes: tuple[str, ...],
    asking: Asking,
    validation: Labelled | None,
    config: EnsembleConfig,
    temperature: float,
    examples: Examples | None,
) -> Combined:
    """Return the ensemble that a configuration asks for, without those that its rule drops."""
    ordered = sorted(models, key=lambda model: model.id)
    seats = {model.id: seat(model, classes) for model in ordered}
    teachers = [asking.teacher(model, seats[model.id]) for model in ordered]
    measure = partial(_accuracies, seats=seats, validation=validation, config=config)
    notes: dict[str, Any] = {}
    if config.drop_worst != "none":
        assert examples is not None, "the configuration was checked"
        accuracies = measure(teachers)
        (clients, silent), saved = dropped(DROP_RULES[config.drop_worst], accuracies, examples)
        notes["dropped_worst"] = {
            "clients": {name: accuracies[name] for name in sorted(clients)},
            "teachers": {name: accuracies[name] for name in sorted(silent)},
            "kept_as_the_best": saved,
        }
        teachers = [teacher for teacher in teachers if teacher.id not in clients | silent]
    resources = Resources({}, validation=examples)
    weights = TEACHER_WEIGHTS[config.weights](teachers, resources, measure)
    _refuse_gaps(teachers, seats, classes)
    weighted = tuple(replace(teacher, weight=weights[teacher.id]) for teacher in teachers)
    return Combined(Ensemble(weighted, TARGETS[config.average], temperature), seats, notes)


def _accuracies(
    teachers: Sequence[Teacher], *, seats: Mapping[str, Seat], validation: Labelled | None, config: EnsembleConfig
) -> Mapping[str, float]:
    """Return each teacher's accuracy on the validation examples; a class that it does not know it gets wrong."""
    if validation is None:
        raise ConfigError.at("ensemble.weights", config.weights, "it needs labelled examples")
    return {
        teacher.id: accuracy_of(
            seats[teacher.id].logits(teacher.predict(validation.raw, Execution())), validation.labels
        )
        for teacher in teachers
    }


def _refuse_gaps(teachers: Sequence[Teacher], seats: Mapping[str, Seat], classes: Sequence[str]) -> None:
    known = torch.stack([seats[teacher.id].known for teacher in teachers]).sum(dim=0)
    if missing := [name for name, count in zip(classes, known, strict=True) if count == 0]:
        raise TeacherError(f"no teacher (that is not left out) knows the class '{missing[0]}'")
