"""The models as one ensemble: which of them knows which channel, and what they predict together.

Teacher k has logits z_k over its own channels S_k; the student has all of them. A teacher has no opinion on a channel
outside S_k: there its weight is zero, and the channel is left to those that know it (:meth:`feddf.Outputs.vote`,
``docs/decisions/class-lists.md``). For classes that is::

    z̄(c) = Σ_{k: c ∈ S_k} w_k (z_k(c) − mean_{S_k} z_k) / Σ_{k: c ∈ S_k} w_k,    target = σ(z̄ / T)

Where all know all this is AvgLogits, as logits matter up to a constant. With averaged probabilities, p_k = σ(z_k / T)
over S_k takes the place of z_k, and the sum over classes is made one again. Classes of masks with a background take its
logit for the constant, and it has whatever the others leave: each teacher's conditional probabilities are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import FuseEnsembleConfig
from feddf.config.names import DROP_RULES, TARGETS, TEACHER_WEIGHTS
from feddf.evaluate import Predictions, Teacher, accuracy_of, weigh_known, weigh_logits
from feddf.fusing.classes import columns_of, missing, union
from feddf.fusing.predictions import PredictionCache
from feddf.fusing.teachers import TeacherError, TrainedModel
from feddf.fusion.ensemble import CachedTargets, Ensemble, Targets
from feddf.fusion.select import dropped
from feddf.losses import UNKNOWN
from feddf.outputs import MOST_CHANNELS, Outputs, from_description
from feddf.outputs import classes as classes_of
from feddf.runs.methods import ensemble_mistakes
from feddf.runtime.device import CPU
from feddf.runtime.execution import Execution
from feddf.types import Examples, Resources, Weight, WeightedLogits

MOST_TARGETS = 2**26  # numbers of targets that are kept in memory, 256 MB; others are made for each batch


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


def agree_on_outputs(
    teachers: Sequence[TrainedModel],
    asked: Sequence[str],
    background: str | None,
    meaning: Callable[[TrainedModel], Outputs],
    n_channels: Callable[[TrainedModel], int],
) -> tuple[list[TrainedModel], tuple[str, ...], Outputs]:
    """Return the teachers, each with a list of its channels, the student's channels, and what its outputs mean.

    Those of all teachers must be of one kind, at the same positions. At positions, a teacher that shares no channel
    with another one says nothing that could be compared.
    """
    first, *others = known = [meaning(one) for one in teachers]
    for teacher, one in zip(teachers[1:], others, strict=True):
        if (one.title, one.numbers) != (first.title, first.numbers):
            both = f"its outputs are {one.title}, and those of {teachers[0].id} are {first.title}"
            size = (
                "; say the size of its images with size = ..."
                if len(one.positions) == len(first.positions) == 2
                else ""
            )
            raise TeacherError(f"teacher {teacher.id}: {both}; one kind is needed, at the same positions{size}")
    longest = max(len(teacher.classes) for teacher in teachers)
    if first.positions and longest > MOST_CHANNELS and len({teacher.classes for teacher in teachers}) > 1:
        raise TeacherError("teachers have different vocabularies; tokens can be fused where all have the same")
    listed, classes = agree_on_classes(teachers, asked, n_channels)
    options = {name: value for one in known for name, value in one.options.items() if name in ("score", "variance")}
    if first.one_is_right and first.positions:
        pairs = zip(listed, (one.options.get("background") for one in known), strict=True)
        said = [one.classes[number] for one, number in pairs if number is not None]
        place = int(columns_of([background or (said or ["background"])[0]], classes))
        if background and place < 0:
            raise ConfigError.at("student.background", background, f"is none of the classes {', '.join(classes)}")
        options |= {"background": place} if place >= 0 else {}
        _share_something(listed, classes, options.get("background"))
    form = {"kind": first.kind, "channels": len(classes), "positions": first.positions, **options}
    return listed, classes, from_description(form)


def _share_something(teachers: Sequence[TrainedModel], classes: Sequence[str], background: int | None) -> None:
    """Raise :class:`TeacherError` for a teacher whose classes no other knows, or that has no background."""
    lists = [set(columns_of(one.classes, classes).tolist()) for one in teachers]
    for number, (teacher, own) in enumerate(zip(teachers, lists, strict=True)):
        listed, others = ", ".join(teacher.classes[:6]), set().union(*lists[:number], *lists[number + 1 :])
        if background is not None and background not in own:
            known = f"'{classes[background]}', the background of others, is none of its classes {listed}"
            raise TeacherError(f"teacher {teacher.id}: {known}; name its own with classes, map or student.background")
        if others and not own & others:
            raise TeacherError(f"teacher {teacher.id}: no other teacher knows one of its classes {listed}")


@dataclass(frozen=True)
class ClassMapping:
    """A teacher's channels among those of the student: the column of each, and what the student's outputs mean."""

    columns: Tensor
    n_classes: int
    outputs: Outputs = classes_of()

    @property
    def known(self) -> Tensor:
        """A mask of the channels that the teacher knows."""
        return torch.zeros(self.n_classes, dtype=torch.bool).index_fill(0, self.columns, True)

    def spread(self, own: Tensor) -> Tensor:
        """Return a teacher's logits in the columns of all channels, and none for the others."""
        numbers = self.outputs.numbers
        rest = 0.0 if self.outputs.has_units else UNKNOWN
        whole = torch.full((len(own), numbers * self.n_classes, *own.shape[2:]), rest, dtype=torch.float64)
        whole[:, torch.cat([self.columns + self.n_classes * one for one in range(numbers)])] = own.to(torch.float64)
        return whole

    def logits(self, own: Tensor) -> Tensor:
        """Return a teacher's logits over all channels: such as can be compared to those of others."""
        return self.outputs.vote(self.spread(own), self.known)[0]

    def vote(self, own: Tensor, weight: Weight) -> WeightedLogits:
        """Return the vote of a teacher's logits over its own channels; what it does not know is left to others."""
        if not bool(self.known.all()):
            return weigh_known(self.spread(own), weight, outputs=self.outputs, known=self.known)
        return weigh_logits(self.logits(own), weight)


