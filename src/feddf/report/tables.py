"""Tables of results, for the terminal."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from rich.table import Column, Table

from feddf.report.read import ReportError, Run, differing, every_prototype, scores_of, seeds_of, setting, short_names
from feddf.runtime.atomic import write_atomically

WHICH: tuple[Literal["averaged"], Literal["fused"]] = ("averaged", "fused")
ALL, ENSEMBLE = "mean of all", "ensemble"
"""Rows of a comparison besides the prototypes."""


def table_of(
    words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[Any]], *, fold: bool = False, **look: Any
) -> Table:
    """Return a table for the terminal. Words are folded where there is no room, and never cut; so are, if asked to,
    numbers, which stand to the right.
    """
    left = [Column(name, overflow="fold") for name in words]
    table = Table(
        *left, *(Column(name, justify="right", overflow="fold", no_wrap=not fold) for name in numbers), **look
    )
    for row in rows:
        table.add_row(*row)
    return table


def runs_table(runs: Sequence[Run]) -> Table:
    """Return how far each run got, the accuracies of its prototypes then, and the best with its round."""
    keys, rows = differing(runs), []
    for run, name in zip(runs, short_names([run.path for run in runs]), strict=True):
        about = [name, *([setting(run, keys)] if keys else []), f"{max(run.rounds, default=0)}/{run.value('rounds')}"]
        for prototype in run.prototypes:
            averaged, fused = run.curve(prototype, "averaged"), run.curve(prototype)
            best = f"{percent(max(fused))} ({run.rounds[fused.index(max(fused))]})"
            ends = [percent(averaged[-1]), percent(fused[-1]), best, percent(run.ensemble()[-1])]
            rows.append([*about, prototype, *ends])
            about = [""] * len(about)  # said once
        if not run.records:
            rows.append([*about, *["–"] * 5])
    words = ["run", *(["what differs"] if keys else []), "round", "model"]
    numbers = ["averaged", "fused", "best (round)", "ensemble"]
    title = f"Test {scores_of(runs)} at the last round, in %: {runs[0].value('name')}"
    return table_of(words, numbers, rows, title=title)


def results(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the same for programs: plain values, accuracies from 0 to 1, ``None`` where they are not known."""
    keys = differing(runs)
    return [
        {
            "run": str(run.path),
            "method": run.method,
            "seed": run.seed,
            "round": run.rounds[-1] if run.records else 0,
            "rounds": run.value("rounds"),
            "differs": {name: run.config.get(name) for name in keys},
            "score": run.score,
            "models": {name: {which: _known(run.curve(name, which)[-1]) for which in WHICH} for name in run.prototypes},
            "ensemble": _known(run.ensemble()[-1]) if run.records else None,
            "seconds": run.seconds(),
        }
        for run in runs
    ]


def _known(value: float) -> float | None:
    return None if value != value else value


