"""``feddf report``, ``presets`` and ``config``: what needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from feddf.cli.arguments import AsJson, check_picture, err_console, out_console, print_json
from feddf.config.errors import ConfigError, nearest
from feddf.config.presets import presets, read

if TYPE_CHECKING:
    from feddf.config.keys import Key


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Draw the learning curves: FILE.png, FILE.svg or FILE.pdf.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with everything, to be opened or mailed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the results of runs; write plots (--out) or a page (--html)."""
    if out:
        check_picture(out)
    if html:
        from feddf.watch.page import write_page

        write_page(runs, html)
        if not as_json:
            out_console.print(f"page: {html}", soft_wrap=True)
    summary(runs, out, as_json)


def summary(paths: list[Path], picture: Path | None = None, as_json: bool = False) -> None:
    """Print the tables of runs, and draw the learning curves of each experiment if a picture is named."""
    from feddf.report import tables
    from feddf.report.read import alike, collect, differing

    runs, skipped = collect(paths)
    for reason in skipped:
        err_console.print(f"skipped: {reason}", soft_wrap=True, highlight=False)
    if as_json:
        print_json(tables.results(runs))
        return
    out_console.print(tables.runs_table(runs))
    done = [run for run in runs if run.records]
    if not done:
        return
    out_console.print(tables.seconds_table(done))
    for run in done:
        if kept := run.records[-1].get("kept_by_clients"):
            said = f"{run.path.name}: what clients keep between rounds takes {kept / 1000:.0f} kB"
            out_console.print(said, soft_wrap=True, highlight=False)
    if picture is None:
        return
    from feddf.report import plots  # after the tables: matplotlib takes a second to load

    groups = alike(done)
    for number, group in enumerate(groups, 1):
        path = picture if number == 1 else picture.with_stem(f"{picture.stem}-{number}")
        plots.learning_curves(group, path)
        out_console.print(f"learning curves: {path}", soft_wrap=True)
    keys = differing(done, ["task"])
    if len(groups) > 1 and len(keys) == 1 and all(_is_number(run.value(keys[0])) for run in done):
        path = picture.with_stem(f"{picture.stem}-by-{keys[0].rpartition('.')[2]}")
        plots.sweep(done, keys[0], path)
        out_console.print(f"accuracy by {keys[0]}: {path}", soft_wrap=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def list_presets(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this preset as TOML.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the experiments that come with feddf, or print one."""
    known = presets()
    if name is not None:
        if name not in known:
            raise ConfigError(f"no preset is called '{name}'; {nearest(name, known)}")
        if as_json:
            print_json(read(name))
        else:
            print(known[name], end="")
        return
    about = {preset: str(read(preset).get("description", "")) for preset in known}
    if as_json:
        print_json(about)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for preset, text in about.items():
        table.add_row(preset, text)
    out_console.print(table)


def config(
    word: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="A key, the last part of one, or a section.", show_default=False),
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print all keys as Markdown tables.")] = False,
    as_json: AsJson = False,
) -> None:
    """Explain configuration keys, for instance: feddf config distill"""
    from feddf.config.keys import all_keys, find, markdown

    if as_markdown:
        print(markdown(), end="")
        return
    found = find(word) if word else list(all_keys().values())
    if as_json:
        print_json(
            {key.name: {"default": key.shown_default, "allowed": key.allowed, "meaning": key.meaning} for key in found}
        )
        return
    out_console.print(_explained(found), soft_wrap=False)


def _explained(keys: list[Key]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("key", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning; allowed values", overflow="fold")
    for key in keys:
        table.add_row(key.name, key.shown_default, f"{key.meaning}\n    {key.allowed}")
    return table
