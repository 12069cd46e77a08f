"""``feddf watch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddf.cli.arguments import out_console
from feddf.config.errors import ConfigError


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...", help="Run folders, or folders of run folders (default: runs).", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1 (default: any that is free).", min=0, max=65535)] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Only print the address.")] = False,
) -> None:
    """Show runs in a browser, live.

    Ctrl-C ends it. Only this machine can reach the page.
    """
    from feddf.watch.http_server import Watch

    paths = runs or [Path("runs")]
    for path in paths:
        if not path.is_dir():
            raise ConfigError.at("RUN", str(path), "is not a folder; name run folders, or a folder of run folders")
    with Watch(paths, port) as server:
        out_console.print(f"{server.address} (Ctrl-C to end)", soft_wrap=True, highlight=False)
        if not no_open:
            import webbrowser

            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
