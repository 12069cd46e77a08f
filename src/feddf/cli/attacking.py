"""``feddf attack-matrix``: methods and defences against every attack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddf.cli.arguments import NameOrFile, Out, number, numbers, out_console, share, split_words
from feddf.config.errors import ConfigError
from feddf.config.names import ATTACKS
from feddf.runtime.atomic import write_atomically


def attack_matrix(
    name_or_file: NameOrFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[attacks=A,B] [methods=A,B] [shares=0.2] [alphas=1,0.1] [seeds=0] [parallel=1] [KEY=VALUE]...",
            help="What to set against what (default: all attacks; methods=fedavg,feddf,feddf+robust), and values that "
            "replace those of the configuration.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Run every attack against every method; a matrix that was interrupted goes on where it stopped."""
    from feddf.config import load
    from feddf.experiments import matrix

    defaults = {
        "attacks": ",".join(ATTACKS),
        "methods": "fedavg,feddf,feddf+robust",
        "shares": "0.2",
        "alphas": "1,0.1",
        "seeds": "0",
        "parallel": "1",
    }
    own, rest = split_words(words, defaults)
    base = load(name_or_file, rest)
    attacks = own["attacks"].split(",")
    for attack in attacks:
        ATTACKS.check(attack) if attack != matrix.NONE else None
    shares = [share("shares", text, "shares from 0 to 1, for instance 0.1,0.2") for text in own["shares"].split(",")]
    wanted = matrix.cells(
        attacks, own["methods"].split(","), shares, _floats("alphas", own["alphas"]), numbers("seeds", own["seeds"])
    )
    target = out or Path("runs") / f"{base.name}-attacks"  # the same one every time: it goes on
    every = matrix.experiments(base, wanted)
    for name, failure in matrix.run_cells(every, target, number("parallel", own["parallel"]), _say):
        _say(f"{name}: {failure or 'done'}")
        _write(matrix.Matrix.read(wanted, target), target)
    _write(matrix.Matrix.read(wanted, target), target)
    out_console.print(matrix.Matrix.read(wanted, target).comparison().table())
    _say(f"table: {target / 'matrix.md'}, {target / 'matrix.csv'}; heat map: {target / 'matrix.png'}")


def _write(found: object, target: Path) -> None:
    from feddf.experiments.matrix import Matrix
    from feddf.report import plots

    assert isinstance(found, Matrix)
    table = found.comparison()
    write_atomically(target / "matrix.md", table.markdown().encode())
    write_atomically(target / "matrix.csv", table.csv().encode())
    columns = [f"{method}\nα = {alpha:g}" for _, alpha, method in found.columns]
    plots.heat_map(found.values(), found.attacks, columns, table.title, target / "matrix.png")


def _floats(key: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError.at(key, text, "must be numbers with commas between them, for instance 1,0.1") from None


def _say(text: str) -> None:
    out_console.print(text, soft_wrap=True, highlight=False, markup=False)
