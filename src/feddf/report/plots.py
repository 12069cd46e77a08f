"""Pictures of runs, drawn without a screen."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from feddf.report.read import Run
from feddf.report.tables import percent

COLOURS = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
STYLES = ["--", "-", ":", "-."]


def learning_curves(runs: Sequence[Run], path: Path) -> None:
    """Draw test accuracy by round: a colour a prototype, a line style a method; the mean over seeds."""
    methods = list(dict.fromkeys(run.method for run in runs))
    names = runs[0].prototypes
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for style, method in zip(STYLES * len(methods), methods, strict=False):
        mine = [run for run in runs if run.method == method and run.records]
        for colour, name in zip(COLOURS, names, strict=False):
            _line(axes, [run.curve(name) for run in mine], style, colour, f"{method}, {name}")
        _line(axes, [run.ensemble() for run in mine], style, (0.6, 0.6, 0.6), f"{method}, ensemble")
    axes.set(xlabel="communication round", ylabel="test accuracy in %", ylim=(0, 100))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=len(methods), loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.set_title(_title(runs))
    figure.savefig(path, dpi=120)


def _line(axes: object, curves: Sequence[Sequence[float]], style: str, colour: object, label: str) -> None:
    if not curves or all(isnan(value) for curve in curves for value in curve):
        return
    length = min(len(curve) for curve in curves)
    mean = [100 * fmean(curve[i] for curve in curves) for i in range(length)]
    axes.plot(range(1, length + 1), mean, style, color=colour, label=label, marker="o", markersize=3)  # type: ignore[attr-defined]


def _title(runs: Sequence[Run]) -> str:
    run = runs[0]
    seeds = sorted({run.seed for run in runs})
    data, skew = run.value("data.name"), str(run.value("partition.scheme"))
    if skew == "dirichlet":
        skew = f"α = {run.value('partition.alpha'):g}"
    if run.over_flower:
        data, skew = run.value("name"), "over Flower"
    mean = f", mean of {len(seeds)} seeds" if len(seeds) > 1 else f", seed {seeds[0]}"
    clients, fraction = run.value("clients.number"), run.value("clients.fraction")
    return f"{data}, {clients} clients, C = {fraction:g}, {skew}{mean}"


def decision_regions(
    panels: Sequence[tuple[str, float, NDArray[np.float32]]],
    shards: Sequence[tuple[str, NDArray[np.float32], NDArray[np.int64]]],
    pool: NDArray[np.float32] | None,
    path: Path,
    extent: float = 3.0,
) -> None:
    """Draw the paper's Figure 1: data in the top row, class probabilities as colours in the bottom row.

    A panel is (title, accuracy, H×W×3 probabilities); a shard is (title, N×2 points, N labels).
    """
    columns = max(len(panels), len(shards) + 1)
    figure = Figure(figsize=(2.7 * columns, 6), layout="constrained")
    grid = figure.subplots(2, columns)
    for axes in grid.flat:
        axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", xticks=[], yticks=[])
    for axes, (title, points, labels) in zip(grid[0], shards, strict=False):
        colours = np.eye(3)[labels] * 0.85
        axes.scatter(points[:, 0], points[:, 1], c=colours, s=6)
        axes.set_title(title)
    used = len(shards)
    if pool is not None:
        grid[0][used].scatter(pool[:, 0], pool[:, 1], c="grey", s=8)
        grid[0][used].set_title(f"unlabeled pool ({len(pool)})")
        used += 1
    for axes in [*grid[0][used:], *grid[1][len(panels) :]]:
        axes.axis("off")
    for axes, (title, accuracy, image) in zip(grid[1], panels, strict=False):
        axes.imshow(image, origin="lower", extent=(-extent, extent, -extent, extent), interpolation="bilinear")
        axes.set_title(f"{title}\n{percent(accuracy)} % on all data")
    figure.savefig(path, dpi=120)


def partition_dots(panels: Sequence[tuple[str, NDArray[np.int64]]], path: Path) -> None:
    """Draw who holds what: a dot for every client and class, its area proportional to the number of examples.

    One panel for each ``(title, clients × classes counts)``, as in the paper's Figures 2 and 9.
    """
    figure = Figure(figsize=(4.5 * len(panels), 5), layout="constrained")
    most = max(int(counts.max()) for _, counts in panels)
    for axes, (title, counts) in zip(np.ravel(figure.subplots(1, len(panels))), panels, strict=True):
        clients, classes = np.nonzero(counts)
        cell = 280 / max(counts.shape)  # points; the largest dot of all panels is two cells wide
        axes.scatter(clients, classes, s=(2 * cell) ** 2 * counts[clients, classes] / most, color=COLOURS[3], alpha=0.8)
        axes.set(title=title, xlabel="client", ylabel="class", xlim=(-1, len(counts)), ylim=(-1, counts.shape[1]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def heat_map(
    values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], title: str, path: Path
) -> None:
    """Draw accuracies (0 to 1) as a table of colours with the numbers in it."""
    numbers = 100 * np.array(values, dtype=float)
    figure = Figure(figsize=(2 + 1.2 * len(columns), 1.6 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(numbers, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(columns)), columns, fontsize="small")
    axes.set_yticks(range(len(rows)), rows, fontsize="small")
    for (row, column), value in np.ndenumerate(numbers):
        if not isnan(value):
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize="small")
    axes.set_title(title, fontsize="small")
    figure.savefig(path, dpi=120)
