"""One page about all results: the paper's claims with a verdict each, every table and curve, and how to repeat them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from math import ceil, nan
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure

from feddf.report.plots import COLORS, draw_curve, in_one_style
from feddf.report.read import ReportError
from reproduction.artifact import SCALES
from reproduction.judging import CONTRADICTED, HOLDS, SUPPORTED, UNDECIDED, UNTESTED

Result = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --ok: #1b7f3b; --part: #a06a00; --bad: #b3261e; --none: #777; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: .5rem 0; }
th, td { border: 1px solid var(--line); padding: .2rem .6rem; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
.claim { text-align: left; min-width: 16rem; }
td small { color: var(--none); display: block; }
.verdict { font-weight: 600; }
.holds { color: var(--ok); } .part { color: var(--part); }
.fails { color: var(--bad); } .untested { color: var(--none); }
section { border-top: 1px solid var(--line); margin-top: 2rem; }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
code { overflow-wrap: anywhere; }
"""
_CLASSES = {HOLDS: "holds", SUPPORTED: "holds", UNDECIDED: "part", CONTRADICTED: "fails"}


def read_results(folder: Path) -> list[Result]:
    """Return the results in a folder and in its folders of scales, the largest scale first."""
    found: list[Result] = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ReportError(f"cannot read {path}: {error}") from None
        if isinstance(one, dict) and "artifact" in one:
            found.append(one)
    if not found:
        raise ReportError(f"{folder} holds no results; python -m reproduction writes some")
    return sorted(found, key=lambda one: (*SCALES, one["scale"]).index(one["scale"]))


