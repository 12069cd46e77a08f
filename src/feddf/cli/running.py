"""``feddf run`` and ``resume``, and what a run looks like meanwhile: a live table, or lines without a terminal."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from feddf.cli.arguments import (
    AsJson,
    NameOrFile,
    Out,
    Overrides,
    Trust,
    argument,
    complain,
    out_console,
    remark,
    say,
    unused,
)
from feddf.cli.reporting import summary
from feddf.config.errors import FeddfError

if TYPE_CHECKING:
    from feddf.config import Experiment
    from feddf.config.records import Record
    from feddf.engines.open import Profile
    from feddf.runs.build import Parts
    from feddf.runs.store import RunFolder

MORE = "More rounds than before (rounds=20), or values that change no result, for instance workers=4."
CURVES = "curves.png"
STAGE_LABELS = {"train": "clients train", "fuse": "students learn", "evaluate": "models are tested", "save": "saved"}


def run(
    name_or_file: NameOrFile,
    overrides: Overrides = None,
    out: Out = None,
    trust: Trust = False,
    profile: Annotated[bool, typer.Option("--profile", help="Write a timeline that Perfetto opens.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment, for instance: feddf run demo alpha=1 seed=3"""
    from feddf.config import differences, load

    experiment = load(name_or_file, overrides or [])
    method = experiment.fusion.method.replace(":", ".")
    place = Path("runs") / f"{experiment.name}-{method}-seed{experiment.seed}"
    path = out or unused(place)
    private = experiment.privacy.level != "none"  # its noise is another every time
    if not (out or profile or private) and (equal := _equal_run(place, experiment)):
        remark(f"an equal run is finished, {equal}, and would be repeated bit for bit; --out FOLDER runs it again")
        summary([equal], as_json=as_json)
        return
    from feddf.engines.open import Profile
    from feddf.runs.build import build
    from feddf.runs.store import RunFolder, StoreError

    if (path / "config.toml").exists() and (changed := differences(RunFolder.open(path).experiment(), experiment)):
        raise StoreError(f"{path} holds a run with another configuration: {'; '.join(changed)}")
    parts = build(experiment, trust=trust)  # before the folder is made: a mistake leaves nothing behind
    timeline = Profile() if profile else None
    try:
        _finish(parts, RunFolder.create(path, experiment), timeline, as_json)
    finally:  # a run that was interrupted has a timeline too
        if timeline and path.is_dir():
            timeline.write(path / "trace.json")
            remark(f"timeline (open it in Perfetto): {path / 'trace.json'}")


