"""Pictures of runs, drawn without a screen, all in one style: colors that the color-blind tell apart, units on every
axis, the number of seeds in the title, and a band that says what it is. The suffix decides: png, svg or pdf.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import wraps
from math import ceil, isnan
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import Any, Literal, ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.collections import EllipseCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from feddf.config.errors import ConfigError
from feddf.config.keys import all_keys, short
from feddf.report.read import Run, differing, setting
from feddf.report.tables import percent
from feddf.runtime.atomic import write_atomically

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F"]
"""Okabe and Ito's palette, in an order that keeps neighbors apart."""

FORMATS = ("png", "svg", "pdf")
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 150,
    "pdf.fonttype": 42,  # letters stay letters: journals ask for it
    "svg.hashsalt": "feddf",  # the same picture has the same bytes
}

P = ParamSpec("P")
R = TypeVar("R")
Which = Literal["averaged", "fused"]


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Let a function draw in the one style."""

    @wraps(draw)
    def inside(*args: P.args, **rest: P.kwargs) -> R:
        with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
            return draw(*args, **rest)

    return inside


def check_format(path: Path) -> None:
    """Refuse a picture's name with a suffix that cannot be drawn."""
    if path.suffix.lstrip(".").lower() not in FORMATS:
        raise ConfigError.at("--out", str(path), f"a picture's name must end in .{', .'.join(FORMATS)}")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the file's name says; equal figures are equal bytes."""
    check_format(path)
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:].lower())
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), metadata=dated)
    write_atomically(path, content.getvalue())


