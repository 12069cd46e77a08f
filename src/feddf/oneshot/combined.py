"""The teachers as one ensemble, for :func:`feddf.fusion.feddf.feddf` to ask instead of clients' models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import EnsembleConfig
from feddf.config.names import TARGETS, TEACHER_WEIGHTS
from feddf.evaluate import accuracy_of
from feddf.fusion.ensemble import Answers, Past, Remembered
from feddf.oneshot.cached_answers import Memory
from feddf.oneshot.classes import seat
from feddf.oneshot.teachers import Teacher, TeacherError, fed
from feddf.oneshot.unlabeled_inputs import Labelled, Raw
from feddf.saved.preprocess import Preprocess
from feddf.types import Resources, Update, Vote, Weight


@dataclass(frozen=True)
class Asking:
    """How teachers are asked: what is remembered, the pool, and how those are fed that have no preprocessing."""

    memory: Memory
    pool: Raw
    otherwise: Preprocess | None

    def n_outputs(self, teacher: Teacher) -> int:
        """Return a teacher's number of outputs."""
        return self.memory.n_outputs(teacher, self.pool, fed(teacher, self.otherwise))

    def logits(self, teacher: Teacher, raw: Raw) -> Tensor:
        """Return a teacher's logits over its own classes."""
        return self.memory.logits(teacher, raw, fed(teacher, self.otherwise))


class Answered:
    """The ensemble of the teachers: what :func:`feddf.fusion.feddf.feddf` asks instead of the clients' models."""

    def __init__(
        self,
        teachers: Sequence[Teacher],
        classes: tuple[str, ...],
        asking: Asking,
        validation: Labelled | None,
        ensemble: EnsembleConfig,
        temperature: float,
        resources: Resources,
    ) -> None:
        self._teachers = {teacher.id: teacher for teacher in teachers}
        self.seats = {teacher.id: seat(teacher, classes) for teacher in teachers}
        self._classes, self._asking, self._validation = classes, asking, validation
        self._ensemble, self._temperature, self._resources = ensemble, temperature, resources
        self.weights: Mapping[str, Weight] = {}
        self.pool: Tensor = torch.zeros(0)

    def ask(self, updates: Sequence[Update], seed: int, past: Past) -> tuple[Answers, Past]:
        """Return what those teachers say about the pool that were not left out; there are no earlier rounds."""
        teaching = [update for update in updates if update.teaches]
        self.weights = TEACHER_WEIGHTS[self._ensemble.weights](teaching, self._resources, self.accuracies)
        self._refuse_gaps()
        self.pool = self.about(self._asking.pool, self._temperature)
        return Remembered(self.pool), {}

    def about(self, raw: Raw, temperature: float = 1.0) -> Tensor:
        """Return what the teachers that teach say together about inputs; one of them is in memory at a time."""
        teachers = [self._teachers[name] for name in self.weights]

        def votes() -> Iterator[Vote]:
            for teacher in teachers:
                yield self.seats[teacher.id].vote(self._asking.logits(teacher, raw), self.weights[teacher.id])

        probabilities: Tensor = TARGETS[self._ensemble.average](votes(), temperature)
        return probabilities

    def accuracies(self, updates: Sequence[Update]) -> Mapping[str, float]:
        """Return each teacher's accuracy on the validation examples; a class that it does not know it gets wrong."""
        if self._validation is None:
            raise ConfigError.at("ensemble.weights", self._ensemble.weights, "it needs labelled examples")
        found: dict[str, float] = {}
        for update in updates:
            own = self._asking.logits(self._teachers[update.client_id], self._validation.raw)
            found[update.client_id] = accuracy_of(self.seats[update.client_id].logits(own), self._validation.labels)
        return found

    def _refuse_gaps(self) -> None:
        known = torch.stack([self.seats[name].known for name in self.weights]).sum(dim=0)
        if missing := [name for name, count in zip(self._classes, known, strict=True) if count == 0]:
            raise TeacherError(f"no teacher (that is not left out) knows the class '{missing[0]}'")
