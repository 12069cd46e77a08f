"""``feddf.fuse``: one student out of models that were trained apart.

It is FedDF cut where the paper cuts it: a start, the targets of an ensemble of teachers, and one student that is drawn
towards them. There are no clients and no rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import EnsembleConfig, TeacherConfig
from feddf.config.sections import DistillConfig, RunConfig
from feddf.engines import in_process
from feddf.fusion.early_stopping import Distilled
from feddf.fusion.ensemble import Remembered
from feddf.fusion.students import notes, students_of
from feddf.oneshot.cached_answers import Progress, quiet, remembering
from feddf.oneshot.classes import agreed
from feddf.oneshot.combined import Asking, Combined, combined
from feddf.oneshot.report import Report, reported
from feddf.oneshot.student import STUDENT, Apprentice, StudentPlan, student_of
from feddf.oneshot.teachers import TeacherError, TrainedModel, of_module, read_teachers
from feddf.oneshot.unlabeled_inputs import Given, Labelled, Raw
from feddf.runs.methods import lone_threads
from feddf.runtime.execution import of_answers, of_students
from feddf.saved.model import LoadedModel, ModelSpec
from feddf.saved.preprocess import Images, of_inputs
from feddf.seeds import derive
from feddf.states import initial, weighted_mean
from feddf.types import Examples, Inputs, Resources, State


@dataclass(frozen=True)
class FusionResult:
    """The student with its classes and preprocessing, and the report on it and its teachers.

    ``asked`` are the teachers that had to be asked; the answers of the others were remembered.
    """

    model: nn.Module
    classes: tuple[str, ...]
    spec: ModelSpec | None
    report: Report
    asked: tuple[str, ...]


def fuse(
    teachers: Sequence[TrainedModel | nn.Module | str | Path],
    student: str | nn.Module | StudentPlan,
    unlabeled: Tensor | Inputs | Raw | Sequence[str],
    *,
    validation: Examples | Given | None = None,
    test: Examples | Given | None = None,
    ensemble: EnsembleConfig = EnsembleConfig(),
    distill: DistillConfig | None = None,
    run: RunConfig = RunConfig(),
    device: str | None = None,
    seed: int = 0,
    cache: Path | None = None,
    progress: Progress = quiet,
    trust: bool = False,
) -> FusionResult:
    """Fuse trained models of any architecture into one student, on unlabeled inputs.

    ``teachers`` are modules, paths that ``feddf fuse`` takes, or :class:`~feddf.oneshot.teachers.TrainedModel` values.
    ``unlabeled`` are inputs as the models take them, bytes of images with an encoding (``Inputs``), or texts.
    Labelled ``validation`` examples are used for early stopping; those of ``test`` are measured on and nothing else.
    Teachers and student compute on a ``device`` (that of ``run``, if none is named: the first accelerator that works,
    else the CPU); the model that is returned is on the CPU. With ``trust``, code runs that files of teachers hold
    (``.pt2``) or that folders made elsewhere name.

    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> fused = fuse([nn.Linear(4, 3), nn.Linear(4, 3)], nn.Linear(4, 3), torch.randn(64, 4),
    ...              distill=DistillConfig(steps=10, stop="steps"))
    >>> fused.classes
    ('0', '1', '2')
    """
    plan = student if isinstance(student, StudentPlan) else StudentPlan(student)
    raw, plan = _raw(unlabeled, plan)
    if len(raw) < 2:
        raise ConfigError(f"the pool is empty: it has {len(raw)} inputs, and needs at least two")
    distill = distill or DistillConfig(stop="validation" if validation is not None else "held-out-loss")
    run = run.model_copy(update={"device": device}) if device is not None else run
    execution = of_answers(run)
    with remembering(cache, progress, execution) as memory:
        asking = Asking(memory, raw, plan.preprocess)
        given = _teachers(teachers, trust)
        known = [asking.n_outputs(teacher) for teacher in given]
        listed, classes = agreed(given, known, plan.classes)
        apprentice = student_of(plan, listed, classes, raw)
        labelled = {
            name: _labelled(found, classes, raw)
            for name, found in (("validation", validation), ("test", test))
            if found
        }
        held = labelled.get("validation")
        examples = held.examples(apprentice.preprocess) if held else None
        together = combined(listed, classes, asking, held, ensemble, distill.temperature, examples)
        targets = together.about(raw)
        learned = _distilled(apprentice, together, targets, raw, examples, distill, run, seed)
        state = learned.state
        facts = {"distillation": notes({STUDENT: learned}), **together.notes}
        with execution.begun() as place:
            tried = apprentice.prototype.load(state, place)
            report = reported(tried, apprentice.preprocess, listed, classes, asking, together, targets, labelled, facts)
        module = apprentice.prototype.load(state)
    model = LoadedModel(module, apprentice.spec) if apprentice.spec else module
    return FusionResult(model.eval(), classes, apprentice.spec, report, tuple(dict.fromkeys(memory.asked)))


def _teachers(given: Sequence[TrainedModel | nn.Module | str | Path], trust: bool) -> list[TrainedModel]:
    if not given:
        raise TeacherError("there is no teacher to learn from")
    found: list[TrainedModel] = []
    for number, one in enumerate(given, 1):
        if isinstance(one, TrainedModel):
            found.append(one)
        elif isinstance(one, LoadedModel):
            found.append(of_module(one, f"teacher-{number}", classes=one.classes, preprocess=one.preprocess))
        elif isinstance(one, nn.Module):
            found.append(of_module(one, f"teacher-{number}"))
        else:
            found += read_teachers([TeacherConfig(path=str(one))], trust=trust)
    names = [teacher.id for teacher in found]
    if len(set(names)) < len(names):
        found = [replace(one, id=f"{one.id}-{number}") for number, one in enumerate(found, 1)]
    return found


# Distillation


def _distilled(
    student: Apprentice,
    together: Combined,
    targets: Tensor,
    pool: Raw,
    examples: Examples | None,
    distill: DistillConfig,
    run: RunConfig,
    seed: int,
) -> Distilled:
    """Let the student learn what the teachers say about the pool."""
    resources = Resources({STUDENT: student.prototype}, pool.stored(student.preprocess), examples)
    execution = of_students(run, 1, partial(lone_threads, resources, distill.batch))
    learn = students_of(resources, distill, in_process, execution)
    dropped = together.notes.get("dropped_worst", {}).get("clients", {})
    start = _start(student, dropped, seed)
    return learn({STUDENT: [start]}, Remembered(targets), derive(seed, "fuse"))[STUDENT]


def _start(student: Apprentice, dropped: Collection[str], seed: int) -> State:
    """Return the student's first weights: the average of teachers like it, those it was given, or new ones."""
    alike = sorted((one for one in student.averaged if one.id not in dropped), key=lambda one: one.id)
    if alike:
        return weighted_mean([_state(one) for one in alike], [one.examples for one in alike])
    return student.first if student.first is not None else initial(student.prototype, seed)


