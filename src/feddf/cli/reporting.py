"""``feddf report``, ``presets`` and ``config``: what needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from feddf.cli.arguments import out_console
from feddf.config.presets import presets, read

if TYPE_CHECKING:
    from feddf.config.keys import Key


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where to write the picture of the learning curves.")] = None,
) -> None:
    """Show the results of runs, and draw their learning curves; or make a page of what feddf reproduce found."""
    if len(runs) == 1 and not (runs[0] / "config.toml").is_file() and any(runs[0].glob("*.json")):
        claims_page(runs[0], out)
        return
    summary(runs, out)


def claims_page(folder: Path, out: Path | None) -> None:
    """Write one self-contained page about the results in a folder."""
    from feddf.report.claims import page, read_results
    from feddf.reproduce.artefacts import NAMES, find

    results = read_results(folder)
    there = {one["artefact"] for one in results}
    missing = {name: (find(name).title, f"not run yet: feddf reproduce {name}") for name in NAMES if name not in there}
    path = out or folder / "index.html"
    path.write_text(page(results, missing), encoding="utf-8")
    out_console.print(f"page: {path}", soft_wrap=True)


def summary(paths: list[Path], picture: Path | None = None) -> None:
    """Print the tables of runs and draw the learning curves of each experiment."""
    from feddf.report import tables
    from feddf.report.read import alike, find_runs

    runs = [run for path in paths for run in find_runs(path)]
    out_console.print(tables.runs_table(runs))
    done = [run for run in runs if run.records]
    if done:
        out_console.print(tables.seconds_table(done))
    from feddf.report import plots  # after the tables: matplotlib takes a second to load

    for number, group in enumerate(alike(done), 1):
        path = group[0].path / "curves.png"
        if picture:
            path = picture if number == 1 else picture.with_stem(f"{picture.stem}-{number}")
        plots.learning_curves(group, path)
        out_console.print(f"learning curves: {path}", soft_wrap=True)


def list_presets() -> None:
    """List the experiments that come with feddf."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name in presets():
        table.add_row(name, str(read(name).get("about", "")))
    out_console.print(table)


def config(
    word: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="A key, the last part of one, or a section.", show_default=False),
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print all keys as Markdown tables.")] = False,
) -> None:
    """Explain the keys of a configuration: default, allowed values, meaning. For instance: feddf config distill"""
    from feddf.config.keys import all_keys, find, markdown

    if as_markdown:
        print(markdown(), end="")
        return
    found = find(word) if word else list(all_keys().values())
    out_console.print(_explained(found), soft_wrap=False)


def _explained(keys: list[Key]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("key", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning; allowed values", overflow="fold")
    for key in keys:
        table.add_row(key.name, key.shown_default, f"{key.meaning}\n    {key.allowed}")
    return table
