"""Class lists: which teacher knows which class, and what becomes of a class that a teacher does not know.

Teacher k has logits z_k over its own classes S_k; the student has all classes C. A teacher has no opinion on a class
outside S_k: there its weight is zero, and the class is left to those that know it
(``docs/decisions/class-lists.md``)::

    z̄(c) = Σ_{k: c ∈ S_k} w_k (z_k(c) − mean_{S_k} z_k) / Σ_{k: c ∈ S_k} w_k,    target = σ(z̄ / T)

Where all know all this is AvgLogits, as logits matter up to a constant. With averaged probabilities, p_k = σ(z_k / T)
over S_k takes the place of z_k, and the sum over classes is made one again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from feddf.fusing.teachers import TeacherError, TrainedModel, with_classes
from feddf.types import Weight, WeightedLogits

UNKNOWN = -1e9
"""The logit of a class that a teacher does not know. It has no probability, and a weight of zero removes it."""


def same(name: str) -> str:
    """Return what two spellings of a class have in common: case and spaces around it do not matter."""
    return name.strip().casefold()


def union(lists: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return all classes of several lists, in the order in which they first come.

    >>> union([["cat", "dog"], ["Dog", "frog"]])
    ('cat', 'dog', 'frog')
    """
    found: dict[str, str] = {}
    for name in (name for names in lists for name in names):
        found.setdefault(same(name), name)
    return tuple(found.values())


def missing(names: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Return the names that are not in a list of classes."""
    known = {same(name) for name in classes}
    return [name for name in names if same(name) not in known]


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
    listed = [one if one.classes else with_classes(one, classes) for one in teachers]
    for teacher in listed:
        if unknown := missing(teacher.classes, classes):
            raise TeacherError(
                f"the student cannot express all classes: teacher {teacher.id} knows '{unknown[0]}', "
                f"and the student's classes are {', '.join(classes[:12])}"
            )
    if untaught := missing(classes, union([teacher.classes for teacher in listed])):
        raise TeacherError(f"no teacher knows the class '{untaught[0]}' of the student")
    return listed, classes


def check_outputs(teacher: TrainedModel, count: int) -> None:
    """Raise :class:`TeacherError` where a teacher has more or fewer outputs than it has classes."""
    if teacher.classes and len(teacher.classes) != count:
        raise TeacherError(
            f"teacher {teacher.id}: it has {count} outputs, and its class list (or the student's, if it has none) has "
            f"{len(teacher.classes)} names; say what its outputs mean with classes = [...]"
        )


@dataclass(frozen=True)
class ClassMapping:
    """A teacher's classes among those of the student: the column of each."""

    columns: Tensor
    n_classes: int

    def logits(self, own: Tensor) -> Tensor:
        """Return a teacher's logits over all classes: centered over its own, none for the others."""
        centered = own.to(torch.float64) - own.to(torch.float64).mean(dim=1, keepdim=True)
        whole = torch.full((len(own), self.n_classes), UNKNOWN, dtype=torch.float64)
        whole[:, self.columns] = centered
        return whole

    @property
    def known(self) -> Tensor:
        """One where the teacher knows a class, zero elsewhere."""
        known = torch.zeros(self.n_classes, dtype=torch.float64)
        known[self.columns] = 1.0
        return known

    def vote(self, own: Tensor, weight: Weight) -> WeightedLogits:
        """Return the vote of a teacher's logits over its own classes; a class that it does not know has weight zero."""
        whole = self.logits(own)
        counts = weight(whole) if callable(weight) else weight
        return WeightedLogits(whole, counts if len(self.columns) == self.n_classes else counts * self.known)


def mapping_of(names: Sequence[str], classes: Sequence[str]) -> ClassMapping:
    """Return where names stand in a list of classes that has all of them."""
    places = {same(name): number for number, name in enumerate(classes)}
    return ClassMapping(torch.tensor([places[same(name)] for name in names]), len(classes))
