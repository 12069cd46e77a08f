"""One page about all results: the paper's claims with a verdict each, every table and curve, and how to repeat them.

Everything measured is named by the data that were really used. The paper's numbers stand beside ours only at its own
scale; elsewhere they are of another task, and in a table of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from feddf.report.read import ReportError
from reproduction.artifact import SCALES
from reproduction.judging import CONTRADICTED, HOLDS, SUPPORTED, UNDECIDED, UNTESTED
from reproduction.page_plots import bars_of, curves_of

Result = Mapping[str, Any]

_CLASSES = {HOLDS: "holds", SUPPORTED: "holds", UNDECIDED: "part", CONTRADICTED: "fails"}
_SCALES = {"paper": "the paper's scale", "cpu": "small scale", "smoke": "smoke scale"}
_CALLED = {
    "mnist-5k": "digits", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet32": "ImageNet",
    "toy": "toy spirals", "ag_news": "AG News", "sst2": "SST-2",
}  # fmt: skip
_SIDES = {"mnist-5k": 28, "cifar10": 32, "cifar100": 32}


def data_of(cell: Mapping[str, Any]) -> str:
    """Return what a cell was really run on.

    >>> data_of({"configuration": {"data": {"name": "mnist-5k", "image_size": 14}}})
    'digits, 14×14'
    """
    data = cell.get("configuration", {}).get("data", {})
    name = str(data.get("name", ""))
    side = data.get("image_size") or _SIDES.get(name)
    return _CALLED.get(name, name) + (f", {side}×{side}" if side else "")


def honest(text: str, cell: Mapping[str, Any]) -> str:
    """Return a row or a sentence with the cell's own data in place of those of its preset, which the paper has.

    >>> honest("cifar10, α = 1", {"preset": "cifar10-resnet8", "configuration": {"data": {"name": "mnist-5k"}}})
    'digits, 28×28, α = 1'
    """
    preset = str(cell.get("preset", "")).partition("-")[0]
    names = "|".join(re.escape(name) for name in {preset, _CALLED.get(preset, preset)} if name)
    return re.sub(rf"(?<![\w-])(?:{names})(?![\w-])", data_of(cell), text) if preset in _CALLED else text


def all_data(one: Result) -> str:
    """Return all data that a result was really run on."""
    return "; ".join(dict.fromkeys(filter(None, map(data_of, one["cells"]))))


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
    by_name: dict[str, dict[str, Result]] = {}
    for one in results:
        by_name.setdefault(one["artifact"], {})[one["scale"]] = one
    rows = "".join(_overview(name, *titles[name], by_name.get(name, {})) for name in titles)
    sections = "".join(_artifact(name, titles[name][0], by_name[name]) for name in titles if name in by_name)
    shown = [(escape(name), escape(_short(titles[name][0]))) for name in titles if name in by_name]
    links = "".join(f"<li><a href='#{name}'>{title}</a></li>" for name, title in shown)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>FedDF, reproduced</title><link rel='icon' href='data:,'><style>{style}</style></head><body>"
        f"<header><h1>FedDF, reproduced</h1></header><nav aria-label='Tables and figures'><ul>"
        f"<li><a href='#summary'>Summary</a></li>{links}</ul></nav><main>"
        f"<div id='summary'><h2>What holds</h2>{_tiles(results, len(titles))}"
        f"<p>{escape(summary(results))} {escape(_where(results))} The small tasks are no stand-in for the paper's: the "
        "digits were chosen because the clients' ensemble is well above their average there in the first rounds.</p>"
        "<p class='faint'>Each claim of the paper is a list of comparisons of measured numbers, paired by seed. One is "
        "supported where the whole 95 % confidence interval of the mean difference (Student's t) agrees with it, "
        "contradicted where the whole interval is against it, and undecided otherwise. A claim holds where all its "
        f"comparisons are supported.</p><h2>Every claim</h2><ul class='claims'>{rows}</ul></div>{sections}</main>"
        "</body></html>\n"
    )


def _short(title: str) -> str:
    """Return a title without what the paper ran it on.

    >>> _short("Table 1, one column of it (CIFAR-10, ResNet-8)")
    'Table 1, one column of it'
    """
    return title.partition(":")[0].partition(" (")[0]


def _tiles(results: Sequence[Result], of: int) -> str:
    """Return how many claims came out how, to be seen first."""
    verdicts = [one["verdict"] for one in results]
    tiles = [(kind, verdicts.count(kind)) for kind in (HOLDS, UNDECIDED, CONTRADICTED)]
    missing = of - len({one["artifact"] for one in results})
    tiles += [(UNTESTED, missing)] if missing else []
    return "<ul class='counts'>" + "".join(f"<li><b>{n}</b>{_verdict(kind)}</li>" for kind, n in tiles) + "</ul>"


def _where(results: Sequence[Result]) -> str:
    """Return how many verdicts rest on the paper's own scale."""
    return f"{sum(one['scale'] == 'paper' for one in results)} of the verdicts are at the paper's scale."


def _overview(name: str, title: str, needs: str, mine: Mapping[str, Result]) -> str:
    """Return an artifact's line in the list of all claims."""
    if not mine:
        return f"<li><span>{escape(title)}</span><span>{_verdict(UNTESTED)}</span><span>{escape(needs)}</span></li>"
    claim = next(iter(mine.values()))["claim"]
    verdicts = "".join(map(_judged, mine.values()))
    return (
        f"<li><a href='#{escape(name)}'>{escape(_short(title))}</a><div>{verdicts}</div>"
        f"<div>{escape(claim)}<small>The paper's: {escape(title)}</small></div></li>"
    )