def verdicts(results: Sequence[Result], names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return (artifact, scale, verdict, comparisons, seeds, distinct runs, what was run) for each claim, in order."""
    rows: list[tuple[str, ...]] = []
    for name in names:
        mine = [one for one in results if one["artifact"] == name]
        for one in mine:
            seeds, runs = str(len(one["seeds"])), str(len(_runs([one])))
            rows.append((name, one["scale"], one["verdict"], _counts(one), seeds, runs, one["run_on"]))
        if not mine:
            rows.append((name, "", UNTESTED, "", "", "", ""))
    return rows


def _counts(one: Result) -> str:
    """Return how many comparisons came out how, for instance "2 supported, 4 undecided"."""
    outcomes = [finding["outcome"] for finding in one["findings"]]
    kinds = (SUPPORTED, CONTRADICTED, UNDECIDED)
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in kinds if kind in outcomes)


def _runs(results: Sequence[Result]) -> set[str]:
    """Return the names of the distinct runs behind some results: one run can stand in several tables."""
    return {name for one in results for cell in one["cells"] for name in cell["hashes"]}


def summary(results: Sequence[Result]) -> str:
    """Return in a sentence how much evidence there is."""
    counts = [one["verdict"] for one in results]
    kinds = ", ".join(f"{counts.count(kind)} {kind}" for kind in (HOLDS, CONTRADICTED, UNDECIDED) if kind in counts)
    runs = len(_runs(results))
    return f"{len(results)} verdicts ({kinds}) from {runs} distinct runs: one run can stand in several tables."


def markdown(rows: Sequence[Sequence[str]], titles: Mapping[str, tuple[str, str]]) -> str:
    """Return the verdicts as a table for docs/results.md."""
    head = "| | verdict | comparisons | seeds | runs | run on |\n|---|---|---|---:|---:|---|\n"
    lines = (f"| {titles[name][0]} | **{said}** | {' | '.join(rest)} |\n" for name, _, said, *rest in rows)
    return head + "".join(lines)


def page(results: Sequence[Result], titles: Mapping[str, tuple[str, str]]) -> str:
    """Return one self-contained page.

    ``titles`` are (title, what it would take to test it) of every artifact, in order.
    """
    scales = sorted({one["scale"] for one in results}, key=lambda scale: (*SCALES, scale).index(scale)) or [""]
    by_name: dict[str, dict[str, Result]] = {}
    for one in results:
        by_name.setdefault(one["artifact"], {})[one["scale"]] = one
    rows = "".join(_overview(name, *titles[name], by_name.get(name, {}), scales) for name in titles)
    sections = "".join(_artifact(name, titles[name][0], by_name[name]) for name in titles if name in by_name)
    head = "".join(f"<th>{escape(scale)}</th>" for scale in scales)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>FedDF, reproduced</title><style>{_STYLE}</style></head><body><h1>FedDF, reproduced</h1>"
        "<p>Each claim of the paper as comparisons of measured numbers, at each scale that was run. Comparisons are "
        "paired by seed; one is supported where the whole 95 % confidence interval of the mean difference (Student's t)"
        " agrees with it, contradicted where the whole interval is against it, and undecided otherwise. A claim holds "
        "where all its comparisons are supported.</p>"
        f"<p>{escape(summary(results))} The small tasks are no stand-in for the paper's: "
        "the digits were chosen because the clients' ensemble is well above their average there in the first rounds."
        f"</p><table><tr><th>table or figure</th>{head}"
        f"<th class='claim'>claim</th></tr>{rows}</table>{sections}</body></html>\n"
    )


def _overview(name: str, title: str, needs: str, mine: Mapping[str, Result], scales: Sequence[str]) -> str:
    """Return an artifact's line in the list of all claims."""
    if not mine:
        return (
            f"<tr><td>{escape(title)}</td><td colspan='{len(scales)}'>{_verdict(UNTESTED)}</td>"
            f"<td class='claim'>{escape(needs)}</td></tr>"
        )
    claim = next(iter(mine.values()))["claim"]
    verdicts = "".join(f"<td>{_judged(mine[scale]) if scale in mine else '–'}</td>" for scale in scales)
    return (
        f"<tr><td><a href='#{escape(name)}'>{escape(title)}</a></td>{verdicts}"
        f"<td class='claim'>{escape(claim)}</td></tr>"
    )


def _artifact(name: str, title: str, mine: Mapping[str, Result]) -> str:
    claim = next(iter(mine.values()))["claim"]
    parts = "".join(map(_section, mine.values()))
    return f"<section id='{escape(name)}'><h2>{escape(title)}</h2><p>{escape(claim)}</p>{parts}</section>"


def _verdict(text: str) -> str:
    return f"<span class='verdict {_CLASSES.get(text, 'untested')}'>{escape(text)}</span>"


def _judged(one: Result) -> str:
    """Return a verdict, the comparisons that it comes from, and what was run."""
    seeds = f"{len(one['seeds'])} seed{'s' if len(one['seeds']) > 1 else ''}, {len(_runs([one]))} runs"
    counts = f"<small>{_counts(one)}; {seeds}</small>" if one["findings"] else ""
    return f"{_verdict(one['verdict'])}{counts}<small>{escape(one['run_on'])}</small>"


def _shown(finding: Mapping[str, Any]) -> str:
    """Return a comparison with its difference, the interval, and how many seeds agree."""
    if not finding["seeds"]:
        return "not run yet"
    ends = "one seed" if finding["low"] is None else f"95 %: {finding['low']:+.1f} to {finding['high']:+.1f}"
    seeds = f"{finding['agree']} of {finding['seeds']} seeds agree"
    means = " against ".join(m if isinstance(m, str) else f"{m:.1f}" for m in finding["means"].values())
    return f"{finding['difference']:+.1f} ({ends}; {seeds}; {means})"


def _section(one: Result) -> str:
    findings = "".join(
        f"<li>{_verdict(each['outcome'])}: {escape(each['claim'])}: {_shown(each)}</li>" for each in one["findings"]
    )
    versions = ", ".join(f"{name} {value}" for name, value in one["versions"].items())
    return (
        f"<h3>Scale {escape(one['scale'])}: {_verdict(one['verdict'])}</h3><p>Run on: {escape(one['run_on'])}.</p>"
        f"<p>{escape(one['unit'])}; seeds {escape(', '.join(map(str, one['seeds'])))}; "
        f"the paper's number in gray.</p>{_table(one['cells'], len(one['seeds']))}<ul>{findings}</ul>{_bars(one)}"
        f"{_curves(one['cells'])}"
        f"<p><code>{escape(one['command'])}</code><br>{one['hours']:g} hours, {escape(one['machine'])}, "
        f"{escape(versions)}, {escape(one['date'])}</p>"
    )


def _table(cells: Sequence[Mapping[str, Any]], seeds: int) -> str:
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    by_place = {(cell["row"], cell["column"]): cell for cell in cells}
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = [
        f"<tr><td>{escape(row)}</td>{''.join(_entry(by_place.get((row, column)), seeds) for column in columns)}</tr>"
        for row in dict.fromkeys(cell["row"] for cell in cells)
    ]
    return f"<table><tr><th></th>{head}</tr>{''.join(lines)}</table>"


def _entry(cell: Mapping[str, Any] | None, seeds: int) -> str:
    """Return a cell's mean and spread, the paper's number, and how many seeds it has if not all were run."""
    if cell is None:
        return "<td></td>"
    values = list(cell["values"].values())
    text = _mean(values) if values else "–"
    paper = f"<small>{escape(cell['paper'])}</small>" if cell["paper"] else ""
    fewer = f"<small>{len(values)} of {seeds} seeds</small>" if 0 < len(values) < seeds else ""
    return f"<td>{text}{fewer}{paper}</td>"


def _mean(values: Sequence[float | str]) -> str:
    """Return mean ± sample standard deviation; all numbers where some are bounds, since these have no mean."""
    if any(isinstance(value, str) for value in values):
        return ", ".join(value if isinstance(value, str) else f"{value:g}" for value in values)
    numbers = [float(value) for value in values]
    return f"{fmean(numbers):.1f}" + (f" ± {stdev(numbers):.1f}" if len(numbers) > 1 else "")


@in_one_style()
def _picture(draw: Callable[[], Figure]) -> str:
    """Return a figure in the one style as SVG."""
    text = StringIO()
    draw().savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _bars(one: Result) -> str:
    """Return all means of an artifact as bars, if there are not too many to be told apart."""
    rows: dict[str, dict[str, list[float]]] = {}
    for cell in one["cells"]:
        numbers = [value for value in cell["values"].values() if not isinstance(value, str)]
        if numbers and len(numbers) == len(cell["values"]):  # a mean of bounds would say nothing
            rows.setdefault(cell["row"], {})[cell["column"]] = numbers
    if not rows or sum(map(len, rows.values())) > 40:
        return ""
    return _picture(lambda: bars(rows, one["unit"]))


HATCHES = ("", "//", "..")
"""What tells bars apart once all colors are taken."""


def bars(rows: Mapping[str, Mapping[str, Sequence[float]]], label: str) -> Figure:
    """Return a group of bars for each row, a color for each column, with ± one sample standard deviation over seeds.

    So the paper compares sources of unlabeled data (Figure 5).
    """
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    figure = Figure(figsize=(max(5.5, 0.9 + 0.35 * len(rows) * (len(columns) + 1)), 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(columns)
    for number, column in enumerate(columns):
        found = [row.get(column, ()) for row in rows.values()]
        places = [index + (number - (len(columns) - 1) / 2) * width for index, one in enumerate(found) if one]
        means = [fmean(one) for one in found if one]
        spreads = [stdev(one) if len(one) > 1 else 0.0 for one in found if one]
        color, hatch = COLORS[number % len(COLORS)], HATCHES[number // len(COLORS) % len(HATCHES)]
        axes.bar(places, means, width, yerr=spreads, color=color, hatch=hatch, label=column, capsize=2)
    axes.set_xticks(range(len(rows)), list(rows), rotation=30 if max(map(len, rows)) > 8 else 0, ha="right")
    axes.set_ylabel(fill(label, 40))
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside lower center", ncols=min(3, len(columns)))
    return figure


def _curves(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the learning curves of all cells as an SVG picture: the mean over seeds ± one standard deviation."""
    drawn = [cell for cell in cells if cell["curves"] and len(cell["curves"][0]["fused"]) > 1]
    return _picture(lambda: _draw_curves(drawn)) if drawn else ""


def _draw_curves(drawn: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 4 + 0.2 * ceil(len(drawn) / 2)), layout="constrained")
    axes = figure.subplots()
    for number, cell in enumerate(drawn):
        curves = [[nan if value is None else 100 * value for value in curve["fused"]] for curve in cell["curves"]]
        by_round = list(zip(*curves, strict=False))
        line, color = ["-", "--", ":", "-."][number // len(COLORS) % 4], COLORS[number % len(COLORS)]
        label = f"{cell['row']}, {cell['column']}"
        draw_curve(axes, range(1, len(by_round) + 1), by_round, line, color=color, label=label)
    several = any(len(cell["curves"]) > 1 for cell in drawn)
    axes.set(xlabel="communication round", ylabel="test accuracy in %")
    axes.set_title("mean over seeds, band ± 1 standard deviation" if several else "one seed")
    axes.legend(fontsize="x-small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return figure
