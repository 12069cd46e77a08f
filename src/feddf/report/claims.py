"""One page about all results: the paper's claims with a verdict each, every table and curve, and how to repeat them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from math import ceil
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from feddf.report.read import ReportError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
HOLDS, IN_PART, FAILS, UNTESTED = "holds", "holds in part", "does not hold", "could not be tested here"
"""The verdicts on a claim."""
_CLASSES = {HOLDS: "holds", IN_PART: "part", FAILS: "fails"}


def read_results(folder: Path) -> list[Result]:
    """Return the results in a folder and in its folders of scales, the largest scale first."""
    found: list[Result] = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ReportError(f"cannot read {path}: {error}") from None
        if isinstance(one, dict) and "artefact" in one:
            found.append(one)
    if not found:
        raise ReportError(f"{folder} holds no results; feddf reproduce writes some")
    return sorted(found, key=lambda one: ORDER.index(one["scale"]) if one["scale"] in ORDER else len(ORDER))


ORDER = ("paper", "cpu", "smoke")


def verdicts(results: Sequence[Result], names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return (artefact, scale, verdict, comparisons that hold, of them clear, seeds) for each claim, in order."""
    rows: list[tuple[str, ...]] = []
    for name in names:
        mine = [one for one in results if one["artefact"] == name]
        rows += [(name, one["scale"], one["verdict"], *_counts(one)) for one in mine]
        if not mine:
            rows.append((name, "", UNTESTED, "", "", ""))
    return rows


def _counts(one: Result) -> tuple[str, str, str]:
    """Return (comparisons that hold, how many of these are clear, seeds); one seed has no spread to be clear of."""
    true, seeds = [each for each in one["findings"] if each["holds"]], len(one["seeds"])
    clear = str(sum(each["clear"] for each in true)) if seeds > 1 else ""
    return f"{len(true)} of {len(one['findings'])}", clear, str(seeds)


def page(results: Sequence[Result], titles: Mapping[str, tuple[str, str]]) -> str:
    """Return one self-contained page.

    ``titles`` are (title, what it would take to test it) of every artefact, in order.
    """
    scales = sorted({one["scale"] for one in results}, key=lambda scale: (*ORDER, scale).index(scale)) or [""]
    by_name: dict[str, dict[str, Result]] = {}
    for one in results:
        by_name.setdefault(one["artefact"], {})[one["scale"]] = one
    rows = "".join(_overview(name, *titles[name], by_name.get(name, {}), scales) for name in titles)
    sections = "".join(_artefact(name, titles[name][0], by_name[name]) for name in titles if name in by_name)
    head = "".join(f"<th>{escape(scale)}</th>" for scale in scales)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>FedDF, reproduced</title><style>{_STYLE}</style></head><body><h1>FedDF, reproduced</h1>"
        "<p>Each claim of the paper as a check on measured numbers, at each scale that was run. A comparison is clear "
        "when the difference is larger than the spread of the seeds, √Σs², s being the sample standard deviation "
        f"(n − 1).</p><table><tr><th>table or figure</th>{head}"
        f"<th class='claim'>claim</th></tr>{rows}</table>{sections}</body></html>\n"
    )


def _overview(name: str, title: str, needs: str, mine: Mapping[str, Result], scales: Sequence[str]) -> str:
    """Return an artefact's line in the list of all claims."""
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


def _artefact(name: str, title: str, mine: Mapping[str, Result]) -> str:
    claim = next(iter(mine.values()))["claim"]
    parts = "".join(map(_section, mine.values()))
    return f"<section id='{escape(name)}'><h2>{escape(title)}</h2><p>{escape(claim)}</p>{parts}</section>"


def _verdict(text: str) -> str:
    return f"<span class='verdict {_CLASSES.get(text, 'untested')}'>{escape(text)}</span>"


def _judged(one: Result) -> str:
    """Return a verdict, how many comparisons it comes from, and how many of those that hold are clear."""
    if not one["findings"]:
        return _verdict(one["verdict"])
    true, clear, seeds = _counts(one)
    spread = f"{clear} clear, {seeds} seeds" if clear else "1 seed"
    return f"{_verdict(one['verdict'])}<small>{true} comparisons, {spread}</small>"


def _significance(one: Result, finding: Mapping[str, Any]) -> str:
    if len(one["seeds"]) < 2:
        return "one seed"
    return f"{'clear' if finding['clear'] else 'within the spread'} of {finding['spread']:.1f}"


def _section(one: Result) -> str:
    reduction = f"<p>Reduced: {escape(one['reduction'])}.</p>" if one["reduction"] else ""
    findings = "".join(
        f"<li>{'✓' if each['holds'] else '✗'} {escape(each['claim'])}: {each['left']:.1f} against {each['right']:.1f}"
        f" ({_significance(one, each)})</li>"
        for each in one["findings"]
    )
    versions = ", ".join(f"{name} {value}" for name, value in one["versions"].items())
    return (
        f"<h3>Scale {escape(one['scale'])}: {_verdict(one['verdict'])}</h3>{reduction}"
        f"<p>{escape(one['unit'])}; seeds {escape(', '.join(map(str, one['seeds'])))}; "
        f"the paper's number in grey.</p>{_table(one['cells'], len(one['seeds']))}<ul>{findings}</ul>{_bars(one)}"
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
    values = cell["values"]
    text = "–" if not values else f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
    paper = f"<small>{escape(cell['paper'])}</small>" if cell["paper"] else ""
    fewer = f"<small>{len(values)} of {seeds} seeds</small>" if 0 < len(values) < seeds else ""
    return f"<td>{text}{fewer}{paper}</td>"


def _picture(draw: Callable[[], Figure]) -> str:
    """Return a figure in the one style as SVG."""
    import matplotlib

    from feddf.report.plots import STYLE

    text = StringIO()
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        draw().savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _bars(one: Result) -> str:
    """Return all means of an artefact as bars, if there are not too many to be told apart."""
    rows: dict[str, dict[str, list[float]]] = {}
    for cell in one["cells"]:
        if cell["values"]:
            rows.setdefault(cell["row"], {})[cell["column"]] = cell["values"]
    if not rows or sum(map(len, rows.values())) > 40:
        return ""
    from feddf.report.plots import bars

    return _picture(lambda: bars(rows, one["unit"]))


def _curves(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the learning curves of all cells as an SVG picture: the mean over seeds, and their range as a band."""
    drawn = [cell for cell in cells if cell["curves"] and len(cell["curves"][0]["fused"]) > 1]
    if not drawn:
        return ""
    return _picture(lambda: _drawn(drawn))


def _drawn(drawn: Sequence[Mapping[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    from feddf.report.plots import COLOURS

    figure = Figure(figsize=(8, 4 + 0.2 * ceil(len(drawn) / 2)), layout="constrained")
    axes = figure.subplots()
    for number, cell in enumerate(drawn):
        length = min(len(curve["fused"]) for curve in cell["curves"])
        by_round = [[100 * (curve["fused"][i] or 0.0) for curve in cell["curves"]] for i in range(length)]
        rounds, colour = range(1, length + 1), COLOURS[number % len(COLOURS)]
        style = ["-", "--", ":", "-."][number // len(COLOURS) % 4]
        axes.plot(
            rounds, [fmean(one) for one in by_round], style, color=colour, label=f"{cell['row']}, {cell['column']}"
        )
        axes.fill_between(
            rounds, [min(one) for one in by_round], [max(one) for one in by_round], color=colour, alpha=0.15
        )
    axes.set(xlabel="communication round", ylabel="test accuracy in %")
    axes.legend(fontsize="x-small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return figure
