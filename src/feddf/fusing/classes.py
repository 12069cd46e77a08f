"""Class names of different makers: matched forgivingly, and what was matched can be said."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def same(name: str) -> str:
    """Return what two spellings of a class have in common: not their case, nor what stands between their words.

    >>> same(" Ankle_boot") == same("ankle-boot") == same("AnkleBoot"), same("-1") == same("1")
    (True, False)
    """
    return re.sub(r"(?<=[^\W_])[\s_-]+(?=[^\W_])", "", name.strip().casefold())


def columns_of(names: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Return where names stand in a list of classes: −1 for a name that is not in it.

    A name is looked for as it is written, then in any spelling, then among names with alternatives ("T-shirt/top" is
    "T-shirt"). Of names in one list that a looser reading would make equal, each keeps to the stricter one.

    >>> columns_of(["t shirt", "Bag", "hat"], ["bag", "T-shirt/top"]).tolist()
    [1, 0, -1]
    """
    found = [-1] * len(names)
    for read in (lambda name: {name}, lambda name: {same(name)}, _alternatives):
        places, rivals = defaultdict[str, list[int]](list), Counter[str]()
        for number in set(range(len(classes))) - set(found):
            for key in read(classes[number]):
                places[key].append(number)
        left = [place for place, column in enumerate(found) if column < 0]
        rivals.update(key for place in left for key in read(names[place]))
        for place in left:
            keys = read(names[place])
            fits = {number for key in keys for number in places[key]}
            if len(fits) == 1 and all(rivals[key] == 1 for key in keys):
                found[place] = fits.pop()
    return torch.tensor(found, dtype=torch.int64)


def _alternatives(name: str) -> set[str]:
    return {same(name), *(same(part) for part in re.split(r"[/,]", name) if same(part))}


def union(lists: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return all classes of several lists, in the order in which they first come.

    >>> union([["cat", "dog"], ["Dog", "frog"]])
    ('cat', 'dog', 'frog')
    """
    found: list[str] = []
    for names in lists:
        columns = columns_of(names, found).tolist() if found else [-1] * len(names)
        found += [name for name, column in zip(names, columns, strict=True) if column < 0]
    return tuple(found)


def missing(names: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Return the names that are not in a list of classes."""
    return [name for name, column in zip(names, columns_of(names, classes), strict=True) if column < 0]


def respelled(names: Sequence[str], classes: Sequence[str]) -> dict[str, str]:
    """Return the names that are spelled otherwise in a list of classes, each with its spelling there."""
    places = zip(names, columns_of(names, classes).tolist(), strict=True)
    return {name: classes[place] for name, place in places if place >= 0 and classes[place] != name}
