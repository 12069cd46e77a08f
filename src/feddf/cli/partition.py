"""``feddf partition``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from feddf.cli.words import apart, out_console
from feddf.data.partition import class_counts, skew
from feddf.report.plots import partition_dots
from feddf.report.tables import percent
from feddf.runs import ConfigError
from feddf.runs.build import build_task
from feddf.runs.config import Experiment, override, parse, presets, read


def partition(
    name: Annotated[str, typer.Argument(help="A data set, a preset or a TOML file.", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[alpha=A1,A2,...] [KEY=VALUE]...",
            help="One or several α, and values that replace the configuration's (partition, clients, seed, ...).",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("partition.png"),
) -> None:
    """Draw how many examples of each class every client holds, and say how skewed that is."""
    own, rest = apart(words, {"alpha": ""})
    values = {**_values(name), "pool": None, "method": "fedavg", **dict(override(word) for word in rest)}
    alphas = own["alpha"].split(",") if own["alpha"] else [str(values.get("alpha", 1.0))]
    panels = []
    table = Table(title=f"Label skew of {values['data']}")
    for column in ("", "top-class share %", "effective classes", "shard: least", "median", "most", "absent classes"):
        table.add_column(column, justify="right" if column else "left")
    for alpha in alphas:
        experiment = parse({**values, "alpha": override(f"alpha={alpha}")[1]})
        task = build_task(experiment)
        counts = class_counts(task.train.labels, task.shards, task.train.n_classes)
        found, title = skew(counts), _title(experiment)
        panels.append((title, counts))
        sizes = [str(found.smallest), f"{found.median:g}", str(found.largest), str(found.absent)]
        table.add_row(title, percent(found.top_class_share), f"{found.effective_classes:.2f}", *sizes)
    partition_dots(panels, out)
    out_console.print(table)
    out_console.print(f"picture: {out}", soft_wrap=True)


def _values(name: str) -> dict[str, object]:
    if name in presets() or Path(name).is_file():
        return read(name)
    if name.endswith(".toml"):
        raise ConfigError(f"no file is called '{name}'")
    return {"data": name, "prototypes": ["mlp"]}


def _title(experiment: Experiment) -> str:
    if experiment.partition.startswith("dirichlet"):
        return f"{experiment.partition}, α = {experiment.alpha:g}"
    if experiment.partition == "shards":
        return f"shards, {experiment.classes_per_client} a client"
    return experiment.partition
