"""``feddf run``, ``resume`` and ``compare``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from feddf.cli.arguments import (
    AsJson,
    NameOrFile,
    Out,
    Overrides,
    Seeds,
    Trust,
    complain,
    err_console,
    numbers,
    out_console,
    print_json,
    several,
    unused,
)
from feddf.cli.reporting import summary
from feddf.runtime.atomic import write_atomically

if TYPE_CHECKING:
    from feddf.config import Experiment
    from feddf.engines.open import Profile
    from feddf.runs.build import Parts
    from feddf.runs.many import Variation
    from feddf.runs.store import RunFolder


def run(
    name_or_file: NameOrFile,
    overrides: Overrides = None,
    out: Out = None,
    trust: Trust = False,
    profile: Annotated[bool, typer.Option("--profile", help="Write a timeline that Perfetto opens.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment, for instance: feddf run demo alpha=1 seed=3"""
    from feddf.config import load

    experiment = load(name_or_file, overrides or [])
    method = experiment.fusion.method.replace(":", ".")
    path = out or unused(Path("runs") / f"{experiment.name}-{method}-seed{experiment.seed}")
    from feddf.engines.open import Profile
    from feddf.runs.build import build
    from feddf.runs.store import RunFolder

    _refuse_other_config(path, experiment)
    parts = build(experiment, trust=trust)  # before the folder is made: a mistake leaves nothing behind
    timeline = Profile() if profile else None
    try:
        _finish(parts, RunFolder.create(path, experiment), timeline, as_json)
    finally:  # a run that was interrupted has a timeline too
        if timeline and path.is_dir():
            timeline.write(path / "trace.json")
            err_console.print(f"timeline (open it in Perfetto): {path / 'trace.json'}", soft_wrap=True)


def resume(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[rounds=T] [KEY=VALUE]...",
            help="More rounds than before (rounds=20), or values that change no result, for instance workers=4.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse where the result could differ in a bit.")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Continue an interrupted run, or add rounds to a finished one.

    The models are those of a run that was never interrupted.
    """
    from feddf.config import parse
    from feddf.runs.build import build
    from feddf.runs.store import RunFolder

    folder = RunFolder.open(run)
    folder.check_trust(trust)
    experiment = parse(folder.experiment().model_dump(), overrides=overrides or [])
    _check_versions(folder, experiment, strict)
    parts = build(experiment, trust=trust)
    _warn(folder.continue_as(experiment))
    _say_progress(folder, experiment, as_json)
    _finish(parts, folder, None, as_json)


def compare(
    name_or_file: NameOrFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE[,VALUE]...]...",
            help="Values that replace those of the configuration; several numbers, as in alpha=0.1,1,10, are run one "
            "after the other.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods, with commas between them: also fedprox, fedavgm, fedma, feddf-plus, ...")
    ] = "fedavg,feddf",
    seeds: Seeds = "0",
    goal: Annotated[
        float | None,
        typer.Option("--target", min=0, max=1, help="A test accuracy: the table has the rounds to reach it."),
    ] = None,
    out: Out = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Run several methods on the same shards and seeds; print one table."""
    from feddf.config import load

    given = overrides or []
    swept = dict(found for word in given for found in several(word))
    experiment = load(name_or_file, [word for word in given if not several(word)])
    from feddf.runs.many import grid

    target = out or unused(Path("runs") / f"{experiment.name}-compare")
    planned = grid(experiment, methods.split(","), numbers("--seeds", seeds), swept)
    variations = {target / one.folder: one for one in planned}
    options = ["--methods", methods, "--seeds", seeds, *(["--target", str(goal)] if goal is not None else [])]
    options += ["--out", str(target), *(["--trust"] if trust else [])]
    again = shlex.join(["feddf", "compare", name_or_file, *given, *options])
    _run_variations(variations, again, trust, as_json)
    paths: dict[str, dict[str, list[Path]]] = {}
    for path, one in variations.items():
        paths.setdefault(one.setting, {}).setdefault(one.method, []).append(path)
    _compared(paths, target, goal, list(swept), as_json)


