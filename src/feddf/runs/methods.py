"""From settings to a method: here, and nowhere below, names and sections become values.

A method by name is a function ``(resources, settings, engine)`` that returns a fusion, or a :class:`Method` if it also
asks something of its clients. A part by name is a function of the resources that returns a :class:`Part`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch

from feddf.admit import weights_due
from feddf.client import combine_halves, halves_of
from feddf.config import ConfigError, Settings, names, with_values
from feddf.config.errors import one_line
from feddf.config.experiment import AROUND, Mistake
from feddf.engines import in_process
from feddf.evaluate import Accuracies, Teacher, teacher_of
from feddf.fusion import answers, average
from feddf.fusion import feddf as algorithm
from feddf.fusion import fedma as matched
from feddf.fusion.batchnorm import local_statistics, with_statistics
from feddf.fusion.distill import Students, make_students
from feddf.fusion.ensemble import MakeTargets, make_ensemble
from feddf.fusion.select import drop_worst, validation_accuracies
from feddf.outputs import Outputs, classes
from feddf.robust.defense import MARGIN, bounded_counts, check_models, guard, robust_start
from feddf.robust.statistics import bounded_statistics
from feddf.robust.trust import weigh_by_trust
from feddf.runtime.device import threads_for
from feddf.runtime.execution import of_answers, of_students
from feddf.types import Client, Engine, Fusion, Job, Method, Part, Prototype, Resources, Rule, State, Training, Update

MOST_ANSWERS = 2**26
"""Numbers in the answers for a pool up to which these are kept in memory, a gigabyte; masks and texts have more."""

KNOWN = "known-channels"
"""The part of a method whose clients know different channels."""

CANDIDATES = {"average": algorithm.from_average, "previous": algorithm.from_previous, "best": algorithm.from_best}
"""What ``distill.init`` stands for."""


def build_method(
    resources: Resources, settings: Settings, engine: Engine, models: Mapping[str, State]
) -> tuple[Method, Mapping[str, Prototype]]:
    """Return the method that the settings name, and the architectures as it fits them.

    Its clients' half begins and finishes on every initial model: all that cannot be is one line before any training.
    """
    with one_line(partial(ConfigError.at, "fusion.method", settings.fusion.method), of=ValueError):
        method = make_method(resources, settings, engine)
    prototypes = fit_prototypes(resources, method.parts).prototypes
    half = combine_halves([*(part.half for part in method.parts), *halves_of(settings.local)])
    binary, named = settings.local.binary, list(settings.fusion.parts)
    key, given = ("fusion.parts", named) if named or binary == "none" else ("local.binary", binary)
    for name, prototype in prototypes.items():
        outputs = classes(2) if resources.outputs.channels is None else resources.outputs
        job, raw = Job(Client("trial", name), 1, models[name], 0), torch.zeros(2, *map(int, outputs.shape))  # type: ignore[arg-type]
        labels = outputs.decide(outputs.probabilities(raw))
        training = Training(job, prototype, labels, outputs, settings.local.optimizer, 1, 1.0)
        with one_line(partial(ConfigError.at, key, given), f"'{name}'", ValueError):
            if finish := half(prototype.load(models[name]), training).finish:
                finish()
    return method, prototypes


def make_method(resources: Resources, settings: Settings, engine: Engine) -> Method:
    """Return the method that the settings name, inside the wrappers that they ask for.

    From the inside: local statistics, momentum, drop-worst, trust, a trial of all models, the guard, with the defense
    bounds on counts, its parts, and bounds on running statistics.

    Args:
        resources: the server's architectures, pool and validation examples.
        settings: the configuration; ``fusion.method`` names the method.
        engine: runs the server's work: predictions of teachers, and distillation.
    """
    asked = settings
    partial_knowledge = KNOWN in settings.fusion.parts
    settings.refuse(output_mistakes(settings, resources.outputs, partial_knowledge=partial_knowledge))
    if settings.fusion.defense == "robust":
        settings = robust_settings(settings, resources)
    fusion, execution = settings.fusion, of_answers(settings.run)
    made = names.METHODS[fusion.method](resources, settings, engine)
    method = made if isinstance(made, Method) else Method(made)
    resources = fit_prototypes(resources, method.parts)
    binary = [settings.local.binary] if settings.local.binary != "none" else []
    parts = (*method.parts, *(named_part(name, resources) for name in [*binary, *part_names(settings)]))
    due = weights_due(parts)
    if not due:
        around = AROUND if asked.fusion.parts != ("class-counts",) else AROUND[:-1]  # which are no weights
        asked.refuse(asked.changed(around, "it looks at clients' weights, and this method's clients send none"))
    fuse = method.fuse
    if fusion.batchnorm == "local":
        fuse = local_statistics(fuse)
    if fusion.momentum:
        fuse = average.momentum(fusion.momentum, fuse, resources.prototypes)
    if fusion.drop_worst != "none":
        accuracies, prototypes = validation_accuracies(resources, engine, execution), resources.prototypes

        def measure(updates: Sequence[Update]) -> Mapping[str, float]:
            return accuracies([teacher_of(update, prototypes) for update in updates])

        fuse = drop_worst(names.DROP_RULES[fusion.drop_worst], measure, resources.labeled, fuse)
    if fusion.trust != "none":
        fuse = weigh_by_trust(names.TRUSTS[fusion.trust](resources, engine, execution), fuse)
    fuse = check_models(fuse, resources, engine, execution, updates_too=due and not settings.distills)
    if fusion.guard is not None:

        def again() -> Fusion:
            robust = {"fusion.defense": "robust", "fusion.guard": 1.0, "fusion.parts": ()}
            return make_method(resources, with_values(settings, robust), engine).fuse

        other = None if fusion.defense != "none" or partial_knowledge else again
        fuse = guard(fusion.guard, fuse, resources, engine, other, execution)
    if fusion.defense == "robust":
        fuse = bounded_counts(fuse)
    for part in parts:
        fuse = part.fuse(fuse)
    return replace(method, fuse=bounded_statistics(fuse) if due else fuse, parts=parts)


def fit_prototypes(resources: Resources, parts: Sequence[Part]) -> Resources:
    """Return the resources with architectures that take the shapes that the method gives to their layers."""
    fit = next((part.fit for part in parts if part.fit), None)
    prototypes = {name: replace(prototype, fit=fit) for name, prototype in resources.prototypes.items()}
    return replace(resources, prototypes=prototypes)


def ensemble_mistakes(
    weights: str, combine: str, temperature: float, outputs: Outputs, *, partial_knowledge: bool
) -> Iterator[Mistake]:
    """Yield which settings of an ensemble and of a distillation have no meaning for this kind of output.

    A robust rule takes a teacher that does not know a channel for one that denies it.
    """
    kind = outputs.title
    count = f"classes are counted where each example has one, and the outputs are {kind}"
    yield weights == "class-counts" and not outputs.counts_classes, "ensemble.weights", count
    one = f"it is about the one class that is right, and the outputs are {kind}"
    yield weights == "certainty" and not outputs.one_is_right, "ensemble.weights", one
    yield combine == "entropy-reduced" and not outputs.one_is_right, "ensemble.combine", one
    units = f"{kind} have units and no temperature; leave it at 1"
    yield temperature != 1 and outputs.has_units, "distill.temperature", units
    left = "teachers know different channels; only 'logits' and 'probabilities' leave each to those who know it"
    yield partial_knowledge and combine not in ("logits", "probabilities"), "ensemble.combine", left


def output_mistakes(settings: Settings, outputs: Outputs, *, partial_knowledge: bool) -> Iterator[Mistake]:
    """Yield which settings have no meaning for this kind of output, or where clients know different channels."""
    fusion, ensemble, local, kind = settings.fusion, settings.ensemble, settings.local, outputs.title
    count = f"classes are counted where each example has one, and the outputs are {kind}"
    if not outputs.counts_classes:
        yield fusion.aggregation == "class-counts", "fusion.aggregation", count
        yield "class-counts" in fusion.parts, "fusion.parts", count
    given = ensemble.weights, ensemble.combine, settings.distill.temperature, outputs
    yield from ensemble_mistakes(*given, partial_knowledge=partial_knowledge)
    one = f"it is about the one class that is right, and the outputs are {kind}"
    yield local.logit_adjustment > 0 and not outputs.one_is_right, "local.logit_adjustment", one
    if partial_knowledge:
        judges = ("fusion.trust", "fusion.drop_worst", "fusion.defense", "fusion.exchange")
        yield from settings.changed(judges, "it would blame clients for the channels that they do not know")
        pooled = "clients know different channels, which no earlier, averaged or sampled model says"
        yield from settings.changed(["ensemble.ema", "ensemble.groups", "ensemble.swag_samples"], pooled)


def robust_settings(settings: Settings, resources: Resources) -> Settings:
    """Return the settings with the defense's parts filled in wherever the user has not chosen something else.

    A server that has neither validation data nor a pool can only clip.
    """
    changes: dict[str, object] = {}
    labeled = bool(resources.validation)
    measurable = labeled or resources.pool is not None
    if settings.fusion.trust == "none" and measurable:
        mixture = labeled and resources.outputs.likelihood is not None
        changes["fusion.trust"] = "mixture" if mixture else "expguard" if resources.pool is not None else "none"
    if settings.fusion.guard is None and measurable:
        changes["fusion.guard"] = MARGIN
    if settings.ensemble.combine == "logits":
        changes["ensemble.combine"] = "probabilities"
    return with_values(settings, changes)


def fedavg(resources: Resources, settings: Settings, engine: Engine) -> Fusion:
    """FedAvg."""
    return average.fedavg(averaging_rule(resources, settings))


def feddf(resources: Resources, settings: Settings, engine: Engine) -> Fusion | Method:
    """FedDF."""
    if settings.fusion.exchange == "answers":
        return feddf_of_answers(resources, settings, engine)
    rule, start = averaging_rule(resources, settings), CANDIDATES[settings.distill.init]
    return algorithm.feddf(rule, ensemble(resources, settings, engine), students(resources, settings, engine), start)


def feddf_of_answers(resources: Resources, settings: Settings, engine: Engine) -> Method:
    """FedDF whose clients send answers for the pool, and keep their models."""
    config, distill = settings.answers, settings.distill
    told = {"epochs": config.digest_epochs, "lr": config.digest_lr, "absolute": config.distance == "absolute"}
    told |= {"batch_size": distill.batch_size, "temperature": distill.temperature}
    part = named_part("answers", resources, told)
    taught = answers.remember_target(ensemble(resources, settings, in_process), resources.outputs)
    students_of = students(resources, settings, engine)
    return Method(algorithm.feddf(lambda previous, updates: previous, taught, students_of), (part,))


def fd(resources: Resources, settings: Settings, engine: Engine) -> Method:
    """FD."""
    return Method(answers.remember_means, (named_part("fd", resources, {"gamma": settings.answers.gamma}),))


def fedma(resources: Resources, settings: Settings, engine: Engine) -> Method:
    """FedMA."""
    return matched.fedma(resources.prototypes, settings.fedma)


def averaging_rule(resources: Resources, settings: Settings) -> Rule:
    """Return the average that the settings name, with BatchNorm's statistics treated as they say."""
    rule: Rule = names.AVERAGES[settings.fusion.aggregation]
    execution = of_answers(settings.run)
    if settings.fusion.defense == "robust":
        rule = robust_start(rule, resources, execution)
    return with_statistics(settings.fusion.batchnorm, rule, resources, execution)


