"""``python -m reproduction``: a table or figure by its name, the page of claims, the theorem's terms, the attacks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from feddf.cli import main
from feddf.cli.arguments import App, NameOrFile, Overrides, Trust, out_console, say, seeds_of
from feddf.config.errors import ConfigError, FeddfError
from feddf.runtime.atomic import write_atomically
from reproduction import NAMES, find

if TYPE_CHECKING:
    from reproduction.artifact import Artifact
    from reproduction.cells import Asked
    from reproduction.theorem import Bound

ATTACKED = Path(__file__).with_name("attacked-digits.toml")
Seeds = Annotated[str, typer.Option(help="Seeds with commas between them.")]
Parallel = Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of its own.")]


class Artifacts(TyperGroup):
    """Commands among which the name of a table or figure, alone or with options, runs that."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command for the first word; ``bound`` with a run after it is a command, and else an artifact."""
        alone = args[0] in NAMES and (len(args) == 1 or args[1].startswith("-"))
        return super().resolve_command(ctx, ["run", *args] if alone or args[0] not in self.commands else args)


app = App(
    cls=Artifacts,
    help="Reproduce the paper's tables and figures, for instance: python -m reproduction table1 --scale smoke",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def list_artifacts(
    context: typer.Context,
    list_all: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
) -> None:
    """List the tables and figures."""
    if context.invoked_subcommand is None or list_all:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name in NAMES:
            table.add_row(name, find(name).title)
        out_console.print(table)
        raise typer.Exit


@app.command("run")
def reproduce(
    artifact: Annotated[
        str, typer.Argument(help="A table or figure of the paper, several with commas between them, or 'all'.")
    ],
    scale: Annotated[str, typer.Option(help="paper, cpu (a stated reduction) or smoke (seconds).")] = "cpu",
    seeds: Seeds = "0,1,2",
    parallel: Parallel = 1,
    runs: Annotated[Path, typer.Option(help="Where runs go on, to be resumed.")] = Path("runs/cells"),
    out: Annotated[Path, typer.Option(help="Where results are written and finished runs are found.")] = Path("results"),
    estimate_only: Annotated[bool, typer.Option("--estimate", help="Only say how long it would take.")] = False,
    only_finished: Annotated[bool, typer.Option("--finished", help="Run nothing; judge by the finished runs.")] = False,
) -> None:
    """Run a table or figure and check its claim (the word 'run' may be left out)."""
    from reproduction.artifact import SCALES
    from reproduction.cells import Asked

    if scale not in SCALES:
        raise ConfigError.at("--scale", scale, f"must be one of {', '.join(SCALES)}")
    chosen = [find(name) for name in (NAMES if artifact == "all" else artifact.split(","))]
    workers, failed = 0 if scale == "smoke" else parallel, []
    asked = Asked(scale, seeds_of(seeds), runs, out / "cells", workers, only_finished)
    for one in chosen:
        try:
            if _estimate(one, asked) and not estimate_only:
                _reproduce(one, asked, out)
        except FeddfError as error:
            if len(chosen) == 1:
                raise
            failed.append(one.name)  # the others do not depend on it
            say(f"{one.name}: {error}")
    if failed:
        raise FeddfError(f"not reproduced, for the reasons above: {', '.join(failed)}")


def _estimate(artifact: Artifact, asked: Asked) -> bool:
    """Say how long an artifact takes; return whether there is anything to do for it."""
    from reproduction.cells import experiments_of, to_do
    from reproduction.estimate import seconds_of

    experiments = experiments_of(artifact, asked.scale, asked.seeds)
    if not experiments:
        say(f"{artifact.name}: nothing to do at the scale '{asked.scale}'")
    elif asked.only_finished and artifact.compute is not None:
        say(f"{artifact.name}: is computed, not run; leave out --finished")
        return False
    elif asked.parallel and artifact.compute is None and not asked.only_finished:
        left = to_do(experiments, asked.kept)
        hours = seconds_of(left.values(), asked.parallel) / 3600
        less = ", or less where students stop early" if any(one.distills for one in left.values()) else ""
        runs = f"{len(left)} run{'' if len(left) == 1 else 's'}"
        say(f"{artifact.name}: {runs} to do, about {hours:.1f} hours here{less}")
    return bool(experiments)


def _reproduce(artifact: Artifact, asked: Asked, out: Path) -> None:
    from reproduction.results import reproduce, write

    found = reproduce(artifact, asked, lambda text: say(f"{artifact.name}: {text}"))
    if asked.only_finished and not any(finding["seeds"] for finding in found["findings"]):
        say(f"{artifact.name}: nothing that could be compared is finished")
    else:
        say(f"{artifact.name}: {found['verdict']} ({write(found, out)})")


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="The folder of the results.")] = Path("results"),
    html: Annotated[Path | None, typer.Option(help="Write one page with everything.", show_default=False)] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/results.md.")] = False,
) -> None:
    """Show the verdict on every claim, and write a self-contained page about them if asked to."""
    from reproduction import page

    titles = {name: (find(name).title, f"not run yet: python -m reproduction {name}") for name in NAMES}
    found = page.read_results(results)
    rows = page.verdicts(found, titles)
    if markdown:
        typer.echo(page.markdown(rows, titles), nl=False)
        return
    table = Table("claim", "scale", "verdict", "comparisons", "seeds", "runs", box=None, padding=(0, 3, 0, 0))
    for row in rows:
        table.add_row(*row[:-1])
    out_console.print(table)
    say(page.summary(found))
    if html is not None:
        write_atomically(html, page.page(found, titles).encode())
        say(f"page: {html}")


