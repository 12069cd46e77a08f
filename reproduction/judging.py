"""Judge a claim: comparisons paired by seed, each supported, contradicted or undecided, and the verdict on all of them.

Shards, cohorts and first weights depend on the seed alone, so two methods with one seed differ by the method: their
difference is taken seed by seed. A comparison is a bound on such a difference (or on another linear combination of
cells), and what is judged is the 95 % confidence interval of its mean over the seeds:

    d̄ ± t(0.975, n − 1) · s / √n

It is supported where the whole interval keeps the bound, contradicted where the whole interval breaks it, and undecided
otherwise; one seed has no interval and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any

Values = Mapping[str, Mapping[int, float]]
"""The numbers of each cell, one for each seed."""

SUPPORTED, CONTRADICTED, UNDECIDED = "supported", "contradicted", "undecided"
"""What runs can say about a comparison."""

HOLDS, UNTESTED = "holds", "could not be tested here"
"""The verdicts on a claim, besides contradicted and undecided."""

CONFIDENCE = 0.95


class NotReached(float):
    """One round more than were run, where a target was not reached in them: a lower bound, not a measurement.

    >>> NotReached(12), float(NotReached(12))
    (> 12, 13.0)
    """

    def __new__(cls, rounds: int) -> NotReached:
        """Return the bound for so many rounds without the target."""
        return super().__new__(cls, rounds + 1)

    def __repr__(self) -> str:
        return f"> {int(self) - 1}"


@dataclass(frozen=True)
class Finding:
    """What runs say about a comparison: the mean paired difference, its interval, and how many seeds agree with it."""

    claim: str
    outcome: str
    difference: float
    low: float
    high: float
    agree: int
    seeds: int
    means: Mapping[str, float | str]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it: an interval without an end has None in its place."""
        low, high = (None if abs(end) == inf else round(end, 4) for end in (self.low, self.high))
        means = {cell: mean if isinstance(mean, str) else round(mean, 4) for cell, mean in self.means.items()}
        difference = None if isnan(self.difference) else round(self.difference, 4)
        return {**asdict(self), "low": low, "high": high, "means": means, "difference": difference}


@dataclass(frozen=True)
class Comparison:
    """A bound on d = Σ factor · cell: ``low`` < d < ``high``, or with ``or_equal`` ≤."""

    claim: str
    factors: Mapping[str, float]
    low: float = -inf
    high: float = inf
    or_equal: bool = False

    def difference(self, values: Values, seed: int) -> float:
        """Return d for one seed."""
        return sum(factor * values[cell][seed] for cell, factor in self.factors.items())

    def keeps(self, low: float, high: float) -> bool:
        """Say whether a whole interval is within the bounds."""
        return self.low <= low and high <= self.high if self.or_equal else self.low < low and high < self.high

    def judge(self, values: Values) -> Finding | None:
        """Return what the seeds that all cells have say; None where there are none."""
        seeds = sorted(set.intersection(*(set(values.get(cell, {})) for cell in self.factors)))
        if not seeds:
            return None
        differences = [self.difference(values, seed) for seed in seeds]
        low, high = interval(differences)
        rises, falls = self._censored(values, seeds)
        outcome = UNDECIDED
        if self.keeps(low, high) and not (falls and self.low > -inf) and not (rises and self.high < inf):
            outcome = SUPPORTED
        elif (high < self.low and not rises) or (low > self.high and not falls):
            outcome = CONTRADICTED
        means = {cell: _mean([values[cell][seed] for seed in seeds]) for cell in self.factors}
        agree = sum(self.keeps(one, one) for one in differences)
        return Finding(self.claim, outcome, fmean(differences), low, high, agree, len(seeds), means)

    def _censored(self, values: Values, seeds: Sequence[int]) -> tuple[bool, bool]:
        """Say whether the real difference may be larger, and whether smaller: a target not reached is a bound."""
        missed = [f for cell, f in self.factors.items() for seed in seeds if isinstance(values[cell][seed], NotReached)]
        return any(factor > 0 for factor in missed), any(factor < 0 for factor in missed)


def _mean(numbers: Sequence[float]) -> float | str:
    """Return the mean; all numbers where one is a bound, since then there is no mean."""
    if any(isinstance(one, NotReached) for one in numbers):
        return ", ".join(repr(one) if isinstance(one, NotReached) else f"{one:g}" for one in numbers)
    return fmean(numbers)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the confidence interval of the mean (Student's t); of a single number it is everything.

    >>> interval([1.0, 2.0, 3.0])
    (-0.484..., 4.484...)
    """
    from scipy.stats import t

    n, mean = len(differences), fmean(differences)
    if n < 2:
        return -inf, inf
    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * stdev(differences) / sqrt(n)
    return mean - half, mean + half


def above(left: str, right: str, by: float = 0.0) -> Comparison:
    """Return: the first cell is above the second, by more than so many points."""
    amount = f"more than {by:g} " if by else ""
    return Comparison(f"{left} is {amount}above {right}", {left: 1, right: -1}, low=by)


def fewer(left: str, right: str) -> Comparison:
    """Return: the first cell takes fewer rounds than the second."""
    return Comparison(f"{left} takes fewer rounds than {right}", {left: -1, right: 1}, low=0)


def within(left: str, right: str, points: float) -> Comparison:
    """Return: two cells differ by so many points at the most."""
    claim = f"{left} is within {points:g} of {right}"
    return Comparison(claim, {left: 1, right: -1}, -points, points, or_equal=True)


def not_below(left: str, right: str, points: float) -> Comparison:
    """Return: the first cell is above the second, or below it by so many points at the most."""
    claim = f"{left} is above {right}, or below by {points:g} at the most"
    return Comparison(claim, {left: 1, right: -1}, low=-points, or_equal=True)


def larger_gap(first: tuple[str, str], second: tuple[str, str], claim: str) -> Comparison:
    """Return: the difference of the first two cells is larger than that of the other two."""
    return Comparison(claim, {first[0]: 1, first[1]: -1, second[0]: -1, second[1]: 1}, low=0)


def judge(comparisons: Sequence[Comparison], values: Values, planned: Collection[str] = ()) -> list[Finding]:
    """Return what the numbers say about each comparison whose cells were run.

    One whose cells are ``planned`` and not run yet is undecided: a claim does not hold because a part of it is missing.
    """
    findings = []
    for one in comparisons:
        if (finding := one.judge(values)) is not None:
            findings.append(finding)
        elif all(name.partition(": ")[0] in planned for name in one.factors):
            findings.append(Finding(one.claim, UNDECIDED, nan, -inf, inf, 0, 0, {}))
    return findings


def verdict(findings: Sequence[Finding]) -> str:
    """Return the verdict: a claim holds where all its comparisons are supported; one against it contradicts it."""
    outcomes = {finding.outcome for finding in findings}
    if not outcomes:
        return UNTESTED
    return HOLDS if outcomes == {SUPPORTED} else CONTRADICTED if CONTRADICTED in outcomes else UNDECIDED
