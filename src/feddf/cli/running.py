"""``feddf run``, ``resume`` and ``compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from feddf.cli.arguments import (
    NameOrFile,
    Out,
    Overrides,
    err_console,
    numbers,
    out_console,
    share,
    split_words,
    unused,
)
from feddf.cli.reporting import summary

if TYPE_CHECKING:
    from feddf.config import Experiment
    from feddf.engines.wrappers import Profile
    from feddf.runs.build import Parts
    from feddf.runs.store import RunFolder


def run(
    name_or_file: NameOrFile,
    overrides: Overrides = None,
    out: Out = None,
    profile: Annotated[bool, typer.Option("--profile", help="Write a timeline that Perfetto opens.")] = False,
) -> None:
    """Run an experiment, for instance: feddf run demo alpha=1 seed=3"""
    from feddf.config import load

    experiment = load(name_or_file, overrides or [])
    method = experiment.fusion.method.replace(":", ".")
    path = out or unused(Path("runs") / f"{experiment.name}-{method}-seed{experiment.seed}")
    from feddf.engines.wrappers import Profile
    from feddf.runs.build import build
    from feddf.runs.store import RunFolder

    _refuse_other_config(path, experiment)
    parts = build(experiment)  # before the folder is made: a mistake leaves nothing behind
    timeline = Profile() if profile else None
    try:
        _finish(parts, RunFolder.create(path, experiment), timeline)
    finally:  # a run that was interrupted has a timeline too
        if timeline and path.is_dir():
            timeline.write(path / "trace.json")
            out_console.print(f"timeline (open it in Perfetto): {path / 'trace.json'}", soft_wrap=True)


def resume(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    overrides: Overrides = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse where the result could differ in a bit.")] = False,
) -> None:
    """Continue a run that was interrupted; it ends with the same models as if it had not been."""
    from feddf.config import differences, parse
    from feddf.runs.build import build
    from feddf.runs.store import RunFolder, StoreError

    folder = RunFolder.open(run)
    asked = folder.experiment()
    experiment = parse(asked.model_dump(), overrides=overrides or [])
    if changed := differences(asked, experiment):
        raise StoreError(f"{run} was started with another configuration: {'; '.join(changed)}")
    _check_versions(folder, experiment, strict)
    parts = build(experiment)
    _say_progress(folder, experiment)
    _finish(parts, folder)


def compare(
    name_or_file: NameOrFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[methods=A,B] [seeds=0,1,2] [target=0.8] [KEY=VALUE]...",
            help="What to compare (default: methods=fedavg,feddf seeds=0; also fedprox, feddf+swag, ...), and values "
            "that replace those of the configuration.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Run several methods on the same shards and seeds, and compare their results in one table."""
    from feddf.config import load

    own, plain = split_words(overrides, {"methods": "fedavg,feddf", "seeds": "0", "target": ""})
    methods, seeds = own["methods"].split(","), numbers("seeds", own["seeds"])
    goal = share("target", own["target"], "an accuracy from 0 to 1, for instance 0.8") if own["target"] else None
    experiment = load(name_or_file, plain)
    from feddf.experiments import variants
    from feddf.runs.build import build

    target = out or unused(Path("runs") / f"{experiment.name}-compare")
    experiments = variants.grid(experiment, methods, seeds)
    build(next(iter(experiments.values())))  # before any folder is made: a mistake leaves nothing behind
    for each, folder in variants.folders(experiments, target):
        if folder.records():
            _check_versions(folder, each, strict=False)
            _say_progress(folder, each)
        _run_to_the_end(build(each), folder)
    _compared(
        {method: [target / f"{method.replace(':', '.')}-seed{seed}" for seed in seeds] for method in methods},
        target,
        goal,
    )


def _compared(paths: dict[str, list[Path]], target: Path, goal: float | None) -> None:
    from feddf.report import tables
    from feddf.report.read import read_run

    runs = {method: [read_run(path) for path in mine] for method, mine in paths.items()}
    result = tables.compared(runs, goal)
    (target / "comparison.md").write_text(result.markdown(), encoding="utf-8")
    (target / "comparison.csv").write_text(result.csv(), encoding="utf-8")
    out_console.print(result.table())
    out_console.print(
        "run folders:", *[str(path) for mine in paths.values() for path in mine], sep="\n  ", soft_wrap=True
    )
    out_console.print(f"table: {target / 'comparison.md'}, {target / 'comparison.csv'}", soft_wrap=True)
    from feddf.report import plots

    plots.learning_curves([run for mine in runs.values() for run in mine], target / "curves.png")
    out_console.print(f"learning curves: {target / 'curves.png'}", soft_wrap=True)


def _finish(parts: Parts, folder: RunFolder, timeline: Profile | None = None) -> None:
    _run_to_the_end(parts, folder, timeline)
    summary([folder.path])
    if parts.experiment.data.name == "toy":
        _draw_toy(parts, folder.path)


def _say_progress(folder: RunFolder, experiment: Experiment) -> None:
    server, complaints = folder.latest()
    for complaint in complaints:
        err_console.print(f"[yellow]warning:[/] {complaint}", soft_wrap=True)
    done = server.round if server else 0
    out_console.print(f"{folder.path}: {done} of {experiment.rounds} rounds are done", soft_wrap=True)


def _run_to_the_end(parts: Parts, folder: RunFolder, timeline: Profile | None = None) -> None:
    from feddf.cli.live import View, follow
    from feddf.runs.run import run_experiment
    from feddf.runs.store import versions

    experiment = parts.experiment
    out_console.print(f"device: {versions(experiment)['device']}", soft_wrap=True)
    done = len(folder.records())
    view = View(f"{experiment.name}, {experiment.fusion.method}, seed {experiment.seed}", experiment.rounds, done)
    try:
        follow(run_experiment(parts, folder, view.watch, timeline), view, out_console)
    except KeyboardInterrupt:
        err_console.print(
            f"stopped; finished rounds are safe. Continue with: feddf resume {folder.path}", soft_wrap=True
        )
        raise


def _draw_toy(parts: Parts, path: Path) -> None:
    from feddf.experiments import toy
    from feddf.report.tables import percent

    table = Table(title="Accuracy on the global distribution, in %")
    table.add_column("model")
    table.add_column("accuracy", justify="right")
    for title, accuracy in toy.draw(parts, path / "regions.png"):
        table.add_row(title, percent(accuracy))
    out_console.print(table)
    out_console.print(f"decision regions: {path / 'regions.png'}", soft_wrap=True)


def _refuse_other_config(path: Path, experiment: Experiment) -> None:
    from feddf.config import differences
    from feddf.runs.store import RunFolder, StoreError

    if (path / "config.toml").exists() and (changed := differences(RunFolder.open(path).experiment(), experiment)):
        raise StoreError(f"{path} holds a run with another configuration: {'; '.join(changed)}")


def _check_versions(folder: RunFolder, experiment: Experiment, strict: bool) -> None:
    from feddf.runs.store import StoreError, versions

    then, now = {"device": "cpu", **folder.versions()}, versions(experiment)  # older runs knew no other device
    changed = [f"{key} {then.get(key, 'unknown')} -> {now[key]}" for key in now if then.get(key) != now[key]]
    if changed and strict:
        raise StoreError(f"{folder.path} was started under other versions ({', '.join(changed)}), refused by --strict")
    if changed:
        err_console.print(f"[yellow]warning:[/] bytes may differ: {', '.join(changed)}", soft_wrap=True)
