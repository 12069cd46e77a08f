"""What the commands have in common: where they print, and how they read their arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from feddf.config.errors import ConfigError


class PlainConsole(Console):
    """Prints what is said as it is: no name of a folder, a model or a client is markup or an escape sequence.

    With ``as_json``, results are printed for programs, and nothing is said.
    """

    as_json = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return the text with every character that is not printable as a question mark."""
        return super().render_str(plain(text), **settings)


out_console, err_console = PlainConsole(), PlainConsole(stderr=True)


def plain(text: str) -> str:
    """Return a text that may come from a file so that it harms no terminal."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def say(found: str | Table) -> None:
    """Print a line of the result, however long, or a table; ``--quiet`` leaves it out."""
    out_console.print(found, soft_wrap=isinstance(found, str))


def remark(text: str) -> None:
    """Print a line beside the result, on standard error."""
    err_console.print(text, soft_wrap=True)


def complain(text: str, kind: Literal["warning", "error"] = "warning") -> None:
    """Say a warning or an error on standard error, in one line."""
    shown = Text.assemble((f"{kind}:", "red" if kind == "error" else "yellow"), f" {plain(' '.join(text.split()))}")
    err_console.print(shown, soft_wrap=True)


def give(found: object) -> None:
    """Print a command's result for programs where ``--json`` asks for it: JSON alone on the standard output."""
    if out_console.as_json:
        text = json.dumps(found, indent=2, ensure_ascii=False)
        print(text if text == plain(text) else json.dumps(found, indent=2))


class Command(TyperCommand):
    """A command whose positional arguments keep their help.

    (Flower holds typer at 0.20, and click 8.5 drops the help that this typer gives it.)
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        hints = get_type_hints(self.callback, include_extras=True) if self.callback else {}
        for parameter in self.params:
            if getattr(parameter, "help", None) is None and parameter.name in hints:
                setattr(parameter, "help", next((found.help for found in hints[parameter.name].__metadata__), None))  # noqa: B010 (an option has none)


class App(typer.Typer):
    """A group of such commands, each with the option ``--quiet``, and ``--json`` if its function calls :func:`give`."""

    def command(self, name: str | None = None, *, gives: bool = False, **rest: Any) -> Callable[[Any], Any]:
        """Return a decorator that adds a command."""
        add = super().command(name, **{"cls": Command, **rest})
        return lambda function: add(with_output(function, gives))


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and warnings only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def with_output(function: Callable[..., Any], gives: bool) -> Callable[..., Any]:
    """Return a command's function with ``quiet`` and perhaps ``as_json`` added to the signature that typer reads.

    Options are made by typer alone: the constructors of its classes differ from version to version.
    """

    @wraps(function)
    def command(*, quiet: bool = False, as_json: bool = False, **given: Any) -> Any:
        before = out_console.quiet, out_console.as_json
        out_console.quiet, out_console.as_json = before[0] or quiet or as_json, as_json
        try:
            return function(**given)
        finally:
            out_console.quiet, out_console.as_json = before

    options = {"as_json": AsJson, "quiet": Quiet} if gives else {"quiet": Quiet}
    more = [Parameter(one, Parameter.KEYWORD_ONLY, default=False, annotation=kind) for one, kind in options.items()]
    parameters = [*signature(function, eval_str=True).parameters.values(), *more]
    setattr(command, "__signature__", Signature(parameters))  # noqa: B010 (typing knows no such attribute)
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


argument, option = partial(typer.Argument, show_default=False), partial(typer.Option, show_default=False)
"""For values whose default is nothing, or is in the help."""

NameOrFile = Annotated[str, argument(help="A preset's name or a TOML file.")]
Overrides = Annotated[
    list[str] | None, argument(metavar="[KEY=VALUE]...", help="Values to replace, as in alpha=0.1 local.epochs=5.")
]
Trust = Annotated[bool, typer.Option("--trust", help="Run code that files made elsewhere (.pt2, ...) hold or name.")]
Seeds = Annotated[str, typer.Option(help="Seeds, with commas between them.")]
Out = Annotated[Path | None, typer.Option(help="The folder to write to (default: a new one below runs/).")]


def seeds_of(text: str) -> list[int]:
    """Return the seeds that the option ``--seeds`` gives."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        allowed = "must be whole numbers of at least 0 with commas between them, for instance 1,2"
        raise ConfigError.at("--seeds", text, allowed)
    return [int(part) for part in parts]
