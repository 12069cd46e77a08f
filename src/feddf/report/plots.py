"""Pictures of runs, drawn without a screen, all in one style: colors that the color-blind tell apart, units on every
axis, the number of seeds in the title, and a band that says what it is. The suffix decides: png, svg or pdf.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import ceil, isnan
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.collections import EllipseCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from feddf.config.keys import all_keys, short
from feddf.report.headline import PALETTE, colors_of, task_of, title_of
from feddf.report.read import Run, by_seed, differing, every_prototype, grouped, scores_of, seeds_of, setting
from feddf.runtime.atomic import write_atomically

COLORS = [light for light, _ in PALETTE]

STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "legend.frameon": False,
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.3, "grid.linewidth": 0.6,
    "lines.linewidth": 1.6, "lines.markersize": 3, "savefig.dpi": 150,
    "pdf.fonttype": 42,  # letters stay letters: journals ask for it
    "svg.hashsalt": "feddf",  # the same picture has the same bytes
}  # fmt: skip


in_one_style = partial(matplotlib.rc_context, STYLE)
"""Lets a block, or a function that this decorates, draw in the one style."""


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the file's name says; equal figures are equal bytes."""
    kind, content = path.suffix[1:].lower(), io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with warnings.catch_warnings(action="ignore"):  # they show the characters of names that a font lacks
        figure.savefig(content, format=kind, metadata=undated.get(kind))
    write_atomically(path, content.getvalue())


def draw_curve(axes: Any, x: Sequence[float], y: Sequence[Sequence[float]], line: str = "-o", **look: Any) -> None:
    """Draw the mean of the percentages at each place, in a band of ± one sample standard deviation (n − 1).

    All curves are drawn here, so that a band means the same everywhere; a curve of single values has none.
    """
    means = [fmean(values) for values in y]
    axes.plot(x, means, line, **look)
    if max(map(len, y)) > 1:
        deviations = [float(np.std(values, ddof=1)) if len(values) > 1 else 0.0 for values in y]  # stdev fails on NaN
        low, high = np.clip([np.subtract(means, deviations), np.add(means, deviations)], min(0.0, *means), 100)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _finish(figure: Figure, axes: Any, label: str, path: Path) -> None:
    """Let the (shared) y axis show what was measured, and no accuracy that cannot be; add the legend, and save."""
    low, high = axes.get_ylim()
    low = low if low < -10 else max(0.0, low)  # R² can be below zero, by more than a margin
    axes.set(ylim=(low, min(100.0, high)), ylabel=label)
    if handles := axes.get_legend_handles_labels()[0]:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)))
    save_figure(figure, path)


def _panels(runs: Sequence[Run]) -> tuple[Figure, dict[str, Any]]:
    """Return a figure about runs, and its panels by the prototype that each is for: three a row, with one y axis."""
    names = every_prototype(runs)
    columns, many = min(len(names), 3), len({run.seed for run in runs})
    rows = ceil(len(names) / columns)
    figure = Figure(figsize=(max(5.5, 3.2 * columns), 1.4 + 2.7 * rows), layout="constrained")
    grid = np.ravel(figure.subplots(rows, columns, sharey=True, squeeze=False))
    panels = dict(zip(names, grid, strict=False))
    for name, axes in panels.items():
        axes.set(title=name)
    for axes in grid[len(names) :]:
        axes.axis("off")
    seeds = f"mean of n = {many} seeds, band ± 1 standard deviation" if many > 1 else seeds_of(runs)
    figure.suptitle(fill(", ".join([*task_of(runs), seeds]), int(13 * figure.get_figwidth())), fontsize=9)
    return figure, panels