def _run_variations(variations: Mapping[Path, Variation], again: str, trust: bool, as_json: bool) -> None:
    """Run all experiments of a comparison, one after the other; ``again`` is the command that continues it."""
    from feddf.runs.build import build
    from feddf.runs.many import run_many
    from feddf.runs.store import RunFolder

    build(next(iter(variations.values())).experiment, trust=trust)  # before any folder is made

    def show(path: Path, experiment: Experiment) -> None:
        one, folder = variations[path], RunFolder.open(path)
        if folder.records():
            _check_versions(folder, experiment, strict=False)
            _say_progress(folder, experiment, as_json)
        place = f"run {list(variations).index(path) + 1} of {len(variations)}"
        title = f"{place}: {', '.join(filter(None, [one.method, one.setting]))}"
        _run_to_the_end(build(experiment, trust=trust), folder, title=title, again=again, quiet=as_json)

    for _ in run_many({path: one.experiment for path, one in variations.items()}, run=show, complain=complain):
        pass


def _compared(
    paths: dict[str, dict[str, list[Path]]], target: Path, goal: float | None, swept: list[str], as_json: bool
) -> None:
    from feddf.report import tables
    from feddf.report.read import read_run

    runs = {
        setting: {method: [read_run(path) for path in mine] for method, mine in methods.items()}
        for setting, methods in paths.items()
    }
    every = [run for methods in runs.values() for mine in methods.values() for run in mine]
    result = tables.swept(runs, goal)
    write_atomically(target / "comparison.md", result.markdown().encode())
    write_atomically(target / "comparison.csv", result.csv().encode())
    from feddf.report import plots

    pictures = {"learning curves": target / "curves.png"}
    plots.learning_curves(every, target / "curves.png")
    for name in swept if len(swept) == 1 else []:
        pictures[f"accuracy by {name}"] = target / f"by-{name.rpartition('.')[2]}.png"
        plots.sweep(every, name, pictures[f"accuracy by {name}"])
    if as_json:
        print_json({"folder": str(target), "title": result.title, "results": list(result.numbers)})
        return
    out_console.print(result.table())
    out_console.print("run folders:", *[str(run.path) for run in every], sep="\n  ", soft_wrap=True)
    out_console.print(f"table: {target / 'comparison.md'}, {target / 'comparison.csv'}", soft_wrap=True)
    for title, path in pictures.items():
        out_console.print(f"{title}: {path}", soft_wrap=True)


def _finish(parts: Parts, folder: RunFolder, timeline: Profile | None = None, as_json: bool = False) -> None:
    _run_to_the_end(parts, folder, timeline, quiet=as_json)
    summary([folder.path], folder.path / "curves.png", as_json=as_json)
    if parts.experiment.data.name == "toy" and not as_json:
        _draw_toy(parts, folder.path)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        complain(warning)


def _say_progress(folder: RunFolder, experiment: Experiment, quiet: bool = False) -> None:
    server, complaints = folder.latest()
    _warn([*complaints, *folder.damage()])
    done = server.round if server else 0
    if not quiet:
        out_console.print(f"{folder.path}: {done} of {experiment.rounds} rounds are done", soft_wrap=True)


def _run_to_the_end(
    parts: Parts,
    folder: RunFolder,
    timeline: Profile | None = None,
    title: str = "",
    again: str = "",
    quiet: bool = False,
) -> None:
    """Run what is left of a run. ``again`` is the command that goes on if it is stopped."""
    from feddf.cli.live import View, follow
    from feddf.config.keys import flat
    from feddf.report.read import method_name
    from feddf.runs.run import run_experiment
    from feddf.runs.store import versions

    experiment = parts.experiment
    _warn(parts.warnings)
    console = Console(quiet=True) if quiet else out_console
    console.print(f"device: {versions(experiment)['device']}", soft_wrap=True)
    done = len(folder.records())
    title = title or f"{experiment.name}, {method_name(flat(experiment.model_dump()))}"
    view = View(f"{title}, seed {experiment.seed}", experiment.rounds, done)
    try:
        follow(run_experiment(parts, folder, view.watch, timeline, lambda text: _warn([text])), view, console)
    except KeyboardInterrupt:
        again = again or f"feddf resume {shlex.quote(str(folder.path))}"
        err_console.print(f"stopped; finished rounds are safe. Continue with: {again}", soft_wrap=True, highlight=False)
        raise


def _draw_toy(parts: Parts, path: Path) -> None:
    from feddf.report.tables import percent
    from feddf.runs.run import draw_regions

    table = Table(title="Accuracy on the global distribution, in %")
    table.add_column("model")
    table.add_column("accuracy", justify="right")
    for title, accuracy in draw_regions(parts, path / "regions.png"):
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
        complain(f"bytes may differ: {', '.join(changed)}")
