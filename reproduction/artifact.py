"""What a table or figure of the paper is made of: cells (runs), the paper's numbers, and claims that can be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import sub
from statistics import fmean
from typing import Any, Literal, get_args

from feddf.report.read import Run
from reproduction.judging import Comparison, NotReached, Values, above

Scale = Literal["paper", "cpu", "smoke"]
SCALES: tuple[Scale, ...] = get_args(Scale)
SmallTask = Literal["digits", "photographs", "texts"]
Changes = Mapping[str, Any]
"""Values of keys, by their full names."""

Measure = Callable[[Run], float]
"""Turns a run into a number."""


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


def whole_models(run: Run) -> list[float]:
    """Return the test accuracies by round; of FedMA, which matches a layer a round, those of its whole models."""
    layers = [record.get("fedma", {}).get("matched_layer", 0) for record in run.records]
    return [value for value, layer in zip(run.curve(), layers, strict=True) if layer == max(layers)]


def final_accuracy(run: Run) -> float:
    """Return the fused models' test accuracy in %, the mean over prototypes and over the last quarter of the rounds."""
    curve = whole_models(run)
    return 100 * fmean(curve[-max(1, len(curve) // 4) :])


@dataclass(frozen=True)
class Artifact:
    """A table or figure. ``cells`` are those at the paper's scale; ``reduced`` are changes for the other scales.

    ``measure`` turns a run into the number that the table or figure shows, and ``also`` into further ones, which
    ``comparisons`` find under the cell's name with a colon and theirs. All of them are about what was run.
    """

    name: str
    title: str
    claim: str
    cells: Sequence[Cell]
    comparisons: Sequence[Comparison]
    measure: Measure = final_accuracy
    also: Mapping[str, Measure] = field(default_factory=dict)
    unit: str = "test accuracy in %, mean over the last quarter of the rounds"
    differs: str = ""
    """Where the scale ``paper`` is not the paper's own setting."""
    reduction: str = ""
    """What is reduced at the scale ``cpu`` beyond what the scale says of itself."""
    reduced: Mapping[str, Changes] = field(default_factory=dict)
    subset: Mapping[str, Callable[[Cell], bool]] = field(default_factory=dict)
    """Which cells are run at a scale, where not all are."""
    reducible: bool = True
    """Whether the scale ``cpu`` is smaller than the paper's."""
    small_task: SmallTask = "digits"
    """What is learned at the scale ``cpu``."""
    compute: Callable[[Scale, Sequence[int]], Values] | None = None
    """For what is no run: (scale, seeds) -> the numbers of each cell."""
    as_claimed: Callable[[str], float] | None = None
    """Numbers that agree with the claim, by the names of the values, where the paper prints none: to try the check."""

    def values_of(self, cell: str, runs: Sequence[Run]) -> dict[str, dict[int, float]]:
        """Return all numbers of a cell's runs, by their names and by seed."""
        measures = {cell: self.measure, **{f"{cell}: {label}": one for label, one in self.also.items()}}
        return {name: {run.seed: measure(run) for run in runs} for name, measure in measures.items()}


def cells_at(artifact: Artifact, scale: Scale) -> list[Cell]:
    """Return the cells that are run at a scale; what the smoke scale does not say is as at the cpu scale."""
    chosen = artifact.subset.get(scale) or (artifact.subset.get("cpu") if scale == "smoke" else None)
    return [cell for cell in artifact.cells if chosen is None or chosen(cell)]


def mean_accuracy(run: Run) -> float:
    """Return the fused models' test accuracy in %, the mean over prototypes and over all rounds."""
    return 100 * fmean(run.curve())


def rounds_to(target: float) -> Measure:
    """Return a measure: the first round at a target accuracy, or that it was not reached in those that were run."""

    def measure(run: Run) -> float:
        curve = run.curve()
        first = next((i for i, value in enumerate(curve, 1) if value >= target), None)
        return NotReached(len(curve)) if first is None else float(first)

    return measure


def gain(run: Run) -> float:
    """Return the fused minus the averaged test accuracy in points, the mean over all rounds."""
    return 100 * fmean(map(sub, run.curve(), run.curve(which="averaged")))


def all_above(pairs: Iterable[tuple[str, str]]) -> list[Comparison]:
    """Return a comparison for each pair: its first cell is above its second."""
    return [above(left, right) for left, right in pairs]
