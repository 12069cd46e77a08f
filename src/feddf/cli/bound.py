"""``feddf bound``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from feddf.cli.words import apart, number, out_console, share
from feddf.experiments.bound import CAVEATS, MEANING, estimate
from feddf.runtime.atomic import write_atomically
from feddf.report import read_run
from feddf.runs import RunFolder, build
from feddf.runs.config import override, parse


def bound(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[epochs=E] [most=2000] [delta=0.05] [KEY=VALUE]...",
            help="Epochs for every model trained here (default: the run's local ones), the most examples of a client "
            "that are looked at, and the bound's probability.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Estimate the terms of the paper's Theorem 5.1 for a run, from all its data."""
    own, rest = apart(words, {"epochs": "", "most": "2000", "delta": "0.05"})
    experiment = RunFolder.open(run).experiment()
    changes = dict(override(word) for word in rest)
    if own["epochs"]:
        changes["local_epochs"] = number("epochs", own["epochs"])
    parts = build(parse({**experiment.model_dump(), **changes}))
    records = read_run(run).records
    found = estimate(
        parts,
        most=number("most", own["most"], least=4),
        delta=share("delta", own["delta"], "a probability, for instance 0.05"),
        ensemble=records[-1]["ensemble"] if records else None,
    )
    table = Table(
        title=f"Terms of Theorem 5.1, {len(found.lambdas)} clients, prototype {experiment.prototypes[0].label}"
    )
    table.add_column("term")
    table.add_column("estimate", justify="right")
    table.add_column("what it is")
    for term, value in found.terms().items():
        table.add_row(term, f"{value:.3f}", MEANING[term])
    if found.ensemble_risk is not None:
        table.add_row("measured", f"{found.ensemble_risk:.3f}", "the ensemble's error on the test data, last round")
    out_console.print(table)
    for caveat in CAVEATS:
        out_console.print(f"- {caveat}")
    write_atomically(run / "bound.json", json.dumps(asdict(found), indent=2).encode())
    out_console.print(f"each client's terms: {run / 'bound.json'}", soft_wrap=True)
