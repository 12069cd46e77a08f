"""What a run looks like while it goes on: a table of rounds with a progress line, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from feddf.config.records import Record
from feddf.report.read import ensemble_accuracy
from feddf.report.tables import percent

STAGE_LABELS = {
    "train": "clients train",
    "fuse": "teachers answer, students learn",
    "evaluate": "models are tested",
    "save": "saved",
}
ROWS = 12


class View:
    """The state of one run's display."""

    def __init__(self, title: str, rounds: int, done: int) -> None:
        self.title, self.rounds = title, rounds
        self._first, self._began = done, time.monotonic()
        self._rows: list[tuple[str, ...]] = []
        self._round = done + 1
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[detail]}")
        )
        self._task = self._progress.add_task("starting", total=1, detail="")

    def watch(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` pieces of a stage's work are finished."""
        label = f"round {min(self._round, self.rounds)}/{self.rounds}: {STAGE_LABELS.get(stage, stage)}"
        detail = f"{done}/{total}  {self.seconds_left()}"
        self._progress.update(self._task, description=label, completed=done, total=max(total, 1), detail=detail)

    def add(self, record: Record) -> str:
        """Take a finished round in; return it as a plain line."""
        models = record["models"].values()
        averaged, fused = (mean([model["averaged"] for model in models]), mean([model["fused"] for model in models]))
        found = ensemble_accuracy(record)
        ensemble = percent(found) if found is not None else "–"
        dropped = f" ({len(record['dropped'])} dropped)" if record["dropped"] else ""
        guarded = " (guard)" if record.get("guard") else ""
        clients = f"{len(record['clients'])}{dropped}{guarded}"
        self._round = record["round"] + 1
        self._rows.append((str(record["round"]), clients, percent(averaged), ensemble, percent(fused)))
        self.watch("save", 1, 1)  # with the time left as it is now
        return (
            f"{self.title}: round {record['round']}/{self.rounds}, {clients} clients, averaged {percent(averaged)}, "
            f"ensemble {ensemble}, fused {percent(fused)}, {self.seconds_left()}"
        )

    def seconds_left(self) -> str:
        """Return the time to the end of this run, by the rounds done so far."""
        done = self._round - 1 - self._first
        if done < 1:
            return ""
        left = (time.monotonic() - self._began) / done * (self.rounds - self._round + 1)
        return f"{left:.0f} s left"

    def __rich__(self) -> RenderableType:
        """Return the picture of the moment."""
        table = Table(title=self.title, title_justify="left", caption="test accuracy in %, mean over prototypes")
        for column in ("round", "clients", "averaged", "ensemble", "fused"):
            table.add_column(column, justify="right", min_width=9)
        for row in self._rows[-ROWS:]:
            table.add_row(*row)
        return Group(table, self._progress)


@contextmanager
def displayed(view: View, console: Console) -> Iterator[None]:
    """Show the view while the block runs, if there is a terminal to show it on."""
    if not console.is_terminal:
        yield
        return
    with Live(view, console=console, refresh_per_second=4, transient=False):
        yield


def follow(records: Iterable[Record], view: View, console: Console) -> None:
    """Run to the end, showing every round."""
    with displayed(view, console):
        for record in records:
            line = view.add(record)
            if not console.is_terminal:
                console.print(line, soft_wrap=True, highlight=False)


def mean(values: list[float | None]) -> float:
    """Return the mean, or not a number where a value is unknown."""
    return fmean(float("nan") if value is None else value for value in values)
