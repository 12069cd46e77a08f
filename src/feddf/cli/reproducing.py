"""``feddf reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from feddf.cli.arguments import numbers, out_console
from feddf.config.errors import ConfigError, FeddfError

if TYPE_CHECKING:
    from feddf.reproduce.artefact import Artefact, Scale


def reproduce(
    artefact: Annotated[
        str | None,
        typer.Argument(
            metavar="[ARTEFACT]",
            help="A table or figure of the paper, several with commas between them, or 'all'.",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[str, typer.Option(help="paper, cpu (a stated reduction) or smoke (seconds).")] = "cpu",
    seeds: Annotated[str, typer.Option(help="Seeds with commas between them.")] = "0,1,2",
    parallel: Annotated[int, typer.Option(help="Runs at a time, each in a process of its own.")] = 1,
    runs: Annotated[Path, typer.Option(help="Where runs go on, to be resumed.")] = Path("runs/cells"),
    out: Annotated[Path, typer.Option(help="Where the results are written, and finished runs found.")] = Path(
        "results"
    ),
    list_all: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    estimate_only: Annotated[bool, typer.Option("--estimate", help="Only say how long it would take.")] = False,
    only_finished: Annotated[bool, typer.Option("--finished", help="Run nothing; judge by the finished runs.")] = False,
) -> None:
    """Run a table or figure of the paper and check its claim, for instance: feddf reproduce table1 --scale smoke"""
    from feddf.reproduce.artefact import SCALES
    from feddf.reproduce.artefacts import NAMES, find

    if list_all or artefact is None:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name in NAMES:
            table.add_row(name, find(name).title)
        out_console.print(table)
        return
    if scale not in SCALES:
        raise ConfigError.at("--scale", scale, f"must be one of {', '.join(SCALES)}")
    chosen = [find(name) for name in (NAMES if artefact == "all" else artefact.split(","))]
    wanted, failed = numbers("--seeds", seeds), []
    for one in chosen:
        try:
            _reproduce(one, scale, wanted, parallel, runs, out, estimate_only, only_finished)
        except FeddfError as error:
            if len(chosen) == 1:
                raise
            failed.append(one.name)  # the others do not depend on it
            out_console.print(f"{one.name}: {error}", soft_wrap=True, highlight=False, markup=False)
    if failed:
        raise FeddfError(f"not reproduced, for the reasons above: {', '.join(failed)}")


def _reproduce(
    artefact: Artefact,
    scale: Scale,
    seeds: list[int],
    parallel: int,
    runs: Path,
    out: Path,
    estimate_only: bool,
    only_finished: bool,
) -> None:
    from feddf.reproduce.cells import experiments_of, to_do
    from feddf.reproduce.estimate import seconds_of
    from feddf.reproduce.results import reproduce, write

    name, experiments = artefact.name, experiments_of(artefact, scale, seeds)
    if not experiments:
        out_console.print(f"{name}: nothing to do at the scale '{scale}'", soft_wrap=True)
        return
    if only_finished and artefact.compute is not None:
        out_console.print(f"{name}: is computed, not run; leave out --finished", soft_wrap=True)
        return
    left = to_do(experiments, out / "cells")
    if scale != "smoke" and artefact.compute is None and not only_finished:
        hours = seconds_of(left.values(), parallel) / 3600
        what = f"{len(left)} run{'s' if len(left) != 1 else ''} to do"
        less = ", or less where students stop early" if any(one.distils for one in left.values()) else ""
        out_console.print(f"{name}: {what}, about {hours:.1f} hours here{less}", soft_wrap=True)
    if estimate_only:
        return

    def say(text: str) -> None:
        out_console.print(f"{name}: {text}", soft_wrap=True, highlight=False, markup=False)

    workers = 0 if scale == "smoke" else parallel
    found = reproduce(artefact, scale, seeds, runs, out / "cells", workers, say, only_finished)
    if only_finished and not found["findings"]:
        say("nothing that could be compared is finished")
        return
    path = write(found, out)
    say(f"{found['verdict']} ({path})")
