"""The pictures on the page of claims, as SVG in the page's own colors: bars of all means, and learning curves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from math import ceil, nan
from statistics import fmean, stdev
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from feddf.report.plots import COLORS, draw_curve, in_one_style

HATCHES = ("", "//", "..")
"""What tells bars apart once all colors are taken."""


@in_one_style()
def picture(draw: Callable[[], Figure], about: str) -> str:
    """Return a figure in the one style as SVG: black is the page's ink, white its paper, and letters are letters."""
    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw().savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    svg = text.getvalue()[text.getvalue().index("<svg") :].replace("#000000", "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    named = f"<svg role='img' aria-label='{escape(about)}'"
    return f"<figure>{svg.replace('<svg', named, 1)}</figure>"


def bars_of(cells: Sequence[Mapping[str, Any]], unit: str) -> str:
    """Return all means of an artifact as bars, if there are not too many to be told apart."""
    rows: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        numbers = [value for value in cell["values"].values() if not isinstance(value, str)]
        if numbers and len(numbers) == len(cell["values"]):  # a mean of bounds would say nothing
            rows.setdefault(cell["row"], {})[cell["column"]] = numbers
    if not rows or sum(map(len, rows.values())) > 40:
        return ""
    return picture(lambda: bars(rows, unit), f"bars: {unit}")


def bars(rows: Mapping[str, Mapping[str, Sequence[float]]], label: str) -> Figure:
    """Return a group of bars for each row, a color for each column, with ± one sample standard deviation over seeds.

    So the paper compares sources of unlabeled data (Figure 5).
    """
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    figure = Figure(figsize=(5.5, 3.8 + 0.18 * ceil(len(columns) / 2)), layout="constrained")
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
    figure.legend(loc="outside lower center", ncols=min(2, len(columns)))
    return figure


def curves_of(cells: Sequence[Mapping[str, Any]], data: str = "") -> str:
    """Return the learning curves of all cells as an SVG picture: the mean over seeds ± one standard deviation."""
    drawn = [cell for cell in cells if cell["curves"] and len(cell["curves"][0]["fused"]) > 1]
    return picture(lambda: _draw_curves(drawn, data), f"learning curves on {data}") if drawn else ""


def _draw_curves(drawn: Sequence[Mapping[str, Any]], data: str) -> Figure:
    figure = Figure(figsize=(5.5, 3.4 + 0.17 * ceil(len(drawn) / 2)), layout="constrained")
    axes = figure.subplots()
    for number, cell in enumerate(drawn):
        curves = [[nan if value is None else 100 * value for value in curve["fused"]] for curve in cell["curves"]]
        by_round = list(zip(*curves, strict=False))
        line, color = ["-", "--", ":", "-."][number // len(COLORS) % 4], COLORS[number % len(COLORS)]
        label = f"{cell['row']}, {cell['column']}"
        draw_curve(axes, range(1, len(by_round) + 1), by_round, line, color=color, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    several = any(len(cell["curves"]) > 1 for cell in drawn)
    axes.set(xlabel="communication round", ylabel=f"test accuracy in %, {data}".strip(", "))
    axes.set_title("mean over seeds, band ± 1 standard deviation" if several else "one seed")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    return figure