def ensemble(resources: Resources, settings: Settings, engine: Engine) -> MakeTargets:
    """Return the ensemble of the section ``[ensemble]``."""
    config, execution = settings.ensemble, of_answers(settings.run)
    if resources.pool is None:
        raise ValueError("an ensemble answers for an unlabeled pool, and there is none")
    if resources.augment is not None and config.cache:
        raise ValueError("cached predictions are for the pool as it is; an augmented pool needs ensemble.cache = false")
    large = too_large(resources.outputs, len(resources.pool))
    if large and (config.ema or config.swag_samples):
        raise ValueError("these answers are too large to be kept for the whole pool, which ema and swag_samples need")
    measure: Accuracies = validation_accuracies(resources, engine, execution) if resources.validation else _unmeasured
    return make_ensemble(
        resources.prototypes,
        resources.pool,
        engine,
        combine=names.TARGETS[config.combine],
        weigh=partial(names.TEACHER_WEIGHTS[config.weights], resources=resources, accuracies=measure),
        temperature=settings.distill.temperature,
        outputs=resources.outputs,
        each_batch=large or not config.cache,
        memory=config.ema,
        groups=config.groups,
        swag_samples=config.swag_samples,
        swag_scale=config.swag_scale,
        as_teacher=answers.as_teacher if settings.fusion.exchange == "answers" else None,
        execution=execution,
    )


