"""``feddf doctor``: what works on this machine, and what to set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from feddf.cli.arguments import err_console, out_console

if TYPE_CHECKING:
    from feddf.experiments.health import Health


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for a bug report.")] = False,
) -> None:
    """Try what this machine can do: devices, precisions, compilation, Ray, Flower; takes a minute or two."""
    from feddf.experiments.health import examined

    found = examined(lambda what: err_console.print(f"[dim]trying {escape(what)} ...[/]", highlight=False))
    if as_json:
        print(found.as_json())
    else:
        _show(found)
    if not found.devices["cpu"]["works"]:
        raise typer.Exit(1)


def _show(found: Health) -> None:
    _table("Versions", found.versions)
    _table("Machine", found.machine)
    for name, about in found.devices.items():
        _table(f"Device {name}: {'works' if about['works'] else 'DOES NOT WORK'}", about)
    _table("Checks", found.checks)
    out_console.print("[bold]What to set[/]")
    for line in found.advice:
        out_console.print(f"  {escape(line)}", soft_wrap=True, highlight=False)


def _table(title: str, rows: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), escape(_shown(value)))
    out_console.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