@styled
def learning_curves(runs: Sequence[Run], path: Path) -> None:
    """Draw test accuracy by round: a panel for each prototype, a color for each method.

    The fused models are solid lines, the averaged ones that they began from dashed, the ensemble dotted; the band is
    ± one sample standard deviation over the seeds.
    """
    labels = _labels(runs)
    names = runs[0].prototypes
    columns = min(len(names), 3)
    rows = ceil(len(names) / columns)
    figure = Figure(figsize=(max(5.5, 3.2 * columns), 1.4 + 2.7 * rows), layout="constrained")
    grid = np.ravel(figure.subplots(rows, columns, sharey=True, squeeze=False))
    for axes, name in zip(grid, names, strict=False):
        for color, label in zip(COLORS * len(labels), dict.fromkeys(labels), strict=False):
            mine = [run for run, own in zip(runs, labels, strict=True) if own == label and run.records]
            _lines(axes, mine, name, color, label)
        axes.set(title=name, xlabel="communication round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        longest = max(len(run.records) for run in runs)
        axes.set_xlim(0.5, max(longest, 1) + 0.5) if longest < 3 else None
    _fit(list(grid[: len(names)]), "test accuracy in %")
    for axes in grid[len(names) :]:
        axes.axis("off")
    _legend(figure, grid[0])
    figure.suptitle(fill(_title(runs), int(13 * figure.get_figwidth())), fontsize=9)
    save_figure(figure, path)


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run: its method, and what else differs among runs of one method."""
    keys = differing(runs, ["task"])
    settings = [setting(run, keys) for run in runs]
    return [f"{run.method}, {extra}" if extra else run.method for run, extra in zip(runs, settings, strict=True)]


def _lines(axes: Any, runs: Sequence[Run], name: str, color: str, label: str) -> None:
    fused, averaged = ([run.curve(name, which) for run in runs] for which in _WHICH)
    _line(axes, fused, "-", color, label)
    if any(a != b for one, other in zip(fused, averaged, strict=True) for a, b in zip(one, other, strict=True)):
        _line(axes, averaged, "--", color, f"{label}, averaged", faint=True)
    _line(axes, [run.ensemble() for run in runs], ":", color, f"{label}, ensemble", faint=True)


_WHICH: tuple[Which, Which] = ("fused", "averaged")


def _line(
    axes: Any, curves: Sequence[Sequence[float]], style: str, color: str, label: str, faint: bool = False
) -> None:
    if not curves or all(isnan(value) for curve in curves for value in curve):
        return
    length = min(len(curve) for curve in curves)
    by_round = [[100 * curve[i] for curve in curves] for i in range(length)]
    mean, rounds = [fmean(one) for one in by_round], range(1, length + 1)
    axes.plot(
        rounds, mean, style, color=color, label=label, marker="" if faint else "o", linewidth=1.0 if faint else 1.8
    )
    if len(curves) > 1 and not faint:
        _band(axes, rounds, by_round, color)


def _band(axes: Any, places: Sequence[float], values: Sequence[Sequence[float]], color: str) -> None:
    """Draw ± one sample standard deviation around the mean."""
    means, deviations = [fmean(one) for one in values], [stdev(one) if len(one) > 1 else 0.0 for one in values]
    low = [max(0.0, mean - deviation) for mean, deviation in zip(means, deviations, strict=True)]
    high = [min(100.0, mean + deviation) for mean, deviation in zip(means, deviations, strict=True)]
    axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)


def _fit(panels: Sequence[Any], label: str) -> None:
    """Let the shared y axis show what was measured, and no accuracy that cannot be."""
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(max(0.0, low), min(100.0, high))
    panels[0].set_ylabel(label)


def _legend(figure: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(handles)))


def _title(runs: Sequence[Run]) -> str:
    run, other = runs[0], set(differing(runs))
    seeds = sorted({run.seed for run in runs})
    data, skew = run.value("data.name"), str(run.value("partition.scheme"))
    if skew == "dirichlet":
        skew = f"α = {run.value('partition.alpha'):g}"
    parts = [
        str(data),
        "" if "clients.total" in other else f"{run.value('clients.total')} clients",
        "" if "clients.fraction" in other else f"C = {run.value('clients.fraction'):g}",
        "" if other & {"partition.alpha", "partition.scheme"} else skew,
    ]
    if run.over_flower:
        parts = [str(run.value("name")), "over Flower"]
    many = f"mean of n = {len(seeds)} seeds, band ± 1 standard deviation"
    return ", ".join([*filter(None, parts), many if len(seeds) > 1 else f"seed {seeds[0]}"])


@styled
def sweep(runs: Sequence[Run], name: str, path: Path) -> None:
    """Draw the last common round's test accuracy, the mean over prototypes, against one key: a line for each method.

    So the paper shows accuracy against local epochs (Figure 2) and against α.
    """
    last = min(len(run.records) for run in runs)
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    axes = figure.subplots()
    methods = dict.fromkeys(_method_besides(run, name) for run in runs)
    for color, method in zip(COLORS * len(methods), methods, strict=False):
        points: dict[float, list[float]] = {}
        for run in runs:
            if _method_besides(run, name) == method:
                points.setdefault(float(run.value(name)), []).append(100 * run.curve()[last - 1])
        places = sorted(points)
        values = [points[place] for place in places]
        axes.plot(places, [fmean(one) for one in values], "-o", color=color, label=method)
        _band(axes, places, values, color)
    every = sorted({float(run.value(name)) for run in runs})
    if every[0] > 0 and every[-1] / every[0] >= 10:
        axes.set_xscale("log")
    axes.set_xticks(every, [f"{value:g}" for value in every])
    axes.minorticks_off()
    axes.set_xlabel(f"{short(name)} ({all_keys()[name].meaning})")
    _fit([axes], f"test accuracy in % after round {last}")
    _legend(figure, axes)
    axes.set_title(fill(_title(runs), 70))
    save_figure(figure, path)


def _method_besides(run: Run, name: str) -> str:
    return Run(run.path, {key: value for key, value in run.config.items() if key != name}, run.records).method


@styled
def decision_regions(
    panels: Sequence[tuple[str, float, NDArray[np.float32]]],
    shards: Sequence[tuple[str, NDArray[np.float32], NDArray[np.int64]]],
    pool: NDArray[np.float32] | None,
    path: Path,
    extent: float = 3.0,
) -> None:
    """Draw the paper's Figure 1: data in the top row, class probabilities as colors in the bottom row.

    A panel is (title, accuracy, H×W×3 probabilities); a shard is (title, N×2 points, N labels).
    """
    columns = max(len(panels), len(shards) + 1)
    palette = np.array([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in COLORS[:3]])
    figure = Figure(figsize=(2.2 * columns, 5), layout="constrained")
    grid = figure.subplots(2, columns)
    for axes in grid.flat:
        axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", xticks=[], yticks=[])
    for axes, (title, points, labels) in zip(grid[0], shards, strict=False):
        axes.scatter(points[:, 0], points[:, 1], c=palette[labels], s=5)
        axes.set_title(title)
    used = len(shards)
    if pool is not None:
        grid[0][used].scatter(pool[:, 0], pool[:, 1], c="gray", s=6)
        grid[0][used].set_title(f"unlabeled pool ({len(pool)})")
        used += 1
    for axes in [*grid[0][used:], *grid[1][len(panels) :]]:
        axes.axis("off")
    for axes, (title, accuracy, image) in zip(grid[1], panels, strict=False):
        mixed = np.clip(image @ palette, 0, 1)  # a class is its color, a doubt the mixture
        axes.imshow(mixed, origin="lower", extent=(-extent, extent, -extent, extent), interpolation="bilinear")
        axes.set_title(f"{title}\n{percent(accuracy)} % on all data")
    save_figure(figure, path)


@styled
def partition_dots(panels: Sequence[tuple[str, NDArray[np.int64]]], path: Path, classes: Sequence[str] = ()) -> None:
    """Draw who holds what: a dot for every client and class, its area proportional to the number of examples.

    One panel for each ``(title, clients × classes counts)``, as in the paper's Figures 2 and 9. The largest dot of all
    panels just fills its cell.
    """
    n_clients, n_classes = panels[0][1].shape
    names = list(classes) or [str(one) for one in range(n_classes)]
    cell = min(max(0.3, 3 / n_clients), 5 / max(n_clients, n_classes))  # inches, as all lengths here
    wide, high = cell * (n_clients + 0.4), cell * (n_classes + 0.4)
    left, below, above, between = 0.5 + 0.07 * max(map(len, names)), 0.75, 0.35, 0.25
    total = left + len(panels) * (wide + between), below + high + above
    figure = Figure(figsize=total)
    most = max(int(counts.max()) for _, counts in panels)
    drawn = [
        figure.add_axes(
            ((left + number * (wide + between)) / total[0], below / total[1], wide / total[0], high / total[1])
        )
        for number in range(len(panels))
    ]
    for number, (axes, (title, counts)) in enumerate(zip(drawn, panels, strict=True)):
        held = np.argwhere(counts)
        diameters = 0.95 * np.sqrt(counts[held[:, 0], held[:, 1]] / most)
        dots = EllipseCollection(
            diameters, diameters, np.zeros(len(held)), units="xy", offsets=held, transOffset=axes.transData,
            facecolor=COLORS[number % len(COLORS)],
        )  # fmt: skip
        axes.add_collection(dots)
        axes.set(xlim=(-0.7, n_clients - 0.3), ylim=(-0.7, n_classes - 0.3))
        axes.set(title=title, xlabel="client", ylabel="class" if number == 0 else "")
        _whole_ticks(axes.xaxis, [str(client) for client in range(n_clients)])
        _whole_ticks(axes.yaxis, names if number == 0 else [""] * n_classes)
        axes.set_axisbelow(True)
    figure.text(0.5, 0.1 / total[1], f"area of a dot: number of examples; the largest is {most}", ha="center", size=8)
    save_figure(figure, path)


def _whole_ticks(axis: Any, names: Sequence[str], most: int = 25) -> None:
    """Name every place, or as many as can be read."""
    step = ceil(len(names) / most)
    axis.set_ticks(range(0, len(names), step), names[::step])
