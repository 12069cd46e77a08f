"""The command line. Commands load torch when they need it, so that help, presets and reports answer at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from feddf.cli.arguments import App, complain, out_console
from feddf.cli.auditing import audit
from feddf.cli.data_sets import data_app
from feddf.cli.doctor import doctor
from feddf.cli.fusing import ask, contributions, fuse, inspect, pool, predict
from feddf.cli.reporting import config, list_presets, report, watch
from feddf.cli.running import resume, run
from feddf.cli.studies import compare, partition, tune
from feddf.config.errors import FeddfError
from feddf.runtime.packages import keep_freed_memory

app = App(
    epilog="Start with: feddf compare demo. Exit codes: 0 done; 1 files, downloads or the machine failed; "
    "2 a mistake in what was asked for; 3 too few clients answered; 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for command in (run, resume, compare, watch, report, config, tune, partition, audit, doctor, fuse, inspect, predict):
    app.command(gives=command not in (watch, tune))(command)
for further in (pool, ask, contributions):
    app.command(gives=True)(further)
app.command("presets", gives=True)(list_presets)
app.add_typer(data_app, name="data")


def _print_version(asked: bool) -> None:
    if asked:
        import feddf

        print(f"feddf {feddf.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and warnings only.")] = False,
) -> None:
    """Merge trained models by ensemble distillation: FedDF and its baselines."""
    out_console.quiet = quiet


def main(commands: App = app) -> None:
    """Run the command line; a user's mistake is one line, never a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    keep_freed_memory()
    sys.exit(guarded(lambda: commands(standalone_mode=False)))


def guarded(action: Callable[[], Any]) -> int:
    """Return the exit code of an action; what went wrong is said in one line.

    0: done; 1: files, downloads or the machine failed; 2: a mistake in what was asked for; 3: too few clients answered;
    130: interrupted.
    """
    try:
        result = action()
    except (FeddfError, OSError, MemoryError) as error:
        complain(str(error) or "there is not enough memory", "error")
        return getattr(error, "exit_code", 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        message = getattr(error, "format_message", None)  # typer's own complaints about the command's words
        if message is None:
            raise
        said = " ".join(message().partition(" (Did you mean")[0].split())  # which click says a second time
        if said:  # there is nothing to say where no command was named, and help was shown
            complain(f"{said} (--help lists what is allowed)", "error")
        return int(getattr(error, "exit_code", 2))
    return int(result or 0)
