"""The student: what the teachers are fused into, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from feddf.config.errors import ConfigError, FeddfError, first_line, nearest
from feddf.config.names import MODELS
from feddf.evaluate import output_shape
from feddf.oneshot.teachers import TrainedModel
from feddf.oneshot.unlabeled_inputs import Raw
from feddf.saved.model import ModelSpec
from feddf.saved.preprocess import Features, Preprocess
from feddf.types import Prototype, State

STUDENT = "student"


@dataclass(frozen=True)
class StudentPlan:
    """What the teachers are fused into: an architecture by its name, or a module of the user's own.

    ``start`` are its first weights: "new", "average" (of the teachers of the same architecture, classes and
    preprocessing), or a teacher's name. ``classes`` are all that some teacher knows, unless they are named.
    """

    model: str | nn.Module | None
    preprocess: Preprocess | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    start: str = "new"
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Apprentice:
    """The student's architecture, its preprocessing, its first weights, and the teachers whose average it starts as."""

    prototype: Prototype
    preprocess: Preprocess | None
    spec: ModelSpec | None
    first: State | None
    averaged: tuple[TrainedModel, ...] = ()


def student_of(plan: StudentPlan, teachers: Sequence[TrainedModel], classes: tuple[str, ...], raw: Raw) -> Apprentice:
    """Return the student that is planned, once it has been tried on two inputs, or say what does not fit."""
    if plan.start not in ("new", "average"):
        return _as_teacher(plan, teachers, classes)
    if isinstance(plan.model, nn.Module):
        module = plan.model
        prototype = Prototype(STUDENT, lambda: deepcopy(module))
        made = Apprentice(prototype, plan.preprocess, None, module.state_dict())
    else:
        if plan.model is None:
            raise ConfigError.at("student.model", None, "name an architecture, or a teacher as student.start")
        MODELS.check(plan.model)
        shape = plan.preprocess.shape if plan.preprocess else tuple(raw.inputs(None).batch(torch.tensor([0])).shape[1:])
        preprocess = plan.preprocess or (Features(shape) if raw.is_plain else None)
        spec = ModelSpec(plan.model, shape, classes, preprocess, plan.options)
        made = Apprentice(replace(spec.prototype, name=STUDENT), plan.preprocess, spec, None)
    _try(made, raw, len(classes), plan)
    if plan.start == "average":
        alike = tuple(teacher for teacher in teachers if teacher.spec is not None and teacher.spec == made.spec)
        if not alike:
            allowed = (
                "no teacher has the student's architecture, classes and preprocessing, so there is nothing to average"
            )
            raise ConfigError.at("student.start", "average", allowed)
        return replace(made, averaged=alike)
    return made


def _as_teacher(plan: StudentPlan, teachers: Sequence[TrainedModel], classes: tuple[str, ...]) -> Apprentice:
    """Return a student that starts as one of the teachers."""
    found = next((teacher for teacher in teachers if teacher.id == plan.start), None)
    if found is None:
        names = ["new", "average", *(teacher.id for teacher in teachers)]
        raise ConfigError.at("student.start", plan.start, f"no teacher has this name; {nearest(plan.start, names)}")
    if found.spec is None or found.state is None:
        raise ConfigError.at(
            "student.start", plan.start, "only weights of feddf's architectures can be trained further"
        )
    if found.spec.classes != classes:
        missing = [name for name in classes if name not in found.spec.classes] or list(classes)
        allowed = f"it cannot express all classes: '{missing[0]}' is none of its outputs, or they are in another order"
        raise ConfigError.at("student.start", plan.start, allowed)
    if plan.model is not None and plan.model != found.spec.model:
        raise ConfigError.at(
            "student.model", plan.model, f"it is to start as '{plan.start}', which is '{found.spec.model}'"
        )
    prototype = replace(found.spec.prototype, name=STUDENT)
    return Apprentice(prototype, found.spec.preprocess, found.spec, found.state())


def _try(made: Apprentice, raw: Raw, n_classes: int, plan: StudentPlan) -> None:
    """Try the untrained student on two inputs, before anybody is asked."""
    name = plan.model if isinstance(plan.model, str) else "a module"
    try:
        few = Raw(raw.rows[:2], raw.encode).inputs(made.preprocess)
        shape = output_shape(made.prototype, few)
    except FeddfError:
        raise
    except Exception as error:
        raise ConfigError.at("student", name, f"it does not work on these inputs: {first_line(error)}") from error
    if shape != (n_classes,):
        allowed = (
            f"it cannot express all classes: its outputs have the shape {shape}, and there are {n_classes} classes"
        )
        raise ConfigError.at("student", name, allowed)