def resume(
    run: Annotated[Path, argument(help="A run's folder.")],
    overrides: Annotated[list[str] | None, argument(metavar="[rounds=T] [KEY=VALUE]...", help=MORE)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse where the result could differ in a bit.")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Continue an interrupted run, or add rounds to a finished one.

    The models are those of a run that was never interrupted.
    """
    from feddf.config import parse
    from feddf.runs import build, store
    from feddf.runs.private import as_begun

    folder = store.RunFolder.open(run)
    folder.check_trust(trust)
    experiment = as_begun(run, parse(folder.experiment().model_dump(), overrides=overrides or []))
    check_versions(folder, experiment, strict)
    parts = build.build(experiment, trust=trust)
    warn(folder.continue_as(experiment))
    say_progress(folder, parts, as_json)
    _finish(parts, folder, None, as_json)


def _equal_run(place: Path, experiment: Experiment) -> Path | None:
    """Return the folder at (or numbered after) a place that holds this run, finished under the same versions."""
    from feddf.config import differences
    from feddf.runs.many import is_complete
    from feddf.runs.store import RunFolder, code_named_in, versions

    own = code_named_in(experiment)  # which may have changed
    for path in sorted(place.parent.glob("*/config.toml")):
        folder, named = RunFolder(path.parent), path.parent.name.startswith(place.name)
        with suppress(FeddfError):
            same = named and not own and folder.versions() == versions(experiment) and is_complete(folder.path)
            if same and not differences(folder.experiment(), experiment):
                return folder.path
    return None


def _finish(parts: Parts, folder: RunFolder, timeline: Profile | None, as_json: bool) -> None:
    """Run what is left of a run, and show its results."""
    run_to_the_end(parts, folder, timeline, quiet=as_json)
    curves = folder.path / CURVES  # there is one unless nothing was left to do
    summary([folder.path], None if curves.exists() else curves, as_json=as_json)
    if not as_json:
        say(f"learning curves: {curves}; card: {folder.path / 'README.md'}")


def warn(warnings: Sequence[str]) -> None:
    """Say warnings, a line each."""
    for warning in warnings:
        complain(warning)


def say_progress(folder: RunFolder, parts: Parts, quiet: bool) -> None:
    """Say how far a run is that is about to be continued, and what is damaged in its folder."""
    server, complaints = folder.latest(parts.server.models)
    warn([*complaints, *folder.damage()])
    if not quiet:
        say(f"{folder.path}: {server.round if server else 0} of {parts.experiment.rounds} rounds are done")


def check_versions(folder: RunFolder, experiment: Experiment, strict: bool) -> None:
    """Warn of other versions than those that a run was started under, or refuse them."""
    from feddf.runs.store import StoreError, versions

    then, now = {"device": "cpu", **folder.versions()}, versions(experiment)  # older runs knew no other device
    changed = [f"{key} {then.get(key, 'unknown')} -> {now[key]}" for key in now if then.get(key) != now[key]]
    if changed and strict:
        raise StoreError(f"{folder.path} was started under other versions ({', '.join(changed)}), refused by --strict")
    if changed:
        complain(f"bytes may differ: {', '.join(changed)}")


def run_to_the_end(
    parts: Parts, folder: RunFolder, timeline: Profile | None = None, *, title: str = "", again: str = "", quiet: bool,
    later: Callable[[float], float] = lambda a_round: 0.0,
) -> None:  # fmt: skip
    """Run what is left of a run, showing every round, and draw its curves.

    ``again`` is the command that goes on if it is stopped; ``later`` has the seconds of the runs to come, by a round's.
    """
    from feddf.config.keys import flat
    from feddf.report.read import method_name, read_run
    from feddf.runs.run import run_experiment
    from feddf.runs.store import versions

    experiment = parts.experiment
    warn(parts.warnings)
    console = Console(quiet=True) if quiet else out_console
    console.print(f"device: {versions(experiment)['device']}", soft_wrap=True)
    if parts.privacy:
        console.print(str(parts.privacy.plan), soft_wrap=True)
    title = title or f"{experiment.name}, {method_name(flat(experiment.model_dump()))}"
    metric, known = parts.task.train.outputs.metric, len(folder.records())
    view = View(f"{title}, seed {experiment.seed}", experiment.rounds, known, later, metric)
    live = Live(view, console=console, refresh_per_second=4) if console.is_terminal else nullcontext()
    try:
        with live:
            for record in run_experiment(parts, folder, view.watch, timeline, complain):
                line = view.add(record)
                if record["round"] >= experiment.rounds:  # before the card is written, which shows it
                    from feddf.report.plots import learning_curves  # matplotlib takes a second to load

                    learning_curves([read_run(folder.path)], folder.path / CURVES)
                if not console.is_terminal:
                    console.print(line, soft_wrap=True)
    except KeyboardInterrupt:
        again = again or f"feddf resume {shlex.quote(str(folder.path))}"
        remark(f"stopped; finished rounds are safe. Continue with: {again}")
        raise


class View:
    """The state of one run's display."""

    def __init__(self, title: str, rounds: int, done: int, later: Callable[[float], float], metric: str) -> None:
        self.title, self.rounds, self._later, self._metric = title, rounds, later, metric
        self._names: list[str] = []
        self._first, self._began = done, time.monotonic()
        self._rows: list[tuple[str, ...]] = []
        self._round = done + 1
        bar = TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[detail]}")
        self._progress = Progress(*bar)
        self._task = self._progress.add_task("starting", total=1, detail="")

    def watch(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` pieces of a stage's work are finished."""
        label = f"round {min(self._round, self.rounds)}/{self.rounds}: {STAGE_LABELS.get(stage, stage)}"
        detail = f"{done}/{total}  {self.seconds_left()}"
        self._progress.update(self._task, description=label, completed=done, total=max(total, 1), detail=detail)

    def add(self, record: Record) -> str:
        """Take a finished round in; return it as a plain line."""
        from feddf.report.read import Run
        from feddf.report.tables import percent

        run = Run(Path(), {}, [record])
        averaged, ensemble, fused = map(percent, [*run.curve(None, "averaged"), *run.ensemble(), *run.curve()])
        self._names = run.prototypes if len(run.prototypes) > 1 else []
        each = [percent(run.curve(name)[0]) for name in self._names]
        named = f" ({', '.join(map(' '.join, zip(self._names, each, strict=True)))})" if each else ""
        dropped = f" ({len(record['dropped'])} dropped)" if record["dropped"] else ""
        clients = f"{len(record['clients'])}{dropped}{' (guard)' if record.get('guard') else ''}"
        self._round = record["round"] + 1
        self._rows.append((str(record["round"]), clients, averaged, ensemble, fused, *each))
        self.watch("save", 1, 1)  # with the time left as it is now
        return (
            f"{self.title}: round {record['round']}/{self.rounds}, {clients} clients, averaged {averaged}, "
            f"ensemble {ensemble}, fused {fused}{named}, {self.seconds_left()}"
        )

    def seconds_left(self) -> str:
        """Return the time to the end of this run and of those after it, by the rounds done so far."""
        done = self._round - 1 - self._first
        if done < 1:
            return ""
        a_round = (time.monotonic() - self._began) / done
        left = a_round * (self.rounds - self._round + 1) + self._later(a_round)
        return f"{duration(left)} left"

    def __rich__(self) -> RenderableType:
        """Return the picture of the moment."""
        caption = f"test {self._metric} in %" + ("; averaged and fused: mean over prototypes" if self._names else "")
        table = Table(title=self.title, title_justify="left", caption=caption)
        for name in ("round", "clients", "averaged", "ensemble", "fused", *self._names):
            table.add_column(name, justify="right", min_width=8)
        for row in self._rows[-12:]:
            table.add_row(*row)
        return Group(table, self._progress)


def duration(seconds: float) -> str:
    """Return a time as one says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
