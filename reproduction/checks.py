"""Checks that are checked: what every claim's comparisons must say about numbers whose verdict is known in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from reproduction.artifact import Artifact
from reproduction.judging import (
    CONTRADICTED,
    HOLDS,
    SUPPORTED,
    UNDECIDED,
    Comparison,
    NotReached,
    Values,
    judge,
    verdict,
)

SEEDS = (0, 1, 2)


def claimed_values(artifact: Artifact) -> dict[str, float]:
    """Return the paper's own numbers by the names of the values; where it prints none, numbers that agree with it."""
    printed = {cell.name: float(cell.paper.split()[0]) for cell in artifact.cells if cell.paper}
    names = {name for comparison in artifact.comparisons for name in comparison.factors}
    if artifact.as_claimed is not None:
        return {name: artifact.as_claimed(name) for name in names}
    return {name: printed[name] for name in names}


def mistakes(artifact: Artifact) -> Iterator[str]:
    """Yield a line for each way in which the comparisons of an artifact judge wrongly."""
    claimed = claimed_values(artifact)
    if (said := _judged(artifact, claimed.__getitem__)) != HOLDS:
        yield f"{artifact.name}: with the paper's numbers the claim is '{said}', not '{HOLDS}'"
    if (said := _judged(artifact, claimed.__getitem__, seeds=SEEDS[:1])) != UNDECIDED:
        yield f"{artifact.name}: with one seed the claim is '{said}', not '{UNDECIDED}'"
    for comparison in artifact.comparisons:
        if comparison.low == -inf and comparison.high == inf:
            yield f"{artifact.name}: '{comparison.claim}' cannot fail"
            continue
        values = {name: dict.fromkeys(SEEDS, claimed[name]) for name in comparison.factors}
        if (said := _outcome(comparison, swap(comparison, values))) != CONTRADICTED:
            yield f"{artifact.name}: swapped, '{comparison.claim}' is '{said}'"
        yield from _equal(artifact, comparison)
    if any("rounds" in comparison.claim for comparison in artifact.comparisons):
        missed = _judged(artifact, lambda name: NotReached(12))
        if missed == HOLDS:
            yield f"{artifact.name}: where no target is reached the claim is '{missed}'"


def _equal(artifact: Artifact, comparison: Comparison) -> Iterator[str]:
    """Yield a line if equal numbers decide which of two cells is better, or do not support that they are alike."""
    if sum(comparison.factors.values()) != 0 or comparison.low > 0:
        return  # half of another cell, or better by so much: equal numbers are against it
    wanted = SUPPORTED if comparison.or_equal else UNDECIDED
    said = _outcome(comparison, {name: dict.fromkeys(SEEDS, 50.0) for name in comparison.factors})
    if said != wanted:
        yield f"{artifact.name}: with equal numbers '{comparison.claim}' is '{said}', not '{wanted}'"


def swap(comparison: Comparison, values: Values) -> dict[str, dict[int, float]]:
    """Return numbers with which the comparison's difference lies as far beyond a bound as it lay within it.

    For two cells and a bound of zero they are the other's numbers: the sides are swapped.
    """
    name, factor = next(iter(comparison.factors.items()))
    swapped = {cell: dict(mine) for cell, mine in values.items()}
    for seed in SEEDS:
        was = comparison.difference(values, seed)
        bound = comparison.low if was - comparison.low <= comparison.high - was else comparison.high
        beyond = 2 * bound - was if was != bound else bound + (1 if bound == comparison.high else -1)
        swapped[name][seed] += (beyond - was) / factor
    return swapped


def _judged(artifact: Artifact, number: Callable[[str], float], seeds: tuple[int, ...] = SEEDS) -> str:
    names = {name for comparison in artifact.comparisons for name in comparison.factors}
    return verdict(judge(artifact.comparisons, {name: dict.fromkeys(seeds, number(name)) for name in names}))


def _outcome(comparison: Comparison, values: Values) -> str:
    finding = comparison.judge(values)
    return finding.outcome if finding is not None else "not judged"
