"""The student: what the teachers are fused into, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from feddf.config.errors import ConfigError, FeddfError, first_line, nearest
from feddf.config.names import MODELS
from feddf.data.encode import plain
from feddf.evaluate import output_shape
from feddf.fusing.inputs import RawInputs
from feddf.fusing.teachers import TrainedModel
from feddf.saved.model import Features, ModelSpec, Preprocess
from feddf.states import init_state, weighted_mean
from feddf.types import Prototype, State

STUDENT = "student"


@dataclass(frozen=True)
class StudentSpec:
    """What the teachers are fused into: an architecture by its name, or a module of the user's own.

    ``init`` names its first weights: "new", "average" (of the teachers of the same architecture, classes and
    preprocessing), or a teacher's name. ``classes`` are all that some teacher knows, unless they are named. ``shape``
    is that of one encoded input, and ``fits`` as in :class:`~feddf.saved.model.ModelSpec`: both follow from the rest.
    """

    model: str | nn.Module | None
    preprocess: Preprocess | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    init: str = "new"
    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    fits: bool = False

    @property
    def description(self) -> ModelSpec | None:
        """What is written beside its weights; there is none for a module."""
        if not isinstance(self.model, str):
            return None
        return ModelSpec(self.model, self.shape, self.classes, self.preprocess, self.options, self.fits)

    @property
    def prototype(self) -> Prototype:
        """How it is built."""
        if (found := self.description) is not None:
            return replace(found.prototype, name=STUDENT)
        return Prototype(STUDENT, lambda: deepcopy(self.model))  # type: ignore[arg-type,return-value]


def complete_student(
    student: StudentSpec, teachers: Sequence[TrainedModel], classes: tuple[str, ...], pool: RawInputs
) -> StudentSpec:
    """Return the student with all that follows from teachers and pool, once it has been tried on two inputs."""
    if student.init not in ("new", "average"):
        return _as_teacher(student, teachers, classes)
    student = replace(student, classes=classes)
    if not isinstance(student.model, nn.Module):
        if student.model is None:
            raise ConfigError.at("student.model", None, "name an architecture, or a teacher as student.init")
        MODELS.check(student.model)
        preprocess = student.preprocess
        shape = preprocess.shape if preprocess else tuple(pool.first(1, None).batch(torch.tensor([0])).shape[1:])
        if preprocess is None and pool.encode is plain:
            preprocess = Features(shape)
        student = replace(student, preprocess=preprocess, shape=shape)
    _try(student, pool)
    if student.init == "average" and not _alike(student, teachers):
        allowed = "no teacher has the student's architecture, classes and preprocessing, so there is nothing to average"
        raise ConfigError.at("student.init", "average", allowed)
    return student


def _as_teacher(student: StudentSpec, teachers: Sequence[TrainedModel], classes: tuple[str, ...]) -> StudentSpec:
    """Return a student that starts as one of the teachers."""
    start = student.init
    found = next((teacher for teacher in teachers if teacher.id == start), None)
    if found is None:
        names = ["new", "average", *(teacher.id for teacher in teachers)]
        raise ConfigError.at("student.init", start, f"no teacher has this name; {nearest(start, names)}")
    spec = found.spec
    if spec is None:
        raise ConfigError.at("student.init", start, "only weights of feddf's architectures can be trained further")
    if spec.classes != classes:
        missing = [name for name in classes if name not in spec.classes] or list(classes)
        allowed = f"it cannot express all classes: '{missing[0]}' is none of its outputs, or they are in another order"
        raise ConfigError.at("student.init", start, allowed)
    if student.model is not None and student.model != spec.model:
        raise ConfigError.at("student.model", student.model, f"it is to start as '{start}', which is '{spec.model}'")
    return StudentSpec(spec.model, spec.preprocess, spec.options, start, spec.classes, spec.shape, spec.fits)


def _try(student: StudentSpec, pool: RawInputs) -> None:
    """Try the untrained student on two inputs, before any teacher is evaluated."""
    name = student.model if isinstance(student.model, str) else "a module"
    try:
        shape = output_shape(student.prototype, pool.first(2, student.preprocess))
    except FeddfError:
        raise
    except Exception as error:
        raise ConfigError.at("student", name, f"it does not work on these inputs: {first_line(error)}") from error
    if shape != (count := len(student.classes),):
        allowed = f"it cannot express all classes: its outputs have the shape {shape}, and there are {count} classes"
        raise ConfigError.at("student", name, allowed)


def _alike(student: StudentSpec, teachers: Sequence[TrainedModel]) -> list[TrainedModel]:
    return [one for one in teachers if one.spec is not None and one.spec == student.description]


def first_weights(student: StudentSpec, teachers: Sequence[TrainedModel], dropped: Collection[str], seed: int) -> State:
    """Return the student's first weights: a teacher's, the average of teachers like it, its own, or new ones."""
    alike = [one for one in _alike(student, teachers) if student.init == "average" and one.id not in dropped]
    sources = alike or [one for one in teachers if one.id == student.init]
    if found := sorted(sources, key=lambda one: one.id):
        return weighted_mean([one.state() for one in found if one.state], [one.examples for one in found])
    return student.model.state_dict() if isinstance(student.model, nn.Module) else init_state(student.prototype, seed)