@dataclass(frozen=True)
class TeacherEnsemble:
    """All models with their channels among the student's, the ensemble of those that teach, and notes on the others."""

    models: Sequence[TrainedModel]
    classes: tuple[str, ...]
    mappings: Mapping[str, ClassMapping]
    predictions: PredictionCache
    ensemble: Ensemble
    notes: Mapping[str, Any]

    @property
    def outputs(self) -> Outputs:
        """What the student's outputs mean."""
        return self.ensemble.outputs

    def logits(self, model: TrainedModel, name: str, rows: Tensor | None = None) -> Tensor:
        """Return what one model predicts for a set of inputs, or for some of them, over all channels."""
        return self.mappings[model.id].logits(self.predictions.logits(model, name, rows))

    def probabilities(self, name: str, temperature: float, rows: Tensor | None = None) -> Tensor:
        """Return what the teachers predict together for a set of inputs; large answers are held a few at a time."""
        chosen = torch.arange(len(self.predictions.sets[name])) if rows is None else rows
        ensemble = replace(self.ensemble, temperature=temperature)
        parts = [
            ensemble(Predictions(one.id, one.predict((name, part), Execution())) for one in ensemble.teachers)
            for part in chosen.split(self.outputs.at_once(len(chosen)))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def targets(self, temperature: float) -> Targets:
        """Return what the student learns on the pool: kept in memory where that is small, else made for each batch."""
        size = len(self.predictions.sets["pool"]) * prod(one or 1 for one in self.outputs.shape)
        if not self.outputs.is_large or size <= MOST_TARGETS:
            return CachedTargets(self.probabilities("pool", temperature))
        return lambda chosen, inputs: self.probabilities("pool", temperature, chosen.to(CPU)).to(inputs.device)


def combine_teachers(
    models: Sequence[TrainedModel],
    classes: tuple[str, ...],
    outputs: Outputs,
    predictions: PredictionCache,
    validation: Examples | None,
    config: FuseEnsembleConfig,
) -> TeacherEnsemble:
    """Return the ensemble that a configuration asks for, without those that its rule drops."""
    mappings = {model.id: ClassMapping(columns_of(model.classes, classes), len(classes), outputs) for model in models}

    def teacher(model: TrainedModel) -> Teacher:
        vote = mappings[model.id].vote
        return Teacher(model.id, lambda of, _: predictions.logits(model, *of), n_examples=model.examples, vote=vote)

    def accuracies(teachers: Sequence[Teacher]) -> dict[str, float]:
        """A class that a teacher does not know it gets wrong."""
        labels = _labeled(validation, "weights", config.weights).labels
        logits = ((one.id, mappings[one.id].logits(one.predict(("validation",), Execution()))) for one in teachers)
        return {id: accuracy_of(found, labels, outputs) for id, found in logits}

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
    return TeacherEnsemble(
        models, classes, mappings, predictions, Ensemble(weighted, TARGETS[config.combine], outputs=outputs), notes
    )


def refuse_meaningless(
    config: FuseEnsembleConfig, temperature: float, outputs: Outputs, models: Sequence[TrainedModel]
) -> None:
    """Raise :class:`ConfigError` for what has no meaning for outputs, or where teachers know different channels."""
    given = {**{f"ensemble.{name}": value for name, value in config}, "distill.temperature": temperature}
    partial_knowledge = not outputs.counts_classes and any(len(one.classes) != outputs.channels for one in models)
    chosen = config.weights, config.combine, temperature, outputs
    for wrong, name, why in ensemble_mistakes(*chosen, partial_knowledge=partial_knowledge):
        if wrong:
            raise ConfigError.at(name, given[name], why)


def _labeled(validation: Examples | None, key: str, given: str) -> Examples:
    if validation is None:
        raise ConfigError.at(f"ensemble.{key}", given, "it needs labeled examples")
    return validation
