"""The command line: ``feddf run``, ``resume``, ``compare``, ``tune``, ``report``, ``bound`` and ``presets``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from feddf.runtime.allocator import keep_freed_memory
from feddf.cli.bound import bound
from feddf.cli.data import data_app
from feddf.cli.generator import generator_app
from feddf.cli.live import View, follow
from feddf.cli.partition import partition
from feddf.cli.tune import tune
from feddf.cli.words import NameOrFile, Out, Overrides, apart, err_console, free, numbers, out_console, share
from feddf.data import MissingDataError
from feddf.data.download import DownloadError
from feddf.engines import RayError
from feddf.experiments import compare as comparison
from feddf.experiments import toy
from feddf.report import ReportError, alike, find_runs, plots, read_run, tables
from feddf.rounds import QuorumError
from feddf.runs import ConfigError, Experiment, Parts, RunFolder, StoreError, build, config, load, play, presets
from feddf.runs.profile import Profile
from feddf.runs.store import versions

app = typer.Typer(
    help="Fuse models that were trained apart: FedDF and its baselines.",
    epilog="Start with: feddf compare demo. The presets are listed by: feddf presets.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.command()
def run(
    name_or_file: NameOrFile,
    overrides: Overrides = None,
    out: Out = None,
    profile: Annotated[bool, typer.Option("--profile", help="Write a timeline that Perfetto opens.")] = False,
) -> None:
    """Run an experiment, for instance: feddf run demo alpha=1 seed=3"""
    experiment = load(name_or_file, overrides or [])
    path = out or free(Path("runs") / f"{experiment.name}-{experiment.method}-seed{experiment.seed}")
    _refuse_other_config(path, experiment)
    parts = build(experiment)  # before the folder is made: a mistake leaves nothing behind
    timeline = Profile() if profile else None
    try:
        _finish(parts, RunFolder.create(path, experiment), timeline)
    finally:  # a run that was interrupted has a timeline too
        if timeline and path.is_dir():
            timeline.write(path / "trace.json")
            out_console.print(f"timeline (open it in Perfetto): {path / 'trace.json'}", soft_wrap=True)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    overrides: Overrides = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse where the result could differ in a bit.")] = False,
) -> None:
    """Continue a run that was stopped; it ends as if it had never been."""
    folder = RunFolder.open(run)
    asked = folder.experiment()
    values = {**asked.model_dump(), **dict(config.override(text) for text in overrides or [])}
    experiment = config.parse(values)
    if changed := config.differences(asked, experiment):
        raise StoreError(f"{run} was started with another configuration: {'; '.join(changed)}")
    _check_versions(folder, strict)
    parts = build(experiment)
    _say_progress(folder, experiment)
    _finish(parts, folder)


@app.command()
def compare(
    name_or_file: NameOrFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[methods=A,B] [seeds=0,1,2] [target=0.8] [KEY=VALUE]...",
            help="What to compare (default: methods=fedavg,feddf seeds=0; also fedprox, feddf+swag, ...), and values "
            "that replace the configuration's.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Run several methods on the same shards and seeds, and set them side by side."""
    own, plain = apart(overrides, {"methods": "fedavg,feddf", "seeds": "0", "target": ""})
    methods, seeds = own["methods"].split(","), numbers("seeds", own["seeds"])
    goal = share("target", own["target"], "an accuracy from 0 to 1, for instance 0.8") if own["target"] else None
    experiment = load(name_or_file, plain)
    target = out or free(Path("runs") / f"{experiment.name}-compare")
    experiments = comparison.grid(experiment, methods, seeds)
    build(next(iter(experiments.values())))  # before any folder is made: a mistake leaves nothing behind
    for each, folder in comparison.folders(experiments, target):
        if folder.records():
            _check_versions(folder, strict=False)
            _say_progress(folder, each)
        _play(build(each), folder)
    paths = [target / name for name in experiments]
    runs = {method: [read_run(target / f"{method}-seed{seed}") for seed in seeds] for method in methods}
    plots.learning_curves([run for mine in runs.values() for run in mine], target / "curves.png")
    result = tables.compare(runs, goal)
    (target / "comparison.md").write_text(result.markdown(), encoding="utf-8")
    (target / "comparison.csv").write_text(result.csv(), encoding="utf-8")
    out_console.print(result.table())
    out_console.print("run folders:", *[str(path) for path in paths], sep="\n  ", soft_wrap=True)
    out_console.print(f"table: {target / 'comparison.md'}, {target / 'comparison.csv'}", soft_wrap=True)
    out_console.print(f"learning curves: {target / 'curves.png'}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where to write the picture of the learning curves.")] = None,
) -> None:
    """Show the results of runs, and draw their learning curves."""
    _summary(runs, out)


