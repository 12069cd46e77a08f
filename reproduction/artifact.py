"""What a table or figure of the paper is made of: cells (runs), the paper's numbers, and claims that can be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any, Literal, get_args

from feddf.report.read import Run

Scale = Literal["paper", "cpu", "smoke"]
SCALES: tuple[Scale, ...] = get_args(Scale)
SmallTask = Literal["digits", "photographs", "texts"]
Changes = Mapping[str, Any]
"""Values of keys, by their full names."""

HOLDS, IN_PART, FAILS, UNTESTED = "holds", "holds in part", "does not hold", "could not be tested here"
"""The verdicts on a claim."""


@dataclass(frozen=True)
class Cell:
    """One configuration: an entry of a table, or a point or curve of a figure. ``paper`` is what the paper reports."""

    row: str
    column: str
    preset: str
    changes: Changes
    paper: str = ""

    @property
    def name(self) -> str:
        """The cell's name: its row and its column."""
        return f"{self.row}, {self.column}"


Axis = Mapping[str, Changes]
"""Rows or columns: what each changes, by its name."""

FEDAVG: Changes = {"fusion.method": "fedavg"}
FEDDF: Changes = {"fusion.method": "feddf"}
BOTH: Axis = {"FedAvg": FEDAVG, "FedDF": FEDDF}


def skews(*alphas: float) -> dict[str, Changes]:
    """Return an axis of degrees of label skew."""
    return {f"α = {alpha:g}": {"partition.alpha": alpha} for alpha in alphas}


def crossed(*axes: Axis) -> dict[str, Changes]:
    """Return every combination of several axes as one.

    >>> crossed({"E = 1": {"local.epochs": 1}}, skews(0.1))
    {'E = 1, α = 0.1': {'local.epochs': 1, 'partition.alpha': 0.1}}
    """
    found: dict[str, Changes] = {}
    for combination in product(*(axis.items() for axis in axes)):
        name = ", ".join(name for name, _ in combination)
        found[name] = {key: value for _, changes in combination for key, value in changes.items()}
    return found


def grid(preset: str, rows: Axis, columns: Axis, paper: Sequence[Sequence[str]] = ()) -> list[Cell]:
    """Return a cell for each row and column, row by row, with the paper's numbers in this order."""
    numbers = paper or [[""] * len(columns)] * len(rows)
    return [
        Cell(row, column, preset, {**mine, **changes}, number)
        for (row, mine), line in zip(rows.items(), numbers, strict=True)
        for (column, changes), number in zip(columns.items(), line, strict=True)
    ]


@dataclass(frozen=True)
class Finding:
    """One comparison: is ``left`` above ``right`` (or below, for counts of rounds), and by more than the spread?"""

    claim: str
    left: float
    right: float
    spread: float
    holds: bool

    @property
    def clear(self) -> bool:
        """Whether the difference is larger than the spread of the seeds."""
        return abs(self.left - self.right) > self.spread

    @property
    def measured(self) -> bool:
        """Whether both sides were run."""
        return not isnan(self.left) and not isnan(self.right)