def _artifact(name: str, title: str, mine: Mapping[str, Result]) -> str:
    claim, data = next(iter(mine.values()))["claim"], "; ".join(dict.fromkeys(map(all_data, mine.values())))
    parts = "".join(map(_section, mine.values()))
    return (
        f"<section id='{escape(name)}'><h2>{escape(_short(title))}, run on {escape(data)}</h2>"
        f"<p class='faint'>The paper's: {escape(title)}</p><p>{escape(claim)}</p>{parts}</section>"
    )


def _verdict(text: str) -> str:
    return f"<span class='verdict {_CLASSES.get(text, 'untested')}'>{escape(text)}</span>"


def _judged(one: Result) -> str:
    """Return a verdict, the comparisons that it comes from, and what was run."""
    seeds = f"{len(one['seeds'])} seed{'s' if len(one['seeds']) > 1 else ''}, {len(_runs([one]))} runs"
    counts = f"<small>{_counts(one)}; {seeds}</small>" if one["findings"] else ""
    said = f"{_verdict(one['verdict'])} on {escape(all_data(one))}{counts}"
    return f"<div>{said}<small>{escape(one['run_on'])}</small></div>"


def _shown(finding: Mapping[str, Any]) -> str:
    """Return a comparison with its difference, the interval, and how many seeds agree."""
    if not finding["seeds"]:
        return "not run yet"
    ends = "one seed" if finding["low"] is None else f"95 %: {finding['low']:+.1f} to {finding['high']:+.1f}"
    seeds = f"{finding['agree']} of {finding['seeds']} seeds agree"
    means = " against ".join(m if isinstance(m, str) else f"{m:.1f}" for m in finding["means"].values())
    return f"{finding['difference']:+.1f} ({ends}; {seeds}; {means})"


def _section(one: Result) -> str:
    cells = [{**cell, "row": honest(cell["row"], cell)} for cell in one["cells"]]
    some = cells[0] if cells else {}
    findings = "".join(
        f"<li>{_verdict(each['outcome'])}: {escape(honest(each['claim'], some))}: {_shown(each)}</li>"
        for each in one["findings"]
    )
    versions, own = ", ".join(f"{name} {value}" for name, value in one["versions"].items()), one["scale"] == "paper"
    data, unit = all_data(one), f"{one['unit']}, on {all_data(one)}"
    return (
        f"<h3>{escape(_SCALES[one['scale']].capitalize())}: {_verdict(one['verdict'])} "
        f"<span class='data'>{escape(data)}</span></h3><p>Run on: {escape(one['run_on'])}.</p>"
        f"<p>{escape(unit)}; seeds {escape(', '.join(map(str, one['seeds'])))}"
        f"{'; below it, the number in the paper' if own and any(cell['paper'] for cell in cells) else ''}.</p>"
        f"{_table(cells, len(one['seeds']), data, beside=own)}{'' if own else _paper(one)}<ul>{findings}</ul>"
        f"<div class='pictures'>{bars_of(cells, unit)}{curves_of(cells, data)}</div>"
        f"<p class='faint'><code>{escape(one['command'])}</code><br>{one['hours']:g} hours, {escape(one['machine'])}, "
        f"{escape(versions)}, {escape(one['date'])}</p>"
    )


def _paper(one: Result) -> str:
    """Return the paper's numbers, which are of another task than ours, in a table of their own."""
    cells = [{**cell, "values": {}} for cell in one["cells"] if cell["paper"]]
    if not cells:
        return ""
    title = "The paper's numbers: of its own task, not to be compared with those above"
    return f"<details><summary>{title}</summary>{_table(cells, 0, 'in the paper', beside=True)}</details>"


def _table(cells: Sequence[Mapping[str, Any]], seeds: int, corner: str, beside: bool) -> str:
    """Return cells as a table; ``beside`` puts the paper's numbers into them."""
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    by_place = {(cell["row"], cell["column"]): cell for cell in cells}
    head = "".join(f"<th scope='col'>{escape(column)}</th>" for column in columns)
    lines = [
        f"<tr><th scope='row'>{escape(row)}</th>"
        f"{''.join(_entry(by_place.get((row, column)), column, seeds, beside) for column in columns)}</tr>"
        for row in dict.fromkeys(cell["row"] for cell in cells)
    ]
    return (
        f"<div class='wide' tabindex='0' role='group' aria-label='{escape(corner)}'><table><thead><tr><th scope='col'>"
        f"{escape(corner)}</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _entry(cell: Mapping[str, Any] | None, column: str, seeds: int, beside: bool) -> str:
    """Return a cell's mean and spread, the paper's number, and how many seeds it has if not all were run."""
    label = f"<td data-label='{escape(column)}'>"
    if cell is None:
        return f"{label}</td>"
    values = list(cell["values"].values())
    text = _mean(values) if values else "–" if seeds else escape(cell["paper"])
    paper = f"<small>paper: {escape(cell['paper'])}</small>" if cell["paper"] and beside and seeds else ""
    fewer = f"<small>{len(values)} of {seeds} seeds</small>" if 0 < len(values) < seeds else ""
    return f"{label}<span>{text}{fewer}{paper}</span></td>"


def _mean(values: Sequence[float | str]) -> str:
    """Return mean ± sample standard deviation; all numbers where some are bounds, since these have no mean."""
    if any(isinstance(value, str) for value in values):
        return ", ".join(value if isinstance(value, str) else f"{value:g}" for value in values)
    numbers = [float(value) for value in values]
    return f"{fmean(numbers):.1f}" + (f" ± {stdev(numbers):.1f}" if len(numbers) > 1 else "")