@dataclass(frozen=True)
class Comparison:
    """Methods side by side: a title, the names of the columns, and the rows, all as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[Mapping[str, object]] = ()
    """The same as numbers, one object a value: what the CSV file and programs get."""

    def table(self) -> Table:
        """Return it for the terminal."""
        words = [name for name in self.columns if name in ("setting", "model", self.columns[0])]
        numbers, title = self.columns[len(words) :], {"title": self.title, "title_justify": "left"}
        return table_of(words, numbers, self.rows, fold=True, min_width=len(self.title), **title)

    def markdown(self) -> str:
        """Return it as a Markdown table."""
        return f"{self.title}\n\n{markdown_table(self.columns, self.rows)}\n"

    def write(self, path: Path) -> list[Path]:
        """Write it as Markdown and as CSV files of a name; return these."""
        contents = {path.with_name(f"{path.name}.md"): self.markdown(), path.with_name(f"{path.name}.csv"): self.csv()}
        for file, text in contents.items():
            write_atomically(file, text.encode())
        return list(contents)

    def csv(self) -> str:
        """Return the numbers as comma-separated values, one row for each mean with its deviation and count."""
        text = StringIO()
        columns = list(dict.fromkeys(name for row in self.numbers for name in row))
        writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(self.numbers)
        return text.getvalue()


def compared(of: Mapping[str, Sequence[Run]], target: float | None = None) -> Comparison:
    """Set methods side by side, prototype by prototype: mean ± standard deviation over the seeds.

    ``of`` holds the runs of each method, under the name that its column is to have.
    With a ``target``, rows with the number of rounds to reach that test accuracy follow (the measure of Table 1).
    """
    runs, two = [run for mine in of.values() for run in mine], len(of) == 2
    last = min((len(run.records) for run in runs), default=0)
    if not last:
        raise ReportError("there is no round that all these runs have done")
    score = scores_of(runs)
    rows: list[list[str]] = []
    numbers: list[dict[str, object]] = []
    for name in [*every_prototype(runs), ALL, ENSEMBLE]:
        cells = [(method, [_curve(run, name)[last - 1] for run in mine]) for method, mine in of.items()]
        gain = [b - a for a, b in zip(cells[0][1], cells[1][1], strict=True)] if two and name != ENSEMBLE else []
        signed = [spread(gain, signed=True) if gain else ""]
        rows.append([name, *(spread(cell) for _, cell in cells), *(signed if two else [])])
        for method, cell in [*cells, *([("gain", gain)] if gain else [])]:
            percents = [100 * value for value in cell]
            numbers.append({"method": method, "model": name, "measure": f"{score} in %", **statistics(percents)})
    for name in [*every_prototype(runs), ALL]:
        if target is not None:
            measure = f"rounds to {percent(target)} %"
            reached = {method: _rounds_to(mine, name, target) for method, mine in of.items()}
            rows.append([f"{measure}: {name}", *(text for text, _ in reached.values()), *([""] if two else [])])
            entry = {"model": name, "measure": measure}
            numbers += [{"method": method, **entry, **found} for method, (_, found) in reached.items()]
    which = seeds_of(runs)
    which += ": mean ± sample standard deviation (n − 1)" if which.startswith("seeds") else ""
    columns = ["model", *of, *(["gain"] if two else [])]
    return Comparison(f"Test {score} after round {last}, in % ({which})", columns, rows, numbers)


def _curve(run: Run, name: str) -> list[float]:
    """Return the test accuracies of a row of a comparison by round."""
    return run.ensemble() if name == ENSEMBLE else run.curve(None if name == ALL else name)


def _rounds_to(runs: Sequence[Run], name: str, target: float) -> tuple[str, dict[str, object]]:
    """Return the first rounds at the target as text and as numbers.

    They are a mean ± deviation only if every run reached it, else one number a run: a mean without those that missed
    the target ("> 12" in 12 rounds) would be too small.
    """
    curves = [_curve(run, name) for run in runs]
    firsts = [next((i for i, value in enumerate(curve, 1) if value >= target), None) for curve in curves]
    reached = [first for first in firsts if first is not None]
    missed = len(runs) - len(reached)
    each = ", ".join(str(first or f"> {len(curve)}") for first, curve in zip(firsts, curves, strict=True))
    found = {**statistics([] if missed else reached), "n": len(reached), "not reached": missed, "each": each}
    return each if missed or len(runs) == 1 else f"{fmean(reached):.1f} ± {stdev(reached):.1f}", found


def swept(of: Mapping[str, Mapping[str, Sequence[Run]]], target: float | None = None) -> Comparison:
    """Set methods side by side for each of several settings, such as "alpha=0.1" and "alpha=1"."""
    each = {label: compared(runs, target) for label, runs in of.items()}
    first = next(iter(each.values()))
    if len(each) == 1:
        return first
    rows = [[label, *row] for label, one in each.items() for row in one.rows]
    numbers = [{"setting": label, **row} for label, one in each.items() for row in one.numbers]
    return Comparison(first.title, ["setting", *first.columns], rows, numbers)


def statistics(values: Sequence[float]) -> dict[str, object]:
    """Return mean, sample standard deviation and count of numbers; nothing for what cannot be said."""
    known = [value for value in values if value == value]
    std = round(stdev(known), 4) if len(known) > 1 else ""
    return {"mean": round(fmean(known), 4) if known else "", "std": std, "n": len(known)}


def seconds_table(runs: Sequence[Run]) -> Table:
    """Return where the time went: seconds a round by stage."""
    stages, rows = ["train", "fuse", "ask", "distill", "evaluate"], []
    for run, name in zip(runs, short_names([run.path for run in runs]), strict=True):
        total, rounds = run.seconds(), len(run.records)
        rows.append([name, *(f"{total[stage] / rounds:.1f}" if stage in total else "–" for stage in stages)])
    return table_of(["run"], stages, rows, title="Seconds a round ('ask' and 'distill' are parts of 'fuse')")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], words: Collection[int] = (0,)) -> str:
    """Return a Markdown table: words in some columns (the first), numbers in the others."""
    lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    lines.insert(1, ["---" if place in words else "---:" for place in range(len(header))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float) -> str:
    """Return a share as a percentage with one decimal."""
    return "–" if value != value else f"{100 * value:.1f}"


def spread(values: Sequence[float], signed: bool = False) -> str:
    """Return mean ± sample standard deviation (n − 1) in percent (the value alone where there is only one)."""
    if any(value != value for value in values):
        return "–"
    text = f"{100 * fmean(values):{'+' if signed else ''}.1f}"
    return f"{text} ± {100 * stdev(values):.1f}" if len(values) > 1 else text
