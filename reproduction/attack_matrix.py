"""Attack × method × share × α: each cell an ordinary run folder, and what comes of them as a table and a heat map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import isnan, nan
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from feddf.config import ConfigError, Experiment, with_values
from feddf.config.errors import nearest
from feddf.report.plots import in_one_style, save_figure
from feddf.report.read import read_run
from feddf.report.tables import Comparison, percent
from feddf.runs.many import failure_of, run_many, unfinished, variant
from feddf.runtime.atomic import write_atomically
from reproduction.cells import keep

NONE = "none"
NAMES = (
    *("label-flip", "sign-flip", "noise", "scaled-layer", "constant-class", "alie", "ipm", "min-max", "mimic"),
    *("backdoor", "lma", "cpa", "hips", "shuffle", "adaptive"),
    *("claims", "shifted-means", "huge-means", "mimic-worst", "informed", "absent"),
)
"""The functions of :mod:`reproduction.attacks`, with hyphens."""


def kind_of(attack: str) -> str:
    """Return what ``attack.kind`` calls an attack of a name; another than these is a ``module:attribute``."""
    if attack in NAMES:
        return f"reproduction.attacks:{attack.replace('-', '_')}"
    if attack != NONE and ":" not in attack:
        raise ConfigError.at("--attacks", attack, f"{nearest(attack, NAMES)} (your own is written as module:attribute)")
    return attack


Column = tuple[float, float, str]
"""Share of hostile clients, α, method."""


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    attack: str
    column: Column
    seed: int

    @property
    def name(self) -> str:
        """The name of its run folder; without an attack the share does not matter."""
        share, alpha, method = self.column
        hostile = "" if self.attack == NONE else f"-share{share:g}"
        return f"{self.attack}-{method}{hostile}-alpha{alpha:g}-seed{self.seed}".replace(":", ".")

    def experiment(self, base: Experiment, methods: Sequence[str]) -> Experiment:
        """Return what is run."""
        share, alpha, method = self.column
        attack = {"attack.kind": kind_of(self.attack), "attack.share": share if self.attack != NONE else 0.2}
        return variant(with_values(base, {"seed": self.seed, "partition.alpha": alpha, **attack}), method, methods)


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
        Cell(attack, (share, alpha, method), seed)
        for seed, alpha, attack, method, share in product(seeds, alphas, every, methods, shares)
    ]


def run_matrix(
    base: Experiment,
    wanted: Sequence[Cell],
    out: Path,
    parallel: int,
    say: Callable[[str], None],
    trust: bool = False,
    kept: Path | None = None,
) -> Matrix:
    """Run the cells that have not ended, and write the table and the heat map after each of them.

    With ``kept`` the small files of those that have ended are copied there.
    """
    methods = list(dict.fromkeys(cell.column[2] for cell in wanted))
    folders = {out / cell.name: cell.experiment(base, methods) for cell in wanted}
    say(f"{len(folders)} runs, {len(folders) - len(unfinished(folders))} of them done")
    for path, failure in run_many(folders, 0 if parallel == 1 else parallel, trust=trust, complain=say):
        say(f"{path.name}: {failure or 'done'}")
        Matrix(wanted, out).write()
        if kept:
            keep(path, kept)
    found = Matrix(wanted, out)
    found.write()
    return found


class Matrix:
    """The accuracies (0 to 1) at the last round; a run that failed has what it had reached."""

    def __init__(self, wanted: Sequence[Cell], out: Path) -> None:
        self.out, self.seeds = out, sorted({cell.seed for cell in wanted})
        self.attacks = list(dict.fromkeys(cell.attack for cell in wanted))  # 'none' comes first
        self.columns = list(dict.fromkeys(cell.column for cell in wanted))
        self.failed = {(cell.attack, cell.column) for cell in wanted if failure_of(out / cell.name)}
        reached = [(cell, _accuracy(out / cell.name)) for cell in wanted]

        def mean(attack: str, column: Column) -> float:
            mine = [value for cell, value in reached if (cell.attack, cell.column) == (attack, column)]
            known = [value for value in mine if not isnan(value)]
            return fmean(known) if known else nan

        self.values = [[mean(attack, column) for column in self.columns] for attack in self.attacks]

    def worst(self) -> list[float]:
        """Return for each column the largest loss against the same method without an attack."""
        columns = list(zip(*self.values, strict=True))
        return [max([column[0] - value for value in column[1:] if not isnan(value)], default=nan) for column in columns]

    def comparison(self) -> Comparison:
        """Return the table."""
        title = (
            f"Test accuracy at the last round under attack, in % (mean over seeds {', '.join(map(str, self.seeds))})"
        )
        title += "; †: a run ended early, when too few clients had sent a usable update" if self.failed else ""
        names = [f"{method}, α = {alpha:g}, {100 * share:g} %" for share, alpha, method in self.columns]
        rows, numbers = [], []
        for attack, values in zip(self.attacks, self.values, strict=True):
            row = list(zip(self.columns, values, strict=True))
            rows.append([attack, *(percent(one) + " †" * ((attack, column) in self.failed) for column, one in row)])
            numbers += [
                {"attack": attack, "method": method, "share": share, "alpha": alpha, "accuracy in %": 100 * one}
                for (share, alpha, method), one in row
                if not isnan(one)
            ]
        rows.append(["largest loss, in points", *(f"{100 * loss:.1f}" for loss in self.worst())])
        return Comparison(title, ["attack", *names], rows, numbers)

    @in_one_style()
    def write(self) -> None:
        """Write matrix.md, matrix.csv and matrix.png."""
        table = self.comparison()
        write_atomically(self.out / "matrix.md", table.markdown().encode())
        write_atomically(self.out / "matrix.csv", table.csv().encode())
        save_figure(self._heat_map(table.title), self.out / "matrix.png")

    def _heat_map(self, title: str) -> Figure:
        """Return the accuracies as a table of colors with the numbers in it."""
        numbers = 100 * np.array(self.values, dtype=float)
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


# What is kept: the measurements of docs/reliability.md

KEPT = Path(__file__).parents[1] / "results" / "attacks"
SEEDS = range(2, 10)
"""Seeds whose runs changed nothing about the defense; 0 and 1 did."""
CENTER = ("digits", (0.2, 0.1, "feddf+robust"))
"""The setting from which the others differ in one thing: 20 % attackers at α = 0.1 against the defense, on digits."""

COLUMNS: dict[str, tuple[str, Column]] = {
    "robust": CENTER,
    "FedAvg": ("digits", (0.2, 0.1, "fedavg")),
    "FedDF": ("digits", (0.2, 0.1, "feddf")),
    "robust, α = 1": ("digits", (0.2, 1.0, "feddf+robust")),
    "robust, 25 %": ("digits", (0.25, 0.1, "feddf+robust")),
    "robust, BatchNorm": ("batchnorm", (0.2, 0.1, "feddf+robust")),
    "robust, 8×8 digits": ("digits8", (0.2, 0.1, "feddf+robust")),
    "feddf-plus": ("digits", (0.2, 0.1, "feddf-plus")),
    "feddf-plus, robust": ("digits", (0.2, 0.1, "feddf-plus+robust")),
}


def kept_table(kept: Path = KEPT) -> str:
    """Return the accuracies of all kept runs as a Markdown table: an attack a row, a setting a column."""
    found = {title: _kept_column(kept / folder, column) for title, (folder, column) in COLUMNS.items()}
    rows = [[attack, *(_shown(found[title].get(attack)) for title in COLUMNS)] for attack in (NONE, *NAMES)]
    for against in (NONE, "absent"):
        rows.append(
            [f"largest loss against {against}", *(_shown(_largest_loss(found[one], against)) for one in COLUMNS)]
        )
    heads = [f"{title} ({len(_kept_seeds(kept / COLUMNS[title][0], COLUMNS[title][1]))})" for title in COLUMNS]
    lines = [["attack", *heads], ["---", *(["---:"] * len(heads))], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _kept_seeds(folder: Path, column: Column) -> list[int]:
    """Return the seeds of which a whole column is kept: means are over these."""
    return [seed for seed in SEEDS if all((folder / Cell(one, column, seed).name).is_dir() for one in (NONE, *NAMES))]


def _kept_column(folder: Path, column: Column) -> dict[str, float]:
    """Return the mean accuracy over the seeds in %, by the attack."""
    seeds = _kept_seeds(folder, column)
    return {
        attack: 100 * fmean(_accuracy(folder / Cell(attack, column, seed).name) for seed in seeds)
        for attack in (NONE, *NAMES)
        if seeds
    }


def _largest_loss(column: dict[str, float], against: str) -> float | None:
    """Return the largest loss against another row, without the row that only lacks the attackers' examples."""
    attacked = [value for attack, value in column.items() if attack not in (NONE, "absent")]
    return column[against] - min(attacked) if attacked else None


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _accuracy(path: Path) -> float:
    """Return the last accuracy of a run that has ended; else not a number."""
    run = read_run(path) if (path / "config.toml").is_file() else None
    if run is None or not (max(run.rounds, default=0) >= run.value("rounds") or failure_of(path)):
        return nan
    return run.curve()[-1] if run.records else 0.0
