"""``feddf compare``, ``tune`` and ``partition``: what is found out about an experiment."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
import typer

from feddf.cli.arguments import (
    NameOrFile,
    Out,
    Seeds,
    Trust,
    argument,
    complain,
    give,
    remark,
    say,
    seeds_of,
)
from feddf.cli.reporting import check_picture
from feddf.cli.running import check_versions, run_to_the_end, say_progress
from feddf.config import ConfigError, Experiment, load, parse, with_values
from feddf.config.errors import one_line
from feddf.config.experiment import override, presets, read
from feddf.config.keys import keys_of, resolve, short
from feddf.report import tables
from feddf.report.read import Run, read_run, side_by_side
from feddf.runtime.atomic import write_atomically

if TYPE_CHECKING:
    from feddf.runs.many import Variation

SWEPT = "Values to replace; several numbers, as in alpha=0.1,1,10, are run one after the other."
TUNED = "What to tune, with a grid of your own or the paper's (local.lr, prox_mu, momentum), or an option of "
TUNED += "all models (prototypes.groups=1,2,4), and values to replace."
DRAWN = "Values to replace (scheme, clients.total, ...); several numbers (alpha=100,1,0.1) are drawn side by side."


def compare(
    name_or_file: NameOrFile,
    overrides: Annotated[list[str] | None, argument(metavar="[KEY=VALUE[,VALUE]...]...", help=SWEPT)] = None,
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
) -> None:
    """Run several methods on the same shards and seeds; print one table."""
    from feddf.runs.many import equal_folder, grid, unfinished, unused

    given = overrides or []
    swept = dict(found for word in given for found in several(word))
    experiment = load(name_or_file, [word for word in given if not several(word)])
    planned = {one.folder: one for one in grid(experiment, methods.split(","), seeds_of(seeds), swept)}
    place = Path("runs") / f"{experiment.name}-compare"
    equal = None if out else equal_folder(place, {name: one.experiment for name, one in planned.items()})
    target = out or equal or unused(place)
    variations = {target / name: one for name, one in planned.items()}
    options = ["--methods", methods, "--seeds", seeds, *(["--target", str(goal)] if goal is not None else [])]
    options += ["--out", str(target), *(["--trust"] if trust else [])]
    again = shlex.join(["feddf", "compare", name_or_file, *given, *options])
    left = len(unfinished(variations))
    if equal:
        goes_on = f"there, {left} of {len(planned)} unfinished, and go on"
        state = goes_on if left else "finished, and would be repeated bit for bit"
        remark(f"equal runs are in {equal}: {state}; --out FOLDER runs them anew")
    if left or not equal:
        _run_variations(variations, again, trust)
    _show_comparison(variations, target, goal, list(swept))


def _run_variations(variations: Mapping[Path, Variation], again: str, trust: bool) -> None:
    """Run all experiments of a comparison, one after the other; ``again`` is the command that continues it."""
    from feddf.runs.build import build
    from feddf.runs.many import run_many
    from feddf.runs.store import RunFolder

    build(next(iter(variations.values())).experiment, trust=trust)  # before any folder is made

    def show(path: Path, experiment: Experiment) -> None:
        one, folder, parts = variations[path], RunFolder.open(path), build(experiment, trust=trust)
        if folder.records():
            check_versions(folder, experiment, strict=False)
            say_progress(folder, parts)
        place = f"run {list(variations).index(path) + 1} of {len(variations)}"
        title = f"{place}: {', '.join(filter(None, [one.method, one.setting]))}"
        run_to_the_end(parts, folder, title=title, again=again, later=later(path))

    def later(path: Path) -> Callable[[float], float]:
        """Tell how long the runs after one take: each round as long as in their method's runs before, or in this."""
        order, place = list(variations.items()), list(variations).index(path)
        known = {one.method: read_run(folder).seconds_a_round for folder, one in order[:place]}
        left = [(one.method, one.experiment.rounds - len(RunFolder(at).records())) for at, one in order[place + 1 :]]
        return lambda a_round: sum(rounds * known.get(method, a_round) for method, rounds in left)

    for _ in run_many({path: one.experiment for path, one in variations.items()}, run=show, complain=complain):
        pass


def _show_comparison(
    variations: Mapping[Path, Variation], target: Path, goal: float | None, swept: Sequence[str]
) -> None:
    """Write the table and the pictures of a comparison, and print the table."""
    runs: dict[str, dict[str, list[Run]]] = {}
    every = side_by_side([read_run(path) for path in variations])
    for run, one in zip(every, variations.values(), strict=True):
        runs.setdefault(one.setting, {}).setdefault(one.method, []).append(run)
    result = tables.swept(runs, goal)
    files = result.write(target / "comparison")
    from feddf.report import plots

    pictures = {"learning curves": target / "curves.png"}
    plots.learning_curves(every, target / "curves.png")
    if len(swept) == 1:
        pictures[f"accuracy by {swept[0]}"] = path = target / f"by-{swept[0].rpartition('.')[2]}.png"
        plots.sweep(every, swept[0], path)
    give({"folder": str(target), "title": result.title, "results": list(result.numbers)})
    say(result.table())
    say("\n  ".join(["run folders:", *(str(run.path) for run in every)]))
    say(f"table: {', '.join(map(str, files))}")
    for title, path in pictures.items():
        say(f"{title}: {path}")


