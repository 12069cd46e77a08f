"""Tables of results, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from rich.table import Table

from feddf.report.read import ReportError, Run


def runs_table(runs: Sequence[Run]) -> Table:
    """Return one row a run: how far it got and the accuracies at its last round."""
    table = Table(title="Test accuracy at the last round, in %")
    for column in ("run", "round", "model"):
        table.add_column(column, overflow="fold")
    for column in ("averaged", "fused", "best", "ensemble"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        for prototype in run.prototypes:
            last = run.records[-1]["models"][prototype]
            best = max(run.curve(prototype))
            row = [run.path.name, f"{run.rounds[-1]}/{run.config['rounds']}", prototype]
            numbers = [last["averaged"], last["fused"], best, run.ensemble()[-1]]
            table.add_row(*row, *(percent(number) for number in numbers))
        if not run.records:
            table.add_row(run.path.name, f"0/{run.config['rounds']}", *["–"] * 5)
    return table


def comparison_table(runs: Sequence[Run], methods: Sequence[str]) -> Table:
    """Set methods side by side, prototype by prototype: mean ± standard deviation over the seeds."""
    last = last_common_round(runs)
    seeds = sorted({run.seed for run in runs})
    plural = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    table = Table(title=f"Test accuracy after round {last}, in % ({plural})")
    table.add_column("model")
    for method in methods:
        table.add_column(method, justify="right")
    if len(methods) == 2:
        table.add_column("gain", justify="right")
    names = runs[0].prototypes
    for name in [*names, "mean of all", "ensemble"]:
        cells = [[_value(run, name, last) for run in runs if run.method == method] for method in methods]
        row = [spread(cell) for cell in cells]
        if len(methods) == 2:
            gain = [b - a for a, b in zip(*cells, strict=True)]
            row.append(spread(gain, signed=True) if name != "ensemble" else "")
        if name == "mean of all":
            table.add_section()
        table.add_row(name, *row)
    return table


def last_common_round(runs: Sequence[Run]) -> int:
    """Return the last round that every run has played."""
    last = min((len(run.records) for run in runs), default=0)
    if not last:
        raise ReportError("there is no round that all these runs have played")
    return last


def seconds_table(runs: Sequence[Run]) -> Table:
    """Return where the time went: seconds a round by stage."""
    stages = ["train", "fuse", "ask", "distill", "evaluate"]
    table = Table(title="Seconds a round ('ask' and 'distill' are parts of 'fuse')")
    table.add_column("run")
    for stage in stages:
        table.add_column(stage, justify="right")
    for run in runs:
        total = run.seconds()
        cells = [f"{total[stage] / len(run.records):.1f}" if stage in total else "–" for stage in stages]
        table.add_row(run.path.name, *cells)
    return table


def _value(run: Run, name: str, last: int) -> float:
    if name == "ensemble":
        return run.ensemble()[last - 1]
    return run.curve(None if name == "mean of all" else name)[last - 1]


def percent(value: float) -> str:
    """Return a share as a percentage with one decimal."""
    return "–" if value != value else f"{100 * value:.1f}"


def spread(values: Sequence[float], signed: bool = False) -> str:
    """Return mean ± standard deviation in percent (the value alone where there is only one)."""
    sign = "+" if signed else ""
    text = f"{100 * fmean(values):{sign}.1f}"
    return f"{text} ± {100 * stdev(values):.1f}" if len(values) > 1 else text