def too_large(outputs: Outputs, n: int) -> bool:
    """Say whether answers at all positions of n inputs are more than memory should hold: teachers are asked again."""
    return bool(outputs.positions) and n * prod(size or 1 for size in outputs.shape) > MOST_ANSWERS


def _unmeasured(teachers: Sequence[Teacher]) -> dict[str, float]:
    raise ValueError("these weights need validation data, and the server has none")


def students(resources: Resources, settings: Settings, engine: Engine) -> Students:
    """Return how students learn, by the section ``[distill]``; a lone one uses as many threads as it is worth."""
    lone = partial(lone_threads, resources, settings.distill.batch_size)
    execution = of_students(settings.run, len(resources.prototypes), lone)
    return make_students(resources, settings.distill, engine, execution)


def lone_threads(resources: Resources, batch: int) -> int:
    """Return on how many threads the only student learns."""
    (prototype,) = resources.prototypes.values()
    assert resources.pool is not None, "there is something to distill on"
    with torch.random.fork_rng(devices=[]):
        model = prototype.build()
    return threads_for(model, resources.pool.batch(torch.zeros(1, dtype=torch.long)), batch)


def named_part(name: str, resources: Resources, told: Mapping[str, bool | int | float | str] = {}) -> Part:
    """Return the part of a name: a binarization, one of ``fusion.parts``, or what a method asks of its clients."""
    if name in names.BINARIZATIONS:
        return Part(half=names.BINARIZATIONS[name], name=name)
    made: Part = (names.METHOD_PARTS if name in names.METHOD_PARTS else names.PARTS)[name](resources, **told)
    return replace(made, name=name)


def part_names(settings: Settings) -> list[str]:
    """Return the names of all parts that have a payload or a state, whichever key asks for them."""
    weighted = settings.fusion.method != "fedavg" and settings.ensemble.weights == "class-counts"
    counts = ["class-counts"] if weighted or settings.fusion.aggregation == "class-counts" else []
    return list(dict.fromkeys([*counts, *settings.fusion.parts]))
