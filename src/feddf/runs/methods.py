"""How a method is composed: from the settings, and what the server holds, to a fusion."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial

from feddf import evaluate
from feddf.accelerate import Accelerate, can_compile, compiled, eager
from feddf.data.augment import flip_crop
from feddf.fusion import FUSIONS, Kit, Schedule
from feddf.fusion.average import average, uniform_average
from feddf.fusion.batchnorm import last_statistics, local_statistics, recalibrated
from feddf.fusion.ensemble import answer, combine
from feddf.fusion.feddf import MoreTeachers, nobody_else
from feddf.fusion.momentum import momentum
from feddf.fusion.select import JUDGES, drop_worst, examined
from feddf.fusion.swag import swag
from feddf.fusion.weigh import Weigh, by_accuracy, by_certainty, by_class_counts, by_examples
from feddf.fusion.weigh import uniform as uniform_weights
from feddf.runs.settings import Settings
from feddf.types import Engine, Examples, Fusion, Inputs, Prototype, Rule


def fusion_of(
    settings: Settings,
    prototypes: Mapping[str, Prototype],
    validation: Examples,
    pool: Inputs | None,
    engine: Engine,
) -> Fusion:
    """Return the fusion that the settings name, over the server's own data; ``validation`` may be empty."""
    examine = partial(answer, prototypes=prototypes, inputs=validation.inputs)
    weigh: Mapping[str, Weigh] = {
        "uniform": uniform_weights,
        "examples": by_examples,
        "certainty": by_certainty,
        "class-counts": partial(by_class_counts, n_classes=validation.n_classes),
        "validation": partial(
            by_accuracy, examine=partial(examined, engine=engine, examine=examine, labels=validation.labels)
        ),
    }
    kit = Kit(
        prototypes,
        pool,
        engine,
        score=partial(evaluate.accuracy, examples=validation) if settings.stop == "validation" else None,
        schedule=_schedule(settings, len(prototypes)),
        mode=settings.mode,
        rule=_rule(settings, pool, prototypes),
        start=settings.start,
        target=partial(combine, average=settings.teacher_average, temperature=settings.temperature),
        weigh=weigh[settings.teacher_weights],
        more_teachers=_swag(settings),
        held_out=settings.held_out if settings.stop == "held-out-loss" else 0.0,
        augment=flip_crop if settings.pool_augment else None,
        growth=settings.fedma_growth,
    )
    fuse = FUSIONS[settings.method](kit)
    if settings.batchnorm == "local":
        fuse = local_statistics(fuse)
    if settings.server_momentum:
        fuse = momentum(settings.server_momentum, fuse, prototypes)
    if settings.drop_worst != "none":
        judge = JUDGES[settings.drop_worst]
        fuse = drop_worst(judge, fuse, engine=engine, examine=examine, validation=validation)
    return fuse


def _schedule(settings: Settings, students: int) -> Schedule:
    return Schedule(
        steps=settings.distill_steps,
        batch=settings.distill_batch,
        rate=settings.distill_rate,
        check_every=settings.distill_check,
        patience=settings.distill_patience,
        optimizer=settings.distill_optimizer,
        temperature=settings.temperature,
        clip=settings.distill_clip,
        threads=settings.threads_of_a_student(students),
        accelerate=accelerate_of(settings),
        beside=(os.cpu_count() or 1) >= 2 * students * settings.threads_of_a_student(students),
    )


def _rule(settings: Settings, pool: Inputs | None, prototypes: Mapping[str, Prototype]) -> Rule:
    rule = average if settings.average_weights == "examples" else uniform_average
    if settings.batchnorm == "last":
        return last_statistics(rule)
    if settings.batchnorm == "recalibrate" and pool is not None:
        return recalibrated(rule, prototypes, pool)
    return rule


def _swag(settings: Settings) -> MoreTeachers:
    if not settings.swag_samples:
        return nobody_else
    return partial(swag, samples=settings.swag_samples, scale=settings.swag_scale)


def accelerate_of(settings: Settings) -> Accelerate:
    """Return how training steps are made fast: compiled if that was asked for and works here."""
    if not settings.compile:
        return eager
    if not can_compile():
        warnings.warn("this machine cannot compile (is a C++ compiler installed?); going on without", stacklevel=2)
        return eager
    return compiled
