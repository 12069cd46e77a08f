"""Class lists: which teacher knows which class, and what becomes of a class that a teacher does not know.

TrainedModel k answers z_k over its own classes S_k; the student has all classes C. A teacher says nothing about a class
outside S_k: there its weight is zero, and the class is left to those that know it
(``docs/decisions/class-lists.md``)::

    z̄(c) = Σ_{k: c ∈ S_k} w_k (z_k(c) − mean_{S_k} z_k) / Σ_{k: c ∈ S_k} w_k,    target = σ(z̄ / T)

Where all know all this is AvgLogits, as logits matter up to a constant. With averaged probabilities, p_k = σ(z_k / T)
over S_k takes the place of z_k, and the sum over classes is made one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from feddf.oneshot.teachers import TeacherError, TrainedModel, named
from feddf.types import Vote, Weight

SILENT = -1e9
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


def places(names: Sequence[str], classes: Sequence[str]) -> Tensor | None:
    """Return where each name stands in a list of classes; ``None`` if one does not."""
    known = {same(name): number for number, name in enumerate(classes)}
    found = [known.get(same(name)) for name in names]
    return None if None in found else torch.tensor(found)


def agreed(
    teachers: Sequence[TrainedModel], outputs: Sequence[int], asked: Sequence[str]
) -> tuple[list[TrainedModel], tuple[str, ...]]:
    """Return the teachers, each with a class list, and the student's classes.

    ``outputs`` are the numbers of outputs that each was seen to have, ``asked`` the student's classes where the user
    names them. A teacher without a list has the student's, if it has as many outputs; if there is no list at all, all
    teachers must have as many outputs, whose classes are numbers.
    """
    for teacher, count in zip(teachers, outputs, strict=True):
        if teacher.classes and len(teacher.classes) != count:
            found = f"it has {count} outputs, and its class list has {len(teacher.classes)} names"
            raise TeacherError(f"teacher {teacher.id}: {found}")
    classes = tuple(asked) or union([teacher.classes for teacher in teachers])
    if not classes:
        most = max(outputs)
        classes = tuple(str(number) for number in range(most))
    listed = [
        one if one.classes else named(one, _whole(one, count, classes))
        for one, count in zip(teachers, outputs, strict=True)
    ]
    for teacher in listed:
        if places(teacher.classes, classes) is None:
            known = {same(name) for name in classes}
            missing = [name for name in teacher.classes if same(name) not in known]
            raise TeacherError(
                f"the student cannot express all classes: teacher {teacher.id} knows '{missing[0]}', "
                f"and the student's classes are {', '.join(classes[:12])}"
            )
    taught = {same(name) for teacher in listed for name in teacher.classes}
    if lonely := [name for name in classes if same(name) not in taught]:
        raise TeacherError(f"no teacher knows the class '{lonely[0]}' of the student")
    return listed, classes


def _whole(teacher: TrainedModel, outputs: int, classes: tuple[str, ...]) -> tuple[str, ...]:
    if outputs != len(classes):
        raise TeacherError(
            f"teacher {teacher.id}: it has {outputs} outputs and no class list, and there are {len(classes)} classes; "
            "say what its outputs mean with classes = [...]"
        )
    return classes


@dataclass(frozen=True)
class Seat:
    """A teacher's classes among those of the student."""

    columns: Tensor
    n_classes: int

    def logits(self, own: Tensor) -> Tensor:
        """Return a teacher's logits over all classes: centred over its own, silent on the others."""
        centred = own.to(torch.float64) - own.to(torch.float64).mean(dim=1, keepdim=True)
        whole = torch.full((len(own), self.n_classes), SILENT, dtype=torch.float64)
        whole[:, self.columns] = centred
        return whole

    @property
    def known(self) -> Tensor:
        """One where the teacher knows a class, zero elsewhere."""
        known = torch.zeros(self.n_classes, dtype=torch.float64)
        known[self.columns] = 1.0
        return known

    def vote(self, own: Tensor, weight: Weight) -> Vote:
        """Return the vote of a teacher's logits over its own classes; a class that it does not know has weight zero."""
        whole = self.logits(own)
        counts = weight(whole) if callable(weight) else weight
        return Vote(whole, counts if len(self.columns) == self.n_classes else counts * self.known)


def seat(teacher: TrainedModel, classes: Sequence[str]) -> Seat:
    """Return where a teacher's classes stand among the student's."""
    found = places(teacher.classes, classes)
    assert found is not None, "the lists were agreed on"
    return Seat(found, len(classes))