def final_accuracy(run: Run) -> float:
    """Return the fused models' test accuracy in %, the mean over prototypes and over the last quarter of the rounds."""
    curve = run.curve()
    return 100 * fmean(curve[-max(1, len(curve) // 4) :])


@dataclass(frozen=True)
class Artifact:
    """A table or figure. ``cells`` are those at the paper's scale; ``reduced`` are changes for the other scales.

    ``measure`` turns a run into the number that the table or figure shows; ``check`` compares them.
    """

    name: str
    title: str
    claim: str
    cells: Sequence[Cell]
    check: Callable[[Measured], list[Finding]]
    measure: Callable[[Run], float] = final_accuracy
    unit: str = "test accuracy in %, mean over the last quarter of the rounds"
    reduction: str = ""
    """What is reduced at the scale ``cpu`` beyond what the scale says of itself."""
    reduced: Mapping[str, Changes] = field(default_factory=dict)
    subset: Mapping[str, Callable[[Cell], bool]] = field(default_factory=dict)
    """Which cells are run at a scale, where not all are."""
    higher_is_better: bool = True
    reducible: bool = True
    """Whether the scale ``cpu`` is smaller than the paper's."""
    small_task: SmallTask = "digits"
    """What is learned at the scale ``cpu``."""
    compute: Callable[[Scale, Sequence[int]], dict[str, list[float]]] | None = None
    """For what is no run: (scale, seeds) -> the numbers of each cell."""


def cells_at(artifact: Artifact, scale: Scale) -> list[Cell]:
    """Return the cells that are run at a scale; what the smoke scale does not say is as at the cpu scale."""
    chosen = artifact.subset.get(scale) or (artifact.subset.get("cpu") if scale == "smoke" else None)
    return [cell for cell in artifact.cells if chosen is None or chosen(cell)]


class Measured:
    """The numbers of an artifact: for each cell one a seed."""

    def __init__(self, values: Mapping[str, Sequence[float]], higher_is_better: bool = True) -> None:
        self.values, self._higher = values, higher_is_better

    def mean(self, cell: str) -> float:
        """Return a cell's mean over the seeds; nan where it was not run."""
        return fmean(self.values[cell]) if self.values.get(cell) else nan

    def spread(self, *cells: str) -> float:
        """Return √Σ s², s being the sample standard deviation (n − 1) of each cell over its seeds; 0 for one seed."""
        found = [self.values.get(cell, ()) for cell in cells]
        return sqrt(sum(stdev(values) ** 2 for values in found if len(values) > 1))

    def better(self, left: str, right: str) -> Finding:
        """Compare two cells: the first should be better."""
        a, b = self.mean(left), self.mean(right)
        word = "above" if self._higher else "below"
        return Finding(f"{left} is {word} {right}", a, b, self.spread(left, right), a > b if self._higher else a < b)

    def within(self, left: str, right: str, points: float) -> Finding:
        """Compare two cells: they should differ by a few points at the most."""
        a, b = self.mean(left), self.mean(right)
        claim = f"{left} is within {points:g} of {right}"
        return Finding(claim, a, b, self.spread(left, right), abs(a - b) <= points)

    def against(self, passes: Callable[[float, float], bool], cell: str, number: float, claim: str) -> Finding:
        """Compare a cell with a number."""
        mean = self.mean(cell)
        return Finding(claim, mean, number, self.spread(cell), passes(mean, number))

    def larger_gap(self, first: tuple[str, str], second: tuple[str, str], claim: str) -> Finding:
        """Compare two differences: the first should be the larger."""
        a = self.mean(first[0]) - self.mean(first[1])
        b = self.mean(second[0]) - self.mean(second[1])
        return Finding(claim, a, b, self.spread(*first, *second), a > b)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the verdict on a claim: whether all, some or none of its comparisons came out as the paper says."""
    true = sum(finding.holds for finding in findings)
    if not findings:
        return UNTESTED
    return HOLDS if true == len(findings) else FAILS if true == 0 else IN_PART


def mean_accuracy(run: Run) -> float:
    """Return the fused models' test accuracy in %, the mean over prototypes and over all rounds."""
    return 100 * fmean(run.curve())


def rounds_to(target: float) -> Callable[[Run], float]:
    """Return a measure: the first round at a target accuracy; one more than all rounds where it was not reached."""

    def measure(run: Run) -> float:
        curve = run.curve()
        return float(next((i for i, value in enumerate(curve, 1) if value >= target), len(curve) + 1))

    return measure


Check = Callable[[Measured], list[Finding]]


def all_better(pairs: Iterable[tuple[str, str]]) -> Check:
    """Return a check: the first cell of every pair is better than the second."""
    pairs = list(pairs)
    return lambda measured: [measured.better(left, right) for left, right in pairs]