@in_one_style()
def learning_curves(runs: Sequence[Run], path: Path) -> None:
    """Draw test accuracy by round: a panel for each prototype, a color for each method.

    The fused models are solid lines, the averaged ones that they began from dashed, the ensemble dotted; the band is
    ± one sample standard deviation over the seeds that have done the round.
    """
    keys, longest = differing(runs, ["task"]), max(len(run.records) for run in runs)
    # a method, and what else differs among its runs
    by_label = grouped(runs, lambda run: ", ".join(filter(None, [run.method, setting(run, keys)])))
    colors, (figure, panels) = colors_of(map(title_of, by_label)), _panels(runs)
    for name, axes in panels.items():
        for label, found in by_label.items():
            mine = [run for run in by_seed(found).values() if name in run.prototypes]
            _draw_method(axes, mine, name, colors[title_of(label)][0], label)
        axes.set(xlabel="communication round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if longest < 3:
            axes.set_xlim(0.5, longest + 0.5)
    _finish(figure, next(iter(panels.values())), f"test {scores_of(runs)} in %", path)


def _draw_method(axes: Any, runs: Sequence[Run], name: str, color: str, label: str) -> None:
    """Draw one prototype under one method: fused, with a band; averaged, where that differs; and the ensemble."""
    fused, averaged = [run.curve(name) for run in runs], [run.curve(name, "averaged") for run in runs]
    lines = [
        ("-o", label, fused),
        ("--", f"{label}, averaged", averaged if averaged != fused else []),
        (":", f"{label}, ensemble", [run.ensemble() for run in runs]),
    ]
    for line, told, curves in lines:
        longest = max(map(len, curves), default=0)
        by_round = [[100 * curve[i] for curve in curves if i < len(curve)] for i in range(longest)]
        y, width = (by_round, 1.8) if told == label else ([[fmean(values)] for values in by_round], 1.0)
        if not all(isnan(value) for values in y for value in values):
            draw_curve(axes, range(1, len(y) + 1), y, line, color=color, label=told, linewidth=width)


@in_one_style()
def sweep(runs: Sequence[Run], name: str, path: Path) -> None:
    """Draw the last common round's test accuracy against one key: a panel for each prototype, a line for each method.

    So the paper shows accuracy against local epochs (Figure 2) and against α.
    """
    last, every = min(len(run.records) for run in runs), sorted({float(run.value(name)) for run in runs})
    by_method = grouped(runs, lambda run: replace(run, usual={*run.usual, name}).method)
    colors, (figure, panels) = colors_of(map(title_of, by_method)), _panels(runs)
    for prototype, axes in panels.items():
        for method, found in by_method.items():
            mine = grouped((run for run in found if prototype in run.prototypes), lambda run: str(run.value(name)))
            if places := sorted(mine, key=float):
                y = [[100 * run.curve(prototype)[last - 1] for run in by_seed(mine[one]).values()] for one in places]
                color = colors[title_of(method)][0]
                draw_curve(axes, [float(one) for one in places], y, color=color, label=method)
        if every[0] > 0 and every[-1] / every[0] >= 10:
            axes.set_xscale("log")
        axes.set_xticks(every, [f"{value:g}" for value in every])
        axes.minorticks_off()
    figure.supxlabel(f"{short(name)} ({all_keys()[name].meaning})", fontsize=9)
    _finish(figure, next(iter(panels.values())), f"test {scores_of(runs)} in % after round {last}", path)


@in_one_style()
def partition_dots(
    panels: Sequence[tuple[str, NDArray[np.int64]]], path: Path, classes: Sequence[str] = (), unit: str = "class"
) -> None:
    """Draw who holds what: a dot for every client and class (or group), its area proportional to the examples' number.

    One panel for each ``(title, clients × classes counts)``, as in the paper's Figures 2 and 9. The largest dot of all
    panels just fills its cell.
    """
    n_clients, n_classes = panels[0][1].shape
    names = list(classes) or [str(one) for one in range(n_classes)]
    cell = min(max(0.3, 3 / n_clients), 5 / max(n_clients, n_classes))  # inches
    wide = 0.5 + 0.07 * max(map(len, names)) + len(panels) * (cell * (n_clients + 0.4) + 0.25)
    figure = Figure(figsize=(wide, cell * (n_classes + 0.4) + 1.3), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    most = max(int(counts.max()) for _, counts in panels)
    for axes, color, (title, counts) in zip(grid, cycle(COLORS), panels, strict=False):
        held = np.argwhere(counts)
        diameters = 0.95 * np.sqrt(counts[held[:, 0], held[:, 1]] / most)
        place = {"units": "xy", "offsets": held, "transOffset": axes.transData}
        axes.add_collection(EllipseCollection(diameters, diameters, np.zeros(len(held)), facecolor=color, **place))
        axes.set(xlim=(-0.7, n_clients - 0.3), ylim=(-0.7, n_classes - 0.3), aspect="equal", axisbelow=True)
        axes.set(title=title, xlabel="client")
        _whole_ticks(axes.xaxis, [str(client) for client in range(n_clients)])
    _whole_ticks(grid[0].yaxis, names)
    grid[0].set_ylabel(unit)
    figure.supxlabel(f"area of a dot: number of examples; the largest is {most}", fontsize=8)
    save_figure(figure, path)


@in_one_style()
def roc_curves(curves: Mapping[str, tuple[Any, Any]], epsilon: float, path: Path) -> None:
    """Draw attacks' true positive rates by false ones, on scales on which few false ones can be seen."""
    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axes, chance = figure.subplots(), np.geomspace(1e-4, 1, 50)
    for color, (name, rates) in zip(cycle(COLORS), curves.items(), strict=False):
        axes.step(*(np.maximum(np.asarray(one), 1e-4) for one in rates), where="post", color=color, label=name)
    axes.plot(chance, np.minimum(1, np.exp(epsilon) * chance), "k--", linewidth=1, label=f"most at ε = {epsilon:.3g}")
    axes.plot(chance, chance, "k:", linewidth=1, label="chance")
    axes.loglog()
    axes.set(xlabel="false positive rate", ylabel="true positive rate", xlim=(1e-4, 1), ylim=(1e-4, 1), aspect="equal")
    axes.legend(loc="lower right")
    save_figure(figure, path)


def _whole_ticks(axis: Any, names: Sequence[str], most: int = 25) -> None:
    """Name every place, or as many as can be read."""
    step = ceil(len(names) / most)
    axis.set_ticks(range(0, len(names), step), names[::step])
