"""Tables of results, for the terminal."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from statistics import fmean, stdev
from typing import Any, Literal

from rich.table import Table

from feddf.report.read import ReportError, Run, differing, setting, short_names

WHICH: tuple[Literal["averaged"], Literal["fused"]] = ("averaged", "fused")


def runs_table(runs: Sequence[Run]) -> Table:
    """Return one row a run: how far it got and the accuracies at its last round."""
    table = Table(title="Test accuracy at the last round, in %")
    keys = differing(runs)
    for column in ("run", *(["what differs"] if keys else []), "round", "model"):
        table.add_column(column, overflow="fold")
    for column in ("averaged", "fused", "best", "ensemble"):
        table.add_column(column, justify="right", no_wrap=True)
    for run, short in zip(runs, short_names([run.path for run in runs]), strict=True):
        name = [short, *([setting(run, keys)] if keys else [])]
        for prototype in run.prototypes:
            averaged, fused = run.curve(prototype, "averaged"), run.curve(prototype)
            row = [*name, f"{run.rounds[-1]}/{run.value('rounds')}", prototype]
            numbers = [averaged[-1], fused[-1], max(fused), run.ensemble()[-1]]
            table.add_row(*row, *(percent(number) for number in numbers))
        if not run.records:
            table.add_row(*name, f"0/{run.value('rounds')}", *["–"] * 5)
    return table


def results(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the same for programs: plain values, accuracies from 0 to 1, ``None`` where nobody knows."""
    keys = differing(runs)
    return [
        {
            "run": str(run.path),
            "method": run.method,
            "seed": run.seed,
            "round": run.rounds[-1] if run.records else 0,
            "rounds": run.value("rounds"),
            "differs": {name: run.config.get(name) for name in keys},
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
        table = Table(title=self.title, title_justify="left", min_width=len(self.title))
        for column in self.columns:
            table.add_column(column, justify="left" if column in ("setting", "model", self.columns[0]) else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return it as a Markdown table."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

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
    methods, runs = list(of), [run for mine in of.values() for run in mine]
    last = last_common_round(runs)
    seeds = sorted({run.seed for run in runs})
    plural = f"seed {seeds[0]}"
    if len(seeds) > 1:
        plural = f"seeds {', '.join(map(str, seeds))}: mean ± sample standard deviation (n − 1)"
    two = len(methods) == 2
    rows: list[list[str]] = []
    numbers: list[dict[str, object]] = []
    for name in [*runs[0].prototypes, "mean of all", "ensemble"]:
        cells = [[_value(run, name, last) for run in of[method]] for method in methods]
        gain = [b - a for a, b in zip(*cells, strict=True)] if two and name != "ensemble" else []
        for method, cell in [*zip(methods, cells, strict=True), *([("gain", gain)] if gain else [])]:
            percents = [100 * value for value in cell]
            numbers.append({"method": method, "model": name, "measure": "accuracy in %", **statistics(percents)})
        rows.append(
            [name, *(spread(cell) for cell in cells), *([spread(gain, signed=True) if gain else ""] if two else [])]
        )
    if target is not None:
        for name in [*runs[0].prototypes, "mean of all"]:
            cells_ = [_rounds_to(of[method], name, target) for method in methods]
            rows.append([f"rounds to {percent(target)} %: {name}", *cells_, *([""] if two else [])])
            for method in methods:
                reached = [float(first) for first in _firsts(of[method], name, target) if first is not None]
                entry = {"method": method, "model": name, "measure": f"rounds to {percent(target)} %"}
                numbers.append({**entry, **statistics(reached), "not reached": len(of[method]) - len(reached)})
    columns = ["model", *methods, *(["gain"] if two else [])]
    return Comparison(f"Test accuracy after round {last}, in % ({plural})", columns, rows, numbers)


def swept(of: Mapping[str, Mapping[str, Sequence[Run]]], target: float | None = None) -> Comparison:
    """Set methods side by side for each of several settings, such as "alpha=0.1" and "alpha=1"."""
    each = {label: compared(runs, target) for label, runs in of.items()}
    first = next(iter(each.values()))
    if len(each) == 1:
        return first
    return Comparison(
        first.title,
        ["setting", *first.columns],
        [[label, *row] for label, one in each.items() for row in one.rows],
        [{"setting": label, **row} for label, one in each.items() for row in one.numbers],
    )


def statistics(values: Sequence[float]) -> dict[str, object]:
    """Return mean, sample standard deviation and count of numbers; nothing for what cannot be said."""
    known = [value for value in values if value == value]
    return {
        "mean": round(fmean(known), 4) if known else "",
        "std": round(stdev(known), 4) if len(known) > 1 else "",
        "n": len(known),
    }


def _firsts(runs: Sequence[Run], name: str, target: float) -> list[int | None]:
    """Return the first round of each run at the target."""
    curves = [run.curve(None if name == "mean of all" else name) for run in runs]
    return [next((i for i, value in enumerate(curve, 1) if value >= target), None) for curve in curves]


def _rounds_to(runs: Sequence[Run], name: str, target: float) -> str:
    """Return the mean ± deviation of the first rounds at the target, and how many runs did not reach it in how many."""
    curves = [run.curve(None if name == "mean of all" else name) for run in runs]
    firsts = _firsts(runs, name, target)
    reached = [first for first in firsts if first is not None]
    if not reached:
        return f"not reached in {max(map(len, curves))}"
    text = f"{fmean(reached):.1f} ± {stdev(reached):.1f}" if len(reached) > 1 else str(reached[0])
    missing = [len(curve) for curve, first in zip(curves, firsts, strict=True) if first is None]
    return f"{text}, ≥ {min(missing)} in {len(missing)} of {len(firsts)}" if missing else text


def last_common_round(runs: Sequence[Run]) -> int:
    """Return the last round that every run has done."""
    last = min((len(run.records) for run in runs), default=0)
    if not last:
        raise ReportError("there is no round that all these runs have done")
    return last


def seconds_table(runs: Sequence[Run]) -> Table:
    """Return where the time went: seconds a round by stage."""
    stages = ["train", "fuse", "ask", "distill", "evaluate"]
    table = Table(title="Seconds a round ('ask' and 'distill' are parts of 'fuse')")
    table.add_column("run")
    for stage in stages:
        table.add_column(stage, justify="right")
    for run, short in zip(runs, short_names([run.path for run in runs]), strict=True):
        total = run.seconds()
        cells = [f"{total[stage] / len(run.records):.1f}" if stage in total else "–" for stage in stages]
        table.add_row(short, *cells)
    return table


def _value(run: Run, name: str, last: int) -> float:
    if name == "ensemble":
        return run.ensemble()[last - 1]
    return run.curve(None if name == "mean of all" else name)[last - 1]


def percent(value: float) -> str:
    """Return a share as a percentage with one decimal."""
    return "–" if value != value else f"{100 * value:.1f}"


def spread(values: Sequence[float], signed: bool = False) -> str:
    """Return mean ± sample standard deviation (n − 1) in percent (the value alone where there is only one)."""
    if any(value != value for value in values):
        return "–"
    sign = "+" if signed else ""
    text = f"{100 * fmean(values):{sign}.1f}"
    return f"{text} ± {100 * stdev(values):.1f}" if len(values) > 1 else text
