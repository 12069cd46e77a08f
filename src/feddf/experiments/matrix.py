"""Attack × method × share × α: each cell an ordinary run folder, and what comes of them as a table and a heat map."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isnan, nan
from pathlib import Path
from statistics import fmean

from feddf.config import Experiment, with_values
from feddf.experiments import variants
from feddf.experiments.parallel import failure_of, has_ended, run_folders
from feddf.report.read import read_run
from feddf.report.tables import Comparison, percent
from feddf.rounds import QuorumError
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runtime.atomic import write_atomically

NONE = "none"


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
        """The name of its run folder; where nobody attacks, the share does not matter."""
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
            "attack.kind": cell.attack,
            "attack.share": cell.share if cell.attack != NONE else 0.2,
        }
        found[cell.name] = variants.variant(with_values(base, changes), cell.method, methods)
    return found


def run_cells(
    wanted: Mapping[str, Experiment], out: Path, parallel: int, say: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    """Run the cells that have not ended; yield the name of each, and why it failed.

    One at a time they run in this process, which saves starting it; several at a time each has a process of its own.
    """
    there = {out / name: experiment for name, experiment in wanted.items()}
    for _ in variants.open_folders(there):
        pass
    left = [path for path in there if not has_ended(path)]
    say(f"{len(there)} runs, {len(there) - len(left)} of them done")
    if parallel > 1:
        for path, failure in run_folders(left, parallel):
            yield path.name, failure
        return
    for path in left:
        yield path.name, _run_here(there[path], path)


def _run_here(experiment: Experiment, path: Path) -> str:
    from feddf.runs.store import RunFolder

    try:
        for _ in run_experiment(build(experiment), RunFolder.open(path)):
            pass
    except QuorumError as error:  # every client diverged: it would again
        write_atomically(path / "failed.txt", str(error).encode())
        return str(error)
    return ""


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
        return Comparison(title, ["attack", *names], [*rows, worst])