@app.command("measure-points")
def measure_points(seeds: Seeds = "0,1,2") -> None:
    """Measure the points of the one-round study that are not kept yet (minutes each; hours in all)."""
    from reproduction import one_round

    for point in one_round.measure_points(one_round.KEPT, seeds_of(seeds), {}):
        say(json.dumps(point))


@app.command()
def check() -> None:
    """Check the checks: feed each with the paper's numbers, swapped ones, equal ones, and unreached targets."""
    from reproduction.checks import mistakes

    found = [line for name in NAMES for line in mistakes(find(name))]
    for line in found:
        say(line)
    if found:
        raise FeddfError(f"{len(found)} checks judge wrongly")
    say(f"the checks of {len(NAMES)} artifacts judge as they should")


@app.command()
def regions(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="The seed of data, models and training.")] = 5,
    out: Annotated[Path, typer.Option(help="The picture to write: png, svg or pdf.")] = Path("regions.png"),
) -> None:
    """Draw the decision regions of Figure 1: local, averaged, fused and ensemble models of the preset toy (20 s)."""
    from feddf.config import load
    from feddf.report.tables import percent, table_of
    from feddf.runs.build import build
    from reproduction.regions import draw_regions

    found = draw_regions(build(load("toy", [*(overrides or []), f"seed={seed}"])), out)
    rows = [(title, percent(accuracy)) for title, accuracy in found]
    say(table_of(["model"], ["accuracy"], rows, title="Accuracy on the global distribution, in %"))
    say(f"decision regions: {out}")


@app.command()
def bound(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    overrides: Overrides = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of every model trained here (default: the run's local ones).")
    ] = None,
    most: Annotated[int, typer.Option(min=4, help="The most examples of a client that are looked at.")] = 2000,
    delta: Annotated[float, typer.Option(min=0, max=1, help="The bound's probability.")] = 0.05,
    trust: Trust = False,
) -> None:
    """Estimate the terms of the paper's Theorem 5.1 for a run, from all its data."""
    from feddf.config import parse, with_values
    from feddf.report.read import ensemble_accuracy, read_run
    from feddf.runs.build import build
    from feddf.runs.store import RunFolder
    from reproduction.theorem import estimate

    folder = RunFolder.open(run)
    folder.check_trust(trust)
    experiment = parse(folder.experiment().model_dump(), overrides=overrides or [])
    if epochs is not None:
        experiment = with_values(experiment, {"local.epochs": epochs})
    records = read_run(run).records
    ensemble = ensemble_accuracy(records[-1]) if records else None
    found = estimate(build(experiment, trust=trust), most=most, delta=delta, ensemble=ensemble)
    _show(found, experiment.prototypes[0].label)
    write_atomically(run / "bound.json", json.dumps(asdict(found), indent=2).encode())
    say(f"each client's terms: {run / 'bound.json'}")


def _show(found: Bound, label: str) -> None:
    from reproduction.theorem import CAVEATS, MEANING

    table = Table(title=f"Terms of Theorem 5.1, {len(found.lambdas)} clients, prototype {label}")
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


@app.command()
def attacks(
    name_or_file: NameOrFile = str(ATTACKED),
    overrides: Overrides = None,
    attacks: Annotated[str, typer.Option(help="Names with commas between them, or 'all'.")] = "all",
    methods: Annotated[str, typer.Option(help="What they are tried against.")] = "fedavg,feddf,feddf+robust",
    shares: Annotated[str, typer.Option(help="Shares of the clients that are hostile.")] = "0.2",
    alphas: Annotated[str, typer.Option(help="Degrees of label skew.")] = "1,0.1",
    seeds: Seeds = "0",
    parallel: Parallel = 1,
    out: Annotated[Path | None, typer.Option(help="The folder to write to.", show_default=False)] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Copy configurations and records there.", show_default=False)
    ] = None,
    show_kept: Annotated[
        bool, typer.Option(help="Run nothing: print the table of what is in results/attacks.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Run every attack against every method; a matrix that was interrupted goes on where it stopped."""
    from feddf.config import load
    from reproduction import attack_matrix

    if show_kept:
        print(attack_matrix.kept_table(), end="")
        return

    base = load(name_or_file, overrides or [])
    chosen = attack_matrix.NAMES if attacks == "all" else attacks.split(",")
    wanted = attack_matrix.cells(
        chosen, methods.split(","), _floats("--shares", shares), _floats("--alphas", alphas), seeds_of(seeds)
    )
    target = out or Path("runs") / f"{base.name}-attacks"  # the same one every time: it goes on
    found = attack_matrix.run_matrix(base, wanted, target, parallel, say, trust, keep)
    out_console.print(found.comparison().table())
    say(f"table: {target / 'matrix.md'}, {target / 'matrix.csv'}; heat map: {target / 'matrix.png'}")


def _floats(key: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError.at(key, text, "must be numbers with commas between them, for instance 1,0.1") from None


if __name__ == "__main__":
    main(app)