def tune(
    name_or_file: NameOrFile,
    words: Annotated[list[str] | None, argument(metavar="KEY[=V1,V2,...]... [KEY=VALUE]...", help=TUNED)] = None,
    seeds: Seeds = "0",
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    extensions: Annotated[
        int, typer.Option(min=0, help="How often a grid grows while the best value is on its edge.")
    ] = 4,
    out: Out = None,
    trust: Trust = False,
) -> None:
    """Try a grid of values and keep the best configuration.

    The grid is extended while the best value lies on its edge.
    """
    from feddf.runs import many as tuning
    from feddf.runs.build import build

    given = words or []
    grid = {name: values for word in given for name, values in _grid(word)}
    experiment = load(name_or_file, [word for word in given if not _grid(word)])
    if not grid:
        known = ", ".join(map(short, tuning.PAPER))
        raise ConfigError(f"nothing to tune: name a key ({known}), or give values of your own, for instance alpha=1,10")
    target = out or tuning.unused(Path("runs") / f"{experiment.name}-tune")
    for name, values in grid.items():
        for value in values:  # a mistake is said before anything is trained
            tried = tuning.with_setting(experiment, {name: value})
            if name.startswith(tuning.OPTION):  # only the model knows what it allows
                build(tried, trust=trust)
    build(experiment, trust=trust)
    how = {"parallel": parallel, "extensions": extensions}
    trials, best = tuning.tune(experiment, grid, seeds_of(seeds), target, trust=trust, say=say, **how)
    result = tuning.table(trials, best)
    result.write(target / "tune")
    chosen = tuning.with_setting(experiment, best.values).model_dump(exclude_none=True)
    write_atomically(target / "best.toml", tomli_w.dumps(chosen).encode())
    say(result.table())
    setting = ", ".join(f"{name} = {value:g}" for name, value in best.values.items())
    say(f"best by validation: {setting}; its configuration: {target / 'best.toml'}")


def _grid(word: str) -> Sequence[tuple[str, Sequence[float]]]:
    """Return a key's full name and the values to try, or nothing for a word that is not about tuning."""
    from feddf.runs.many import OPTION, PAPER

    key, equals, text = word.partition("=")
    if equals and not key.startswith(OPTION):
        return several(word)
    if equals:
        with one_line(partial(ConfigError.at, key, text), "must be numbers with commas between them", ValueError):
            return [(key, [float(part) for part in text.split(",")])] if "," in text else []
    name = resolve(key, Experiment)
    if name not in PAPER:
        allowed = f"the paper has grids for {', '.join(map(short, PAPER))} only; give yours"
        raise ConfigError.at(key, "no values", allowed)
    return [(name, PAPER[name])]


def several(word: str) -> list[tuple[str, list[Any]]]:
    """Return a key and its values, if a word gives one that takes a number several."""
    key, _, text = word.partition("=")
    if "," not in text:
        return []
    name = resolve(key.strip(), Experiment)
    if not keys_of(Experiment)[name].allowed.startswith(("number", "whole number")):
        return []
    return [(name, [override(f"{name}={part}")[1] for part in text.split(",")])]


def partition(
    name: Annotated[str, argument(help="A data set, a preset or a TOML file.")],
    words: Annotated[list[str] | None, argument(metavar="[KEY=VALUE[,VALUE]...]...", help=DRAWN)] = None,
    out: Annotated[Path, typer.Option(help="The picture to write: .png, .svg or .pdf.")] = Path("partition.png"),
) -> None:
    """Plot which client holds how many examples of each class."""
    check_picture(out)
    given = words or []
    values = {**_values(name), "pool": {}}
    base = parse(values, overrides=["fusion.method=fedavg", *(word for word in given if not several(word))])
    sweeps = [[(key, value) for value in found] for word in given for key, found in several(word)]
    experiments = [with_values(base, dict(chosen)) for chosen in product(*sweeps)]
    from feddf.data.partition import skew
    from feddf.report.plots import partition_dots
    from feddf.runs.build import build_task

    panels, skews = [], []
    for experiment in experiments:
        task = build_task(experiment)
        panels.append((_title(experiment), task.counts()))
        skews.append(skew(task.counts()))
    partition_dots(panels, out, task.data.group_names, task.data.unit)
    both = zip(panels, skews, strict=True)
    results = [{"partition": title, **asdict(one), "counts": counts.tolist()} for (title, counts), one in both]
    give({"picture": str(out), "partitions": results})
    unit, units = task.data.unit, "classes" if task.data.unit == "class" else "groups"
    numbers = [f"top-{unit} share %", f"effective {units}", "shard: least", "median", "most", f"absent {units}"]
    rows = []
    for (title, _), one in zip(panels, skews, strict=True):
        sizes = [str(one.smallest), f"{one.median:g}", str(one.largest), str(one.absent)]
        rows.append([title, tables.percent(one.top_class_share), f"{one.effective_classes:.2f}", *sizes])
    say(tables.table_of([""], numbers, rows, fold=True, title=f"Skew of {base.data.name}"))
    say(f"picture: {out}")


def _values(name: str) -> dict[str, Any]:
    """Return the configuration that a preset, a file or a data set's name stands for."""
    if name in presets() or Path(name).is_file():
        return read(name)
    if name.endswith(".toml"):
        raise ConfigError(f"no file is called '{name}'")
    return {"data": {"name": name}, "prototypes": ["mlp"]}


def _title(experiment: Experiment) -> str:
    partition = experiment.partition
    more = f", {partition.classes_per_client} a client" if partition.scheme == "shards" else ""
    return partition.scheme + (f", α = {partition.alpha:g}" if partition.scheme.startswith("dirichlet") else more)
