"""``feddf data list``, ``fetch`` and ``check``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from feddf.cli.arguments import App, complain, err_console, out_console
from feddf.config.errors import ConfigError, first_line
from feddf.config.names import DATASETS

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from feddf.data import catalog
    from feddf.data.catalog import Download, Entry

data_app = App(help="List, fetch and check data sets.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A data set's name, as feddf data list shows it.", show_default=False)]
DataDir = Annotated[
    Path | None, typer.Option(help="The folder of the data sets (default: the variable FEDDF_DATA's, or data).")
]
TOKENIZED = ("sst2", "ag_news")
"""Texts: they can be read only with a tokenizer."""

STATE_COLORS = {"here": "green", "incomplete": "yellow", "missing": "dim"}


@data_app.command("list")
def list_data(data_dir: DataDir = None) -> None:
    """List the data sets, which of them are here, and how to get the others."""
    from feddf.data import catalog

    folder = catalog.root_of(data_dir)
    table = Table(title=f"Data sets in {folder}", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("on disk", no_wrap=True, justify="right")
    table.add_column("how to get it", overflow="fold")
    for entry in catalog.CATALOG.values():
        state, size = catalog.state(entry, folder), catalog.size(entry, folder)
        table.add_row(
            entry.name,
            Text(state, STATE_COLORS[state]),
            decimal(size) if size else "–",
            _how(entry, state),
        )
    out_console.print(table)


@data_app.command()
def fetch(name: Name, data_dir: DataDir = None) -> None:
    """Download a data set and unpack it; a download that breaks off starts again."""
    from feddf.data import catalog

    entry, folder = _entry(name), catalog.root_of(data_dir)
    if not catalog.missing(entry, folder):
        _say(f"{name} is here already: {folder}")
        return
    try:
        with _shown() as progress:
            catalog.get(entry, folder, progress)
    except KeyboardInterrupt:
        err_console.print(f"stopped; start again with: feddf data fetch {name}", soft_wrap=True, highlight=False)
        raise
    for download in entry.downloads:
        if download.checksum is None:
            _say(f"{download.name}: no checksum of it is known, so its content is unchecked")
    _say(f"{name} is complete: {decimal(catalog.size(entry, folder))} in {folder}")


@data_app.command()
def check(
    name: Annotated[str | None, typer.Argument(help="A data set's name (default: all that are here).")] = None,
    data_dir: DataDir = None,
) -> None:
    """Load data sets as a run would, and say what is in them."""
    from feddf.data import catalog

    folder = catalog.root_of(data_dir)
    there = [entry for entry in catalog.CATALOG.values() if catalog.state(entry, folder) != "missing"]
    entries = [_entry(name)] if name else there
    if not entries:
        _say(f"no data set is in {folder}; feddf data list shows how to get one")
    broken = [entry for entry in entries if not _check(entry, folder)]
    if broken:
        raise typer.Exit(1)


def _entry(name: str) -> Entry:
    from feddf.data.catalog import CATALOG

    if name not in CATALOG:
        raise ConfigError.at("data", name, f"known are {', '.join(CATALOG)}")
    return CATALOG[name]


def _how(entry: Entry, state: str) -> str:
    if state == "here":
        return ""
    unchecked = [download.name for download in entry.downloads if download.checksum is None]
    return entry.how + (f"; unchecked, no checksum is known: {', '.join(unchecked)}" if unchecked else "")


def _check(entry: Entry, folder: Path) -> bool:
    """Say in one line what is in a data set, or what is wrong with it; return whether it is sound."""
    try:
        line = _described(entry, folder)
    except Exception as error:  # a damaged file can fail in any way
        line = first_line(error)
        complain(f"{entry.name}: {line}", "error")
        return False
    _say(f"{entry.name}: {line}")
    return True


def _described(entry: Entry, folder: Path) -> str:
    from feddf.config.sections import DataConfig
    from feddf.data import catalog

    if absent := catalog.missing(entry, folder):
        count = f"{len(absent)} of {len(entry.files)} files are missing" if len(entry.files) > 1 else "it is missing"
        raise ValueError(f"{count} in {folder}, first {absent[0]}; get it: {entry.how}")
    if entry.name in TOKENIZED:
        return f"all files are here, {decimal(catalog.size(entry, folder))}; a run reads them with its tokenizer"
    from feddf.data.datasets import Dataset, wrong_labels

    data: Dataset = DATASETS[entry.name](DataConfig(name=entry.name, folder=str(folder)))
    for part, examples in (("train", data.train), ("test", data.test)):
        if wrong := wrong_labels(examples):
            raise ValueError(f"its {part} part has {wrong}")
    shape = "×".join(map(str, data.shape))
    classes = data.train.n_classes
    return (
        f"{len(data.train)} training and {len(data.test)} test examples, {classes} classes, shape {shape}, "
        f"labels within 0 to {classes - 1}"
    )


@contextmanager
def _shown() -> Iterator[catalog.Progress]:
    """Show downloads as bars with bytes and rate, or as plain lines where there is no terminal."""
    if not out_console.is_terminal:
        yield _lines(_say)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=out_console) as bars:
        yield _bars(bars)


def _bars(bars: Progress) -> catalog.Progress:
    tasks: dict[Download, TaskID] = {}

    def progress(download: Download, done: int, total: int | None) -> None:
        if download not in tasks:
            tasks[download] = bars.add_task(escape(download.name), total=total)
        bars.update(tasks[download], completed=done, total=total)

    return progress


def _lines(say: Callable[[str], None], step: int = 10, chunk: int = 100_000_000) -> catalog.Progress:
    """Return a progress that says a line for each ``step`` per cent, or each ``chunk`` bytes of an unknown total."""
    reached: dict[Download, int] = {}

    def progress(download: Download, done: int, total: int | None) -> None:
        mark = 100 * done // total // step if total else done // chunk
        if download not in reached:
            whole = decimal(total) if total is not None else "unknown size"
            say(f"{download.url}: {whole}")
        elif mark > reached[download]:
            say(f"{download.name}: {decimal(done)}" + (f" of {decimal(total)} ({mark * step} %)" if total else ""))
        reached[download] = mark

    return progress


def _say(text: str) -> None:
    out_console.print(text, soft_wrap=True, highlight=False, markup=False)
