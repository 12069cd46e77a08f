"""``feddf run`` and ``resume``, and what a run looks like meanwhile: a line a round, and a bar in a terminal."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn

from feddf.cli.arguments import NameOrFile, Out, Overrides, Trust, argument, complain, out_console, remark, say
from feddf.cli.reporting import summary
from feddf.config import Experiment, differences, load, parse
from feddf.config.keys import flat
from feddf.config.records import Record
from feddf.report.read import Run, method_name
from feddf.report.tables import percent

if TYPE_CHECKING:
    from feddf.engines.open import Profile
    from feddf.runs.build import Parts
    from feddf.runs.store import RunFolder

MORE = "More rounds than before (rounds=20), or values that change no result, for instance workers=4."
STAGE_LABELS = {"train": "clients train", "fuse": "students learn", "evaluate": "models are tested"}


def run(
    name_or_file: NameOrFile,
    overrides: Overrides = None,
    out: Out = None,
    trust: Trust = False,
    profile: Annotated[bool, typer.Option("--profile", help="Write a timeline that Perfetto opens.")] = False,
) -> None:
    """Run an experiment, for instance: feddf run demo alpha=1 seed=3"""
    from feddf.engines.open import Profile
    from feddf.runs.build import build
    from feddf.runs.many import equal_folder, is_complete, unused
    from feddf.runs.store import RunFolder, StoreError

    experiment = load(name_or_file, overrides or [])
    method = experiment.fusion.method.replace(":", ".")
    place = Path("runs") / f"{experiment.name}-{method}-seed{experiment.seed}"
    private = experiment.privacy.level != "none"  # its noise is another every time
    equal = None if out or profile or private else equal_folder(place, {"": experiment}, is_complete)
    if equal:
        remark(f"an equal run is finished, {equal}, and would be repeated bit for bit; --out FOLDER runs it again")
        _show(equal)
        return
    path = out or unused(place)
    if (path / "config.toml").exists() and (changed := differences(RunFolder.open(path).experiment(), experiment)):
        raise StoreError(f"{path} holds a run with another configuration: {'; '.join(changed)}")
    parts = build(experiment, trust=trust)  # before the folder is made: a mistake leaves nothing behind
    timeline = Profile() if profile else None
    try:
        run_to_the_end(parts, RunFolder.create(path, experiment), timeline)
        _show(path)
    finally:  # a run that was interrupted has a timeline too
        if timeline and path.is_dir():
            timeline.write(path / "trace.json")
            remark(f"timeline (open it in Perfetto): {path / 'trace.json'}")


def resume(
    run: Annotated[Path, argument(help="A run's folder.")],
    overrides: Annotated[list[str] | None, argument(metavar="[rounds=T] [KEY=VALUE]...", help=MORE)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse where the result could differ in a bit.")] = False,
    trust: Trust = False,
) -> None:
    """Continue an interrupted run, or add rounds to a finished one.

    The models are those of a run that was never interrupted.
    """
    from feddf.runs import build, store
    from feddf.runs.private import as_begun

    folder = store.RunFolder.open(run)
    folder.check_trust(trust)
    experiment = as_begun(run, parse(folder.experiment().model_dump(), overrides=overrides or []))
    check_versions(folder, experiment, strict)
    parts = build.build(experiment, trust=trust)
    warn(*folder.continue_as(experiment))
    say_progress(folder, parts)
    run_to_the_end(parts, folder)
    _show(folder.path)


def _show(path: Path) -> None:
    """Show the results of a finished run."""
    summary([path])
    say(f"learning curves: {path / 'curves.png'}; card: {path / 'README.md'}")


def warn(*warnings: str) -> None:
    """Say warnings, a line each."""
    for warning in warnings:
        complain(warning)


def say_progress(folder: RunFolder, parts: Parts) -> None:
    """Say how far a run is that is about to be continued, and what is damaged in its folder."""
    server, complaints = folder.latest(parts.server.models)
    warn(*complaints, *folder.damage())
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
    parts: Parts, folder: RunFolder, timeline: Profile | None = None, *, title: str = "", again: str = "",
    later: Callable[[float], float] = lambda a_round: 0.0,
) -> None:  # fmt: skip
    """Run what is left of a run, showing every round.

    ``again`` is the command that goes on if it is stopped; ``later`` has the seconds of the runs to come, by a round's.
    """
    from feddf.runs.run import run_experiment
    from feddf.runs.store import versions

    experiment = parts.experiment
    warn(*parts.warnings)
    metric, device = parts.task.train.outputs.metric, versions(experiment)["device"]
    means = ", mean over the prototypes (each of them)" if len(parts.prototypes) > 1 else ""
    say(f"device: {device}; test {metric} in %{means}")
    if parts.privacy:
        say(str(parts.privacy.plan))
    title = title or f"{experiment.name}, {method_name(flat(experiment.model_dump()))}"
    view = View(f"{title}, seed {experiment.seed}", experiment.rounds, len(folder.records()), later)
    try:
        with view.progress:
            for record in run_experiment(parts, folder, view.watch, timeline, complain):
                view.add(record)
    except KeyboardInterrupt:
        again = again or f"feddf resume {shlex.quote(str(folder.path))}"
        remark(f"stopped; finished rounds are safe. Continue with: {again}")
        raise


class View:
    """What a run looks like: a line for each finished round, and below them, in a terminal, how far the next one is."""

    def __init__(self, title: str, rounds: int, done: int, later: Callable[[float], float]) -> None:
        self.title, self.rounds, self._later = title, rounds, later
        self._first, self._round, self._began = done, done + 1, time.monotonic()
        columns = TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[detail]}")
        self.progress = Progress(*columns, console=out_console, transient=True, disable=not out_console.is_terminal)
        self._task = self.progress.add_task("starting", total=1, detail="")

    def watch(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` pieces of a stage's work are finished."""
        label = f"round {min(self._round, self.rounds)}/{self.rounds}: {STAGE_LABELS.get(stage, stage)}"
        detail = f"{done}/{total}  {self.seconds_left()}"
        self.progress.update(self._task, description=label, completed=done, total=max(total, 1), detail=detail)

    def add(self, record: Record) -> None:
        """Take a finished round in, and print it as a line."""
        run, number = Run(Path(), {}, [record]), record["round"]
        averaged, ensemble, fused = map(percent, [*run.curve(None, "averaged"), *run.ensemble(), *run.curve()])
        each = ", ".join(f"{name} {percent(run.curve(name)[0])}" for name in run.prototypes)
        named = f" ({each})" if len(run.prototypes) > 1 else ""
        dropped = f" ({len(record['dropped'])} dropped)" if record["dropped"] else ""
        clients = f"{len(record['clients'])}{dropped}{' (guard)' if record.get('guard') else ''}"
        self._round = number + 1
        say(
            f"{self.title}: round {number}/{self.rounds}, {clients} clients, averaged {averaged}, "
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


def duration(seconds: float) -> str:
    """Return a time as one says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
