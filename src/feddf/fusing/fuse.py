"""``feddf.fuse``: one student out of models that were trained apart.

It is FedDF cut where the paper cuts it: a start, the targets of an ensemble of teachers, and one student that is drawn
towards them. There are no clients and no rounds.

>>> import torch
>>> _ = torch.manual_seed(0)
>>> fused = fuse([nn.Linear(4, 3), nn.Linear(4, 3)], nn.Linear(4, 3), torch.randn(64, 4),
...              distill=DistillConfig(steps=10, early_stopping="none"))
>>> fused.classes
('0', '1', '2')
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from feddf.config.errors import ConfigError, nearest, one_line
from feddf.config.fuse_config import FuseEnsembleConfig
from feddf.config.names import MODELS
from feddf.config.sections import DistillConfig, RunConfig
from feddf.data.datasets import plain
from feddf.data.unlabeled import all_rows
from feddf.engines import in_process
from feddf.evaluate import logits, output_shape
from feddf.fusing.asking import check_tables
from feddf.fusing.classes import columns_of, respelled
from feddf.fusing.ensemble import agree_on_outputs, combine_teachers, refuse_meaningless
from feddf.fusing.feeding import HAND, POOL, Feeding
from feddf.fusing.inputs import FeedingWarning, Labeled, RawInputs, as_labeled
from feddf.fusing.inspecting import warning_of
from feddf.fusing.predictions import PredictionCache, Progress, default_cache, quiet
from feddf.fusing.report import STUDENT, Report, measure, some_masks
from feddf.fusing.teachers import TrainedModel, as_teachers
from feddf.fusion.distill import make_students, notes
from feddf.fusion.ensemble import Targets
from feddf.outputs import Outputs
from feddf.runs.methods import lone_threads
from feddf.runtime.device import CPU
from feddf.runtime.execution import of_answers, of_students
from feddf.saved.model import Features, Images, LoadedModel, ModelSpec, Preprocess, of_inputs
from feddf.seeds import derive
from feddf.states import init_state, weighted_mean
from feddf.types import Examples, Inputs, Prototype, Resources, State


@dataclass(frozen=True)
class StudentSpec:
    """What the teachers are fused into: an architecture by its name, or a module of the user's own.

    ``init`` names its first weights: "new", "average" (of the teachers of the same architecture, classes and
    preprocessing), or a teacher's name. ``classes`` are all that some teacher knows, unless they are named. ``shape``
    is that of one encoded input, ``fits`` and ``form`` as in :class:`~feddf.saved.model.ModelSpec`: all follow from the
    rest. ``feeding`` says how it is fed, and from where that is known; ``background`` names the class of whatever is
    none of the others.
    """

    model: str | nn.Module | None
    preprocess: Preprocess | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    init: str = "new"
    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    fits: bool = False
    feeding: Feeding = Feeding()
    background: str | None = None
    form: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fed(self) -> Feeding:
        """How it is fed, and from where that is known: by hand, unless something else is."""
        return self.feeding if self.feeding.values else Feeding.of(self.preprocess, HAND)

    @property
    def description(self) -> ModelSpec | None:
        """What is written beside its weights; there is none for a module."""
        if not isinstance(self.model, str):
            return None
        return ModelSpec(self.model, self.shape, self.classes, self.preprocess, self.options, self.fits, self.form)

    @property
    def prototype(self) -> Prototype:
        """How it is built."""
        if (found := self.description) is not None:
            return replace(found.prototype, name=STUDENT)
        return Prototype(STUDENT, lambda: deepcopy(self.model))  # type: ignore[arg-type,return-value]


@dataclass(frozen=True)
class FusionResult:
    """The student with its classes and preprocessing, and the report on it and its teachers.

    ``evaluated`` are the teachers that had to be opened; the predictions of the others were cached. Of masks, ``shown``
    are some with what they are of, by whose they are.
    """

    model: nn.Module
    classes: tuple[str, ...]
    spec: ModelSpec | None
    report: Report
    evaluated: tuple[str, ...]
    shown: Mapping[str, Tensor] = field(default_factory=dict)


def fuse(
    teachers: Sequence[TrainedModel | nn.Module | str | Path],
    student: str | nn.Module | StudentSpec,
    unlabeled: Tensor | Inputs | RawInputs | Sequence[str],
    *,
    validation: Examples | Labeled | None = None,
    test: Examples | Labeled | None = None,
    ensemble: FuseEnsembleConfig = FuseEnsembleConfig(),
    distill: DistillConfig | None = None,
    run: RunConfig = RunConfig(),
    device: str | None = None,
    seed: int = 0,
    cache: Path | None = None,
    progress: Progress = quiet,
    trust: bool = False,
) -> FusionResult:
    """Fuse trained models of any architecture into one student, on unlabeled inputs.

    Args:
        teachers: modules, paths that ``feddf fuse`` takes, or :class:`~feddf.fusing.teachers.TrainedModel` values.
        student: an architecture's name, a module, or a :class:`~feddf.fusing.fuse.StudentSpec`.
        unlabeled: inputs as the models take them, bytes of images with an encoding (``Inputs``), or texts.
        validation: labeled examples for early stopping, weights and drop-worst.
        test: labeled examples for the report only.
        ensemble: how the teachers' predictions are combined (the section ``[ensemble]``).
        distill: how the student is trained (the section ``[distill]``).
        run: engine, device and precision (the section ``[run]``).
        device: where teachers and student compute (default: that of ``run``); the returned model is on the CPU.
        seed: decides all random choices.
        cache: the folder of cached predictions (default: the user's cache).
        progress: called as teachers predict, and as the student learns.
        trust: run code that files of teachers hold (``.pt2``) or that folders made elsewhere name.
    """
    pool, spec = _pool(unlabeled, student if isinstance(student, StudentSpec) else StudentSpec(student))
    given = {"validation": validation, "test": test}
    labeled = {name: as_labeled(one, pool) for name, one in given.items() if one is not None}
    sets = {"pool": pool} | {name: one.raw for name, one in labeled.items()}
    run = run.model_copy(update={"device": device}) if device is not None else run
    distill = distill or DistillConfig(early_stopping="validation" if validation is not None else "held-out-loss")
    known = [one.fed_like(spec.fed) for one in as_teachers(teachers, trust)]
    check_tables(known, ensemble, pool.views)
    with TemporaryDirectory(prefix="feddf-predictions-") as scratch:
        folders = cache or default_cache(), Path(scratch)
        predictions = PredictionCache(*folders, sets, spec.preprocess, progress, of_answers(run))
        return _fuse(known, spec, predictions, labeled, ensemble, distill, run, seed)


def _fuse(
    teachers: Sequence[TrainedModel],
    student: StudentSpec,
    predictions: PredictionCache,
    labeled: Mapping[str, Labeled],
    config: FuseEnsembleConfig,
    distill: DistillConfig,
    run: RunConfig,
    seed: int,
) -> FusionResult:
    pool = predictions.sets["pool"]
    for table in [one for one in teachers if one.table is not None]:  # wrong ones are refused before a model is asked
        predictions.logits(table, rows=torch.arange(1) if predictions.meaning(table).is_large else None)
    ask = predictions.meaning, predictions.n_channels
    models, classes, outputs = agree_on_outputs(teachers, student.classes, student.background, *ask)
    refuse_meaningless(config, distill.temperature, outputs, models)
    student = complete_student(student, models, classes, outputs, pool)
    labeled = {name: one.among(classes, outputs) for name, one in labeled.items()}
    held = labeled.get("validation")
    validation = held.examples(student.preprocess) if held else None
    matched = {one.id: found for one in models if (found := respelled(one.classes, classes))}
    said = {"warnings": _warnings(models, classes, held if outputs.counts_classes else None), "matched": matched}
    ensemble = combine_teachers(models, classes, outputs, predictions, validation, config)
    targets = ensemble.targets(distill.temperature)
    prototype, spec = student.prototype, student.description
    resources = Resources({STUDENT: prototype}, pool.stored(student.preprocess), validation, outputs=outputs)
    execution = of_students(run, 1, partial(lone_threads, resources, distill.batch_size))
    learn = make_students(resources, distill, in_process, execution)
    start = first_weights(student, models, ensemble.notes.get("dropped_worst", {}).get("clients", {}), seed)
    learned = learn({STUDENT: [start]}, _shown(targets, predictions, distill.steps), derive(seed, "fuse"))
    predictions.progress(STUDENT, learned[STUDENT].steps, learned[STUDENT].steps)
    state, facts = learned[STUDENT].state, {"distillation": notes(learned), **ensemble.notes, **said}
    with of_answers(run).begun() as device:
        module = prototype.load(state, device)

        def answer(raw: RawInputs) -> Tensor:
            return logits(module, raw.stored(student.preprocess)).to(CPU)

        report = measure(answer, ensemble, distill.temperature, labeled, notes=facts, student=student.fed.described())
        shown = some_masks(answer, ensemble, labeled)
    model = LoadedModel(prototype.load(state), spec) if spec else prototype.load(state)
    return FusionResult(model.eval(), classes, spec, report, tuple(dict.fromkeys(predictions.evaluated)), shown)


def _warnings(models: Sequence[TrainedModel], classes: Sequence[str], validation: Labeled | None) -> list[str]:
    """Warn of teachers whose feeding is assumed; where there are labels, with what would be better."""
    found = [*filter(None, (warning_of(one, validation, columns_of(one.classes, classes)) for one in models))]
    for text in found:
        warnings.warn(text, FeedingWarning, stacklevel=4)
    return found


def _shown(targets: Targets, predictions: PredictionCache, steps: int) -> Targets:
    """Return targets that show, by how often they are asked for, about how far the student is."""
    asked = count(1)

    def shown(chosen: Tensor, inputs: Tensor, /) -> Tensor:
        if (done := next(asked)) < steps and done % 10 == 0:
            predictions.progress(STUDENT, done, steps)
        return targets(chosen, inputs)

    return shown


def _pool(given: Tensor | Inputs | RawInputs | Sequence[str], student: StudentSpec) -> tuple[RawInputs, StudentSpec]:
    """Return raw inputs, and the student with their preprocessing where it has none of its own."""
    if isinstance(given, Inputs):
        found = of_inputs(given)
        student = replace(student, preprocess=student.preprocess or (found if isinstance(found, Images) else None))
        given = RawInputs(all_rows(given.raw), given.encode)
    elif not isinstance(given, RawInputs):
        given = RawInputs(given if isinstance(given, Tensor) else tuple(given))
    if len(given) < 2:
        raise ConfigError(f"the pool is empty: it has {len(given)} inputs, and needs at least two")
    return given, student


def complete_student(
    student: StudentSpec, teachers: Sequence[TrainedModel], classes: tuple[str, ...], outputs: Outputs, pool: RawInputs
) -> StudentSpec:
    """Return the student with all that follows from teachers and pool, once it has been tried on two inputs."""
    if student.init not in ("new", "average"):
        return _as_teacher(student, teachers, classes)
    if student.model is None:
        raise ConfigError.at("student.model", None, "name an architecture, or a teacher as student.init")
    student = replace(student, classes=classes, form=outputs.form)
    if isinstance(student.model, str):
        MODELS.check(student.model)
        fed = student.preprocess
        shape = fed.shape if fed else tuple(pool.first(1).inputs(None).batch(torch.tensor([0])).shape[1:])
        fed = fed or (Features(shape) if pool.encode is plain else None)
        student = replace(student, preprocess=fed, shape=shape, feeding=student.fed.otherwise(Feeding.of(fed, POOL)))
    _try(student, outputs, pool)
    if student.init == "average" and not _alike(student, teachers):
        allowed = "no teacher has the student's architecture, classes and preprocessing, so there is nothing to average"
        raise ConfigError.at("student.init", "average", allowed)
    return student


def _as_teacher(student: StudentSpec, teachers: Sequence[TrainedModel], classes: tuple[str, ...]) -> StudentSpec:
    """Return a student that starts as one of the teachers."""
    start, known = student.init, {teacher.id: teacher.spec for teacher in teachers}
    if start not in known:
        allowed = f"no teacher has this name; {nearest(start, ['new', 'average', *known])}"
        raise ConfigError.at("student.init", start, allowed)
    spec = known[start]
    if spec is None:
        raise ConfigError.at("student.init", start, "only weights of feddf's architectures can be trained further")
    if spec.classes != classes:
        missing = [name for name in classes if name not in spec.classes] or classes
        allowed = f"it cannot express all classes: '{missing[0]}' is none of its outputs, or they are in another order"
        raise ConfigError.at("student.init", start, allowed)
    if student.model not in (None, spec.model):
        raise ConfigError.at("student.model", student.model, f"it is to start as '{start}', which is '{spec.model}'")
    return StudentSpec(**vars(spec), init=start, feeding=Feeding.of(spec.preprocess, f"teacher {start}"))


def _try(student: StudentSpec, outputs: Outputs, pool: RawInputs) -> None:
    """Try the untrained student on two inputs, before any teacher is evaluated."""
    name = student.model if isinstance(student.model, str) else "a module"
    with one_line(partial(ConfigError.at, "student", name), "it does not work on these inputs"):
        shape = output_shape(student.prototype, pool.first(2).inputs(student.preprocess))
    if shape != outputs.shape:
        there = f"there are {len(student.classes)} classes" if outputs.counts_classes else f"{outputs.shape} is needed"
        allowed = f"it cannot express all classes: its outputs have the shape {shape}, and {there}"
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
