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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import FuseEnsembleConfig
from feddf.config.sections import DistillConfig, RunConfig
from feddf.data.unlabeled import all_rows
from feddf.engines import in_process
from feddf.fusing.ensemble import agree_on_classes, combine_teachers
from feddf.fusing.inputs import Labeled, RawInputs, as_labeled
from feddf.fusing.predictions import PredictionCache, Progress, default_cache, quiet
from feddf.fusing.report import Report, measure
from feddf.fusing.student import STUDENT, StudentSpec, complete_student, first_weights
from feddf.fusing.teachers import TrainedModel, as_teachers
from feddf.fusion.ensemble import CachedTargets
from feddf.fusion.students import make_students, notes
from feddf.runs.methods import lone_threads
from feddf.runtime.execution import of_answers, of_students
from feddf.saved.model import Images, LoadedModel, ModelSpec, of_inputs
from feddf.seeds import derive
from feddf.types import Examples, Inputs, Resources


@dataclass(frozen=True)
class FusionResult:
    """The student with its classes and preprocessing, and the report on it and its teachers.

    ``evaluated`` are the teachers that had to be opened; the predictions of the others were cached.
    """

    model: nn.Module
    classes: tuple[str, ...]
    spec: ModelSpec | None
    report: Report
    evaluated: tuple[str, ...]


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
        student: an architecture's name, a module, or a :class:`~feddf.fusing.student.StudentSpec`.
        unlabeled: inputs as the models take them, bytes of images with an encoding (``Inputs``), or texts.
        validation: labeled examples for early stopping, weights and drop-worst.
        test: labeled examples for the report only.
        ensemble: how the teachers' predictions are combined (the section ``[ensemble]``).
        distill: how the student is trained (the section ``[distill]``).
        run: engine, device and precision (the section ``[run]``).
        device: where teachers and student compute (default: that of ``run``); the returned model is on the CPU.
        seed: decides all random choices.
        cache: the folder of cached predictions (default: the user's cache).
        progress: called as teachers predict.
        trust: run code that files of teachers hold (``.pt2``) or that folders made elsewhere name.
    """
    pool, spec = _pool(unlabeled, student if isinstance(student, StudentSpec) else StudentSpec(student))
    given = {"validation": validation, "test": test}
    labeled = {name: as_labeled(one, pool) for name, one in given.items() if one is not None}
    sets = {"pool": pool, **{name: one.raw for name, one in labeled.items()}}
    run = run.model_copy(update={"device": device}) if device is not None else run
    distill = distill or DistillConfig(early_stopping="validation" if validation is not None else "held-out-loss")
    found = as_teachers(teachers, trust)
    with TemporaryDirectory(prefix="feddf-predictions-") as scratch:
        folders = cache or default_cache(), Path(scratch)
        predictions = PredictionCache(*folders, sets, spec.preprocess, progress, of_answers(run))
        return _fuse(found, spec, predictions, labeled, ensemble, distill, run, seed)


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
    models, classes = agree_on_classes(teachers, student.classes, predictions.n_outputs)
    student = complete_student(student, models, classes, pool)
    labeled = {name: one.among(classes) for name, one in labeled.items()}
    held = labeled.get("validation")
    validation = held.examples(student.preprocess) if held else None
    ensemble = combine_teachers(models, classes, predictions, validation, config)
    targets = ensemble.probabilities("pool", distill.temperature)
    prototype, spec = student.prototype, student.description
    resources = Resources({STUDENT: prototype}, pool.stored(student.preprocess), validation)
    execution = of_students(run, 1, partial(lone_threads, resources, distill.batch_size))
    learn = make_students(resources, distill, in_process, execution)
    start = first_weights(student, models, ensemble.dropped, seed)
    learned = learn({STUDENT: [start]}, CachedTargets(targets), derive(seed, "fuse"))
    state, facts = learned[STUDENT].state, {"distillation": notes(learned), **ensemble.notes}
    with of_answers(run).begun() as device:
        report = measure(prototype.load(state, device), student.preprocess, ensemble, targets, labeled, facts)
    model = LoadedModel(prototype.load(state), spec) if spec else prototype.load(state)
    return FusionResult(model.eval(), classes, spec, report, tuple(dict.fromkeys(predictions.evaluated)))


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
