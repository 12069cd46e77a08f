"""Attack × method × share × α: each cell an ordinary run folder, and what comes of them as a table and a heat map."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from feddf.config import ConfigError, Experiment, with_values
from feddf.config.errors import nearest
from feddf.report.read import read_run
from feddf.report.tables import Comparison, percent
from feddf.runs.many import failure_of, run_many, unfinished, variant
from feddf.runtime.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE = "none"
NAMES = (
    *("label-flip", "sign-flip", "noise", "scaled-layer", "constant-class", "alie", "ipm", "min-max", "mimic"),
    *("backdoor", "lma", "cpa", "hips", "shuffle", "adaptive"),
)
"""The functions of :mod:`reproduction.attacks`, with hyphens."""


def kind_of(attack: str) -> str:
    """Return what ``attack.kind`` calls an attack of a name; another than these is a ``module:attribute``."""
    if attack in NAMES:
        return f"reproduction.attacks:{attack.replace('-', '_')}"
    if attack != NONE and ":" not in attack:
        raise ConfigError.at("--attacks", attack, f"{nearest(attack, NAMES)} (your own is written as module:attribute)")
    return attack


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    attack: str
    method: str
    share: float
    alpha: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its run folder; without an attack the share does not matter."""
        share = "" if self.attack == NONE else f"-share{self.share:g}"
        return f"{self.attack}-{self.method}{share}-alpha{self.alpha:g}-seed{self.seed}".replace(":", ".")


def cells(
    attacks: Sequence[str],
    methods: Sequence[str],
    shares: Sequence[float],
    alphas: Sequence[float],
    seeds: Sequence[int],
) -> list[Cell]:
    """Return all cells, one seed after the other, so that an unfinished matrix is a whole one with fewer seeds."""
    every = [NONE, *(attack for attack in attacks if attack != NONE)]
    return [
        Cell(attack, method, share, alpha, seed)
        for seed, alpha, attack, method, share in product(seeds, alphas, every, methods, shares)
    ]


def experiments(base: Experiment, wanted: Sequence[Cell]) -> dict[str, Experiment]:
    """Return the experiment of each cell by the name of its folder."""
    methods = list(dict.fromkeys(cell.method for cell in wanted))
    found: dict[str, Experiment] = {}
    for cell in wanted:
        changes = {
            "seed": cell.seed,
            "partition.alpha": cell.alpha,
            "attack.kind": kind_of(cell.attack),
            "attack.share": cell.share if cell.attack != NONE else 0.2,
        }
        found[cell.name] = variant(with_values(base, changes), cell.method, methods)
    return found


def run_matrix(
    base: Experiment, wanted: Sequence[Cell], out: Path, parallel: int, say: Callable[[str], None], trust: bool = False
) -> Matrix:
    """Run the cells that have not ended, and write the table and the heat map after each of them."""
    folders = {out / name: one for name, one in experiments(base, wanted).items()}
    say(f"{len(folders)} runs, {len(folders) - len(unfinished(folders))} of them done")
    for path, failure in run_many(folders, 0 if parallel == 1 else parallel, trust=trust, complain=say):
        say(f"{path.name}: {failure or 'done'}")
        Matrix.read(wanted, out).write(out)
    found = Matrix.read(wanted, out)
    found.write(out)
    return found