def _state(teacher: TrainedModel) -> State:
    assert teacher.state is not None, "only teachers with weights are averaged"
    return teacher.state()


# What a program may hand over


def _raw(given: Tensor | Inputs | Raw | Sequence[str], plan: StudentPlan) -> tuple[Raw, StudentPlan]:
    """Return raw inputs, and the student with their preprocessing where it has none of its own."""
    if isinstance(given, Raw):
        return given, plan
    if isinstance(given, Tensor):
        return Raw(given), plan
    if isinstance(given, Inputs):
        rows = given.raw if isinstance(given.raw, Tensor) else given.raw[torch.arange(len(given))]
        found = of_inputs(given)
        preprocess = plan.preprocess or (found if isinstance(found, Images) else None)
        return Raw(rows, given.encode), replace(plan, preprocess=preprocess)
    return Raw(tuple(given)), plan


def _labelled(given: Examples | Given, classes: tuple[str, ...], like: Raw) -> Labelled:
    if not isinstance(given, Examples):
        return given(classes)
    if given.n_classes != len(classes):
        raise ConfigError(f"the labelled examples have {given.n_classes} classes, and the student has {len(classes)}")
    rows = given.inputs.raw if isinstance(given.inputs.raw, Tensor) else given.inputs.raw[torch.arange(len(given))]
    return Labelled(Raw(rows, like.encode), given.labels, len(classes))
