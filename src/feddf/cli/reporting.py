"""``feddf report``, ``watch``, ``presets`` and ``config``: what needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from feddf.cli.arguments import argument, give, option, out_console, plain, remark, say
from feddf.config.errors import ConfigError, nearest
from feddf.config.experiment import presets, read
from feddf.config.keys import all_keys, find, markdown
from feddf.report import tables
from feddf.report.read import alike, collect, differing, grouped

Runs = Annotated[
    list[Path] | None, argument(metavar="[RUN]...", help="Run folders, or folders of run folders (default: runs).")
]


PLAIN: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)}
"""The look of a list in columns."""


def report(
    runs: Runs = None,
    out: Annotated[Path | None, option(help="Draw the learning curves: FILE.png, FILE.svg or FILE.pdf.")] = None,
    html: Annotated[Path | None, option(help="Write one page with everything, to be opened or mailed.")] = None,
) -> None:
    """Print the results of runs; write plots (--out) or a page (--html)."""
    if out:
        check_picture(out)
    paths = runs or _default_folder()
    summary(paths, out)  # first: there may be no room for what is written
    if html:
        from feddf.watch.page import write_page

        write_page(paths, html)
        say(f"page: {html}")


def _default_folder() -> list[Path]:
    if not Path("runs").is_dir():
        raise ConfigError("there is no folder 'runs' here; name run folders, or a folder of run folders")
    return [Path("runs")]


def check_picture(path: Path) -> None:
    """Refuse a picture's name with a suffix that cannot be drawn; before matplotlib is loaded, which takes a second."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError.at("--out", str(path), "a picture's name must end in .png, .svg, .pdf")


def summary(paths: list[Path], picture: Path | None = None) -> None:
    """Print the tables of runs, and draw the learning curves of each experiment if a picture is named."""
    runs, skipped = collect(paths)
    for reason in skipped:
        remark(f"skipped: {reason}")
    give(tables.results(runs))
    for mine in grouped(runs, lambda run: f"{run.value('name')} {run.score}").values():  # one scale in each table
        say(tables.runs_table(mine))
    done = [run for run in runs if run.records]
    if not done:
        return
    say(tables.seconds_table(done))
    for run in done:
        if kept := run.records[-1].get("kept_by_clients"):
            say(f"{run.path.name}: what clients keep between rounds takes {kept / 1000:.0f} kB")
    if picture is None:
        return
    from feddf.report import plots  # after the tables: matplotlib takes a second to load

    groups = alike(done)
    for number, group in enumerate(groups, 1):
        path = picture if number == 1 else picture.with_stem(f"{picture.stem}-{number}")
        plots.learning_curves(group, path)
        say(f"learning curves: {path}")
    keys = differing(done, ["task"])
    if len(groups) > 1 and len(keys) == 1 and all(type(run.value(keys[0])) in (int, float) for run in done):
        path = picture.with_stem(f"{picture.stem}-by-{keys[0].rpartition('.')[2]}")
        plots.sweep(done, keys[0], path)
        say(f"accuracy by {keys[0]}: {path}")


def watch(
    runs: Runs = None,
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1 (default: any that is free).", min=0, max=65535)] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Only print the address.")] = False,
) -> None:
    """Show runs in a browser, live.

    Ctrl-C ends it. Only this machine can reach the page.
    """
    from feddf.watch.page import Watch

    paths = runs or _default_folder()
    for path in paths:
        if not path.is_dir():
            raise ConfigError.at("RUN", str(path), "is not a folder; name run folders, or a folder of run folders")
    with Watch(paths, port) as server:
        say(f"{server.address} (Ctrl-C to end)")
        if not no_open:
            import webbrowser

            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def list_presets(
    name: Annotated[str | None, argument(metavar="[NAME]", help="Print this preset as TOML.")] = None,
) -> None:
    """List the experiments that come with feddf, or print one."""
    known = presets()
    if name is not None and name not in known:
        raise ConfigError(f"no preset is called '{name}'; {nearest(name, known)}")
    about = {preset: str(read(preset).get("description", "")) for preset in known}
    give(about if name is None else read(name))
    if name is not None:
        out_console.out(plain(known[name]), end="", highlight=False)
    else:
        say(tables.table_of(["", ""], [], about.items(), show_header=False, **PLAIN))


def config(
    word: Annotated[str | None, argument(metavar="[KEY]", help="A key, the last part of one, or a section.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print all keys as Markdown tables.")] = False,
) -> None:
    """Explain configuration keys, for instance: feddf config distill"""
    if as_markdown:
        print(markdown(), end="")
        return
    keys = find(word) if word else list(all_keys().values())
    give({key.name: {"default": key.shown_default, "allowed": key.allowed, "meaning": key.meaning} for key in keys})
    rows = [(key.name, key.shown_default, f"{key.meaning}\n    {key.allowed}") for key in keys]
    say(tables.table_of(["key", "default", "meaning; allowed values"], [], rows, **PLAIN, header_style="bold"))