@dataclass(frozen=True)
class Matrix:
    """The accuracies (0 to 1) at the last round, by cell; a run that failed has what it had reached."""

    cells: Sequence[Cell]
    accuracies: Mapping[str, float]
    failed: Collection[str] = ()

    @classmethod
    def read(cls, wanted: Sequence[Cell], out: Path) -> Matrix:
        """Return what the run folders hold; a cell without a round is not a number."""
        found: dict[str, float] = {}
        for cell in wanted:
            path = out / cell.name
            run = read_run(path) if (path / "config.toml").is_file() else None
            done = run is not None and (max(run.rounds, default=0) >= run.value("rounds") or failure_of(path))
            found[cell.name] = (run.curve()[-1] if run.records else 0.0) if run is not None and done else nan
        return cls(wanted, found, [cell.name for cell in wanted if failure_of(out / cell.name)])

    def mean(self, attack: str, method: str, share: float, alpha: float) -> float:
        """Return the mean over the seeds that are done."""
        mine = [self.accuracies[name] for name in self._names(attack, method, share, alpha)]
        known = [value for value in mine if not isnan(value)]
        return fmean(known) if known else nan

    def _names(self, attack: str, method: str, share: float, alpha: float) -> list[str]:
        wanted = (attack, method, share, alpha)
        return [cell.name for cell in self.cells if (cell.attack, cell.method, cell.share, cell.alpha) == wanted]

    @property
    def columns(self) -> list[tuple[float, float, str]]:
        """Share, α and method of each column."""
        return list(dict.fromkeys((cell.share, cell.alpha, cell.method) for cell in self.cells))

    @property
    def attacks(self) -> list[str]:
        """The attacks, in order, with 'none' first."""
        return list(dict.fromkeys(cell.attack for cell in self.cells))

    def values(self) -> list[list[float]]:
        """Return one row an attack, one column a share, α and method."""
        return [
            [self.mean(attack, method, share, alpha) for share, alpha, method in self.columns]
            for attack in self.attacks
        ]

    def worst(self) -> list[float]:
        """Return for each column the largest loss against the same method without an attack."""
        rows = self.values()
        columns = list(zip(*rows, strict=True))
        return [max([column[0] - value for value in column[1:] if not isnan(value)], default=nan) for column in columns]

    def comparison(self) -> Comparison:
        """Return the table."""
        seeds = sorted({cell.seed for cell in self.cells})
        names = [f"{method}, α = {alpha:g}, {100 * share:g} %" for share, alpha, method in self.columns]
        rows = [[attack, *map(percent, row)] for attack, row in zip(self.attacks, self.values(), strict=True)]
        for row in rows:
            for number, (share, alpha, method) in enumerate(self.columns, 1):
                if not set(self.failed).isdisjoint(self._names(row[0], method, share, alpha)):
                    row[number] += " †"
        worst = ["largest loss, in points", *(f"{100 * loss:.1f}" for loss in self.worst())]
        title = f"Test accuracy at the last round under attack, in % (mean over seeds {', '.join(map(str, seeds))})"
        title += "; †: a run ended early, when too few clients had sent a usable update" if self.failed else ""
        numbers: list[dict[str, object]] = [
            {"attack": attack, "method": method, "share": share, "alpha": alpha, "accuracy in %": round(100 * value, 2)}
            for attack, row in zip(self.attacks, self.values(), strict=True)
            for (share, alpha, method), value in zip(self.columns, row, strict=True)
            if not isnan(value)
        ]
        return Comparison(title, ["attack", *names], [*rows, worst], numbers)

    def write(self, out: Path) -> None:
        """Write matrix.md, matrix.csv and matrix.png."""
        from feddf.report.plots import save_figure, styled

        table = self.comparison()
        write_atomically(out / "matrix.md", table.markdown().encode())
        write_atomically(out / "matrix.csv", table.csv().encode())
        styled(lambda: save_figure(self._heat_map(table.title), out / "matrix.png"))()

    def _heat_map(self, title: str) -> Figure:
        """Return the accuracies as a table of colors with the numbers in it."""
        import numpy as np
        from matplotlib.figure import Figure

        numbers = 100 * np.array(self.values(), dtype=float)
        columns = [f"{method}\nα = {alpha:g}" for _, alpha, method in self.columns]
        figure = Figure(figsize=(2 + 1.2 * len(columns), 1.6 + 0.35 * len(numbers)), layout="constrained")
        axes = figure.subplots()
        axes.imshow(numbers, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(columns)), columns, fontsize="small")
        axes.set_yticks(range(len(numbers)), self.attacks, fontsize="small")
        for (row, column), value in np.ndenumerate(numbers):
            if not isnan(value):
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize="small")
        axes.set_title(title, fontsize="small")
        return figure