app.command()(tune)
app.command()(bound)
app.command()(partition)
app.add_typer(data_app, name="data")
app.add_typer(generator_app, name="generator")


@app.command("presets")
def list_presets() -> None:
    """List the experiments that come with feddf."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name in presets():
        table.add_row(name, str(config.read(name).get("about", "")))
    out_console.print(table)


def _finish(parts: Parts, folder: RunFolder, timeline: Profile | None = None) -> None:
    _play(parts, folder, timeline)
    _summary([folder.path])
    if parts.experiment.data == "toy":
        _draw_toy(parts, folder.path)


def _say_progress(folder: RunFolder, experiment: Experiment) -> None:
    server, complaints = folder.latest()
    for complaint in complaints:
        err_console.print(f"[yellow]warning:[/] {complaint}", soft_wrap=True)
    done = server.round if server else 0
    out_console.print(f"{folder.path}: {done} of {experiment.rounds} rounds are done", soft_wrap=True)


def _play(parts: Parts, folder: RunFolder, timeline: Profile | None = None) -> None:
    experiment = parts.experiment
    done = len(folder.records())
    view = View(f"{experiment.name}, {experiment.method}, seed {experiment.seed}", experiment.rounds, done)
    try:
        follow(play(parts, folder, view.watch, timeline), view, out_console)
    except KeyboardInterrupt:
        err_console.print(
            f"stopped; finished rounds are safe. Continue with: feddf resume {folder.path}", soft_wrap=True
        )
        raise


def _summary(paths: list[Path], picture: Path | None = None) -> None:
    runs = [run for path in paths for run in find_runs(path)]
    out_console.print(tables.runs_table(runs))
    played = [run for run in runs if run.records]
    if played:
        out_console.print(tables.seconds_table(played))
    for number, group in enumerate(alike(played), 1):
        path = group[0].path / "curves.png"
        if picture:
            path = picture if number == 1 else picture.with_stem(f"{picture.stem}-{number}")
        plots.learning_curves(group, path)
        out_console.print(f"learning curves: {path}", soft_wrap=True)


def _draw_toy(parts: Parts, path: Path) -> None:
    table = Table(title="Accuracy on the global distribution, in %")
    table.add_column("model")
    table.add_column("accuracy", justify="right")
    for title, accuracy in toy.draw(parts, path / "regions.png"):
        table.add_row(title, tables.percent(accuracy))
    out_console.print(table)
    out_console.print(f"decision regions: {path / 'regions.png'}", soft_wrap=True)


def _refuse_other_config(path: Path, experiment: Experiment) -> None:
    if (path / "config.toml").exists() and (
        changed := config.differences(RunFolder.open(path).experiment(), experiment)
    ):
        raise StoreError(f"{path} holds a run with another configuration: {'; '.join(changed)}")


def _check_versions(folder: RunFolder, strict: bool) -> None:
    then, now = folder.versions(), versions(folder.experiment())
    changed = [f"{key} {then.get(key, 'unknown')} -> {now[key]}" for key in now if then.get(key) != now[key]]
    if changed and strict:
        raise StoreError(f"{folder.path} was started under other versions ({', '.join(changed)}), refused by --strict")
    if changed:
        err_console.print(f"[yellow]warning:[/] bytes may differ: {', '.join(changed)}", soft_wrap=True)


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


EXIT_CODES: dict[type[BaseException], int] = {
    ConfigError: 2,
    MissingDataError: 2,
    DownloadError: 1,
    ReportError: 2,
    StoreError: 1,
    QuorumError: 3,
    RayError: 1,
    OSError: 1,
    KeyboardInterrupt: 130,
}


def main() -> None:
    """Run the command line; a user's mistake is one line, never a traceback."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.path.append(str(Path.cwd()))  # a configuration may name the user's own modules
    keep_freed_memory()
    sys.exit(guarded(lambda: app(standalone_mode=False)))


def guarded(action: Callable[[], Any]) -> int:
    """Return the exit code of an action; what went wrong is said in one line."""
    try:
        result = action()
    except tuple(EXIT_CODES) as error:
        code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
        if str(error):
            err_console.print(f"[red]error:[/] {_escaped(error)}", soft_wrap=True, highlight=False)
        return code
    except typer.Abort:
        return 130
    except Exception as error:
        shown = getattr(error, "show", None)  # typer's own complaints about the command's words
        if shown is None:
            raise
        shown()
        return int(getattr(error, "exit_code", 2))
    return int(result or 0)


def _escaped(error: BaseException) -> str:
    return str(error).replace("[", "\\[")
