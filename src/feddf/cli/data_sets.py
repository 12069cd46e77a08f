"""``feddf data list``, ``fetch`` and ``check``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.text import Text

from feddf.cli.arguments import App, argument, complain, out_console, remark, say
from feddf.config.errors import ConfigError, first_line
from feddf.config.names import DATASETS
from feddf.config.sections import DataConfig
from feddf.data import catalog
from feddf.data.catalog import Download, Entry
from feddf.report.tables import table_of

data_app = App(help="List, fetch and check data sets.", no_args_is_help=True)

Name = Annotated[str, argument(help="A data set's name, as feddf data list shows it.")]
DataDir = Annotated[Path | None, typer.Option(help="The folder of the data sets (default: $FEDDF_DATA, or data).")]
STATE_COLORS = {"here": "green", "incomplete": "yellow", "missing": "dim"}


@data_app.command("list")
def list_data(data_dir: DataDir = None) -> None:
    """List the data sets, which of them are here, and how to get the others."""
    folder = catalog.root_of(data_dir)
    rows = []
    for entry in catalog.CATALOG.values():
        state, there = catalog.state(entry, folder), catalog.size(entry, folder)
        shown, how = Text(state, STATE_COLORS[state]), "" if state == "here" else entry.how
        rows.append([entry.name, shown, decimal(there) if there else "–", how])
    say(table_of(["name", "state", "on disk", "how to get it"], [], rows, title=f"Data sets in {folder}"))


@data_app.command()
def fetch(name: Name, data_dir: DataDir = None) -> None:
    """Download a data set and unpack it; a download that breaks off starts again."""
    entry, folder = _entry(name), catalog.root_of(data_dir)
    if not catalog.missing(entry, folder):
        say(f"{name} is here already: {folder}")
        return
    try:
        with _progress() as progress:
            catalog.get(entry, folder, progress)
    except KeyboardInterrupt:
        remark(f"stopped; start again with: feddf data fetch {name}")
        raise
    say(f"{name} is complete: {decimal(catalog.size(entry, folder))} in {folder}")


@data_app.command()
def check(
    name: Annotated[str | None, typer.Argument(help="A data set's name (default: all that are here).")] = None,
    data_dir: DataDir = None,
) -> None:
    """Load data sets as a run would, and say what is in them."""
    folder = catalog.root_of(data_dir)
    there = [entry for entry in catalog.CATALOG.values() if catalog.state(entry, folder) != "missing"]
    entries = [_entry(name)] if name else there
    if not entries:
        say(f"no data set is in {folder}; feddf data list shows how to get one")
    sound = True
    for entry in entries:
        try:
            say(f"{entry.name}: {_described(entry, folder)}")
        except Exception as error:  # a damaged file can fail in any way
            complain(f"{entry.name}: {first_line(error)}", "error")
            sound = False
    if not sound:
        raise typer.Exit(1)


def _entry(name: str) -> Entry:
    if name not in catalog.CATALOG:
        raise ConfigError.at("data", name, f"known are {', '.join(catalog.CATALOG)}")
    return catalog.CATALOG[name]


def _described(entry: Entry, folder: Path) -> str:
    """Return in one line what is in a data set; raise if something is wrong with it."""
    if absent := catalog.missing(entry, folder):
        count = f"{len(absent)} of {len(entry.files)} files are missing" if len(entry.files) > 1 else "it is missing"
        raise ValueError(f"{count} in {folder}, first {absent[0]}; get it: {entry.how}")
    if entry.name in ("sst2", "ag_news"):  # texts can be read only with a tokenizer
        return f"all files are here, {decimal(catalog.size(entry, folder))}; a run reads them with its tokenizer"
    from feddf.data.datasets import Dataset, wrong_parts

    data: Dataset = DATASETS[entry.name](DataConfig(name=entry.name, folder=str(folder)))
    if wrong := wrong_parts(data):
        raise ValueError(f"it has {wrong}")
    shape, classes = "×".join(map(str, data.shape)), data.train.n_classes
    return (
        f"{len(data.train)} training and {len(data.test)} test examples, {classes} classes, shape {shape}, "
        f"labels within 0 to {classes - 1}"
    )


@contextmanager
def _progress() -> Iterator[catalog.Progress]:
    """Show downloads as bars with bytes and rate; where there is no terminal, say when one begins."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    begun: dict[Download, TaskID] = {}
    plain = not out_console.is_terminal
    with Progress(*columns, console=out_console, disable=plain) as bars:

        def progress(download: Download, done: int, total: int | None) -> None:
            if download not in begun:
                begun[download] = bars.add_task(escape(download.name))
                if plain:
                    say(f"{download.url}: {decimal(total) if total is not None else 'unknown size'}")
            bars.update(begun[download], completed=done, total=total)

        yield progress
