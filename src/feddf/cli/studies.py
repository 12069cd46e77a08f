"""``feddf tune`` and ``partition``: what is found out about an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
import typer
from rich.table import Table

from feddf.cli.arguments import (
    AsJson,
    NameOrFile,
    Out,
    Parallel,
    Seeds,
    Trust,
    check_picture,
    numbers,
    out_console,
    print_json,
    several,
    unused,
)
from feddf.config.errors import ConfigError
from feddf.config.presets import presets, read
from feddf.runtime.atomic import write_atomically

if TYPE_CHECKING:
    from feddf.config import Experiment
    from feddf.runs.tune import Trial


def tune(
    name_or_file: NameOrFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY[=V1,V2,...]... [KEY=VALUE]...",
            help="What to tune, with a grid of your own or the paper's (local.lr, prox_mu, momentum), and values "
            "that replace those of the configuration.",
            show_default=False,
        ),
    ] = None,
    seeds: Seeds = "0",
    parallel: Parallel = 1,
    extensions: Annotated[
        int, typer.Option(min=0, help="How often a grid grows while the best value is on its edge.")
    ] = 4,
    out: Out = None,
    trust: Trust = False,
) -> None:
    """Try a grid of values and keep the best configuration.

    The grid is extended while the best value lies on its edge.
    """
    from feddf.config import load, with_values
    from feddf.config.keys import short
    from feddf.runs import tune as tuning
    from feddf.runs.build import build

    given = words or []
    grid = {name: values for word in given for name, values in _grid(word, tuning.PAPER)}
    experiment = load(name_or_file, [word for word in given if not _grid(word, tuning.PAPER)])
    if not grid:
        known = ", ".join(map(short, tuning.PAPER))
        raise ConfigError(f"nothing to tune: name a key ({known}), or give values of your own, for instance alpha=1,10")
    target = out or unused(Path("runs") / f"{experiment.name}-tune")
    for name, values in grid.items():
        for value in values:  # a mistake is said before anything is trained
            with_values(experiment, {name: value})
    build(experiment, trust=trust)
    trials, best = tuning.tune(
        experiment,
        grid,
        numbers("--seeds", seeds),
        target,
        parallel=parallel,
        trust=trust,
        extensions=extensions,
        say=lambda text: out_console.print(text, soft_wrap=True, highlight=False),
    )
    _keep(experiment, trials, best, target)


def _grid(word: str, paper: dict[str, tuple[float, ...]]) -> list[tuple[str, Sequence[float]]]:
    """Return a key's full name and the values to try, or nothing for a word that is not about tuning."""
    from feddf.config import Experiment
    from feddf.config.keys import keys_of, resolve, short

    key, equals, text = word.partition("=")
    if equals and "," not in text:
        return []
    name = resolve(key, Experiment)
    if not equals:
        if name not in paper:
            known = ", ".join(map(short, paper))
            raise ConfigError.at(key, "no values", f"the paper has grids for {known} only; give yours")
        return [(name, paper[name])]
    if not keys_of(Experiment)[name].allowed.startswith("number"):
        return []
    try:
        return [(name, [float(part) for part in text.split(",")])]
    except ValueError:
        raise ConfigError.at(key, text, "must be numbers with commas between them") from None


def _keep(experiment: Experiment, trials: Sequence[Trial], best: Trial, target: Path) -> None:
    from feddf.config import with_values
    from feddf.runs import tune as tuning

    result = tuning.table(trials, best)
    write_atomically(target / "tune.md", result.markdown().encode())
    write_atomically(target / "tune.csv", result.csv().encode())
    chosen = with_values(experiment, best.values).model_dump(exclude_none=True)
    write_atomically(target / "best.toml", tomli_w.dumps(chosen).encode())
    out_console.print(result.table())
    setting = ", ".join(f"{name} = {value:g}" for name, value in best.values.items())
    out_console.print(f"best by validation: {setting}; its configuration: {target / 'best.toml'}", soft_wrap=True)


def partition(
    name: Annotated[str, typer.Argument(help="A data set, a preset or a TOML file.", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE[,VALUE]...]...",
            help="Values that replace those of the configuration (scheme, clients.total, ...); several numbers, as in "
            "alpha=100,1,0.1, are drawn side by side.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture to write: .png, .svg or .pdf.")] = Path("partition.png"),
    as_json: AsJson = False,
) -> None:
    """Plot which client holds how many examples of each class."""
    from feddf.config import parse, with_values
    from feddf.report.tables import percent

    check_picture(out)
    given = words or []
    values = {**_values(name), "pool": {}}
    base = parse(values, overrides=["fusion.method=fedavg", *(word for word in given if not several(word))])
    sweeps = [[{key: value} for value in found] for word in given for key, found in several(word)]
    experiments = [with_values(base, {k: v for one in chosen for k, v in one.items()}) for chosen in product(*sweeps)]
    from feddf.data.partition import class_counts, skew
    from feddf.report.plots import partition_dots
    from feddf.runs.build import build_task

    results: list[dict[str, Any]] = []

    panels = []
    table = Table(title=f"Label skew of {base.data.name}")
    for column in ("", "top-class share %", "effective classes", "shard: least", "median", "most", "absent classes"):
        table.add_column(column, justify="right" if column else "left")
    for experiment in experiments:
        task = build_task(experiment)
        counts = class_counts(task.train.labels, task.shards, task.train.n_classes)
        found, title = skew(counts), _title(experiment)
        panels.append((title, counts))
        results.append({"partition": title, **asdict(found), "counts": counts.tolist()})
        sizes = [str(found.smallest), f"{found.median:g}", str(found.largest), str(found.absent)]
        table.add_row(title, percent(found.top_class_share), f"{found.effective_classes:.2f}", *sizes)
    partition_dots(panels, out, task.data.classes)
    if as_json:
        print_json({"picture": str(out), "partitions": results})
        return
    out_console.print(table)
    out_console.print(f"picture: {out}", soft_wrap=True)


def _values(name: str) -> dict[str, Any]:
    if name in presets() or Path(name).is_file():
        return read(name)
    if name.endswith(".toml"):
        raise ConfigError(f"no file is called '{name}'")
    return {"data": {"name": name}, "prototypes": ["mlp"]}


def _title(experiment: Experiment) -> str:
    partition = experiment.partition
    if partition.scheme.startswith("dirichlet"):
        return f"{partition.scheme}, α = {partition.alpha:g}"
    if partition.scheme == "shards":
        return f"shards, {partition.classes_per_client} a client"
    return partition.scheme
