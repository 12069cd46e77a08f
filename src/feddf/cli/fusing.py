"""``feddf fuse`` and ``feddf predict``."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from feddf.cli.arguments import Trust, complain, err_console, out_console
from feddf.config.errors import ConfigError
from feddf.runtime.atomic import write_atomically

if TYPE_CHECKING:
    from feddf.oneshot.fuse import FusionResult
    from feddf.saved.model import LoadedModel, Prediction


def fuse(
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG.toml]", help="A configuration (docs/fuse.md).", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OUT] [KEY=VALUE]...",
            help="The folder to write, and values that replace others, for instance distill.steps=1000.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write.", show_default=False)] = None,
    teacher: Annotated[
        list[str] | None,
        typer.Option(
            help='A model to fuse: a path, or a TOML table such as \'{path = "a.onnx", classes = ["cat", "dog"]}\'.',
            show_default=False,
        ),
    ] = None,
    student: Annotated[
        str | None, typer.Option(help="The student's architecture, or a TOML table.", show_default=False)
    ] = None,
    unlabeled: Annotated[
        list[str] | None,
        typer.Option(help="Unlabeled inputs: a folder of images, a text file, or a data set.", show_default=False),
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Labelled data for early stopping: a data set, or a table.", show_default=False)
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="Labelled data for the report only: a data set, or a table.", show_default=False)
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the student as model.onnx too.")] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Where answers are remembered (default: the user's cache).", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to compute: auto (the default), cpu, cuda, ...", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after an interruption; a finished fusion is left as it is.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Fuse trained models of any architecture into one, for instance:
    feddf fuse --teacher A --teacher B.onnx --student resnet8 --unlabeled DIR --out OUT
    """
    from feddf.config.fuse_config import load_fuse

    if config is not None and "=" in config and not Path(config).is_file():  # no file, but a first override
        overrides = [config, *(overrides or [])]
        config = None
    if out is None and overrides and "=" not in overrides[0]:  # feddf fuse CONFIG.toml OUT
        out, overrides = Path(overrides[0]), overrides[1:]
    if out is None:
        raise ConfigError("name the folder to write with --out")
    values: dict[str, Any] = {
        "teachers": [_table(one) for one in teacher] if teacher else None,
        "student": _table(student),
        "pool": {"sources": [_source(one) for one in unlabeled]} if unlabeled else None,
        "validation": _table(validation),
        "test": _table(test),
        "onnx": onnx or None,
        "cache": str(cache) if cache else None,
    }
    chosen = [f"run.device={device}"] if device else []
    given = {key: value for key, value in values.items() if value is not None}
    asked = load_fuse(config, given, [*(overrides or []), *chosen])
    from feddf.oneshot.result_folder import fuse_to_folder, is_result_of

    if resume and is_result_of(out, asked):
        out_console.print(f"{out} is finished already", soft_wrap=True, highlight=False)
        return
    try:
        with _shown() as progress:
            result = fuse_to_folder(asked, out, progress, trust=trust)
    except KeyboardInterrupt:
        said = "stopped; the answers of the teachers that were asked are kept. The same command goes on from there"
        err_console.print(said, soft_wrap=True, highlight=False)
        raise
    _summary(result)
    out_console.print(f"model: {out}; its card: {out / 'README.md'}", soft_wrap=True, highlight=False)


def predict(
    folder: Annotated[Path, typer.Argument(help="A folder of feddf fuse or feddf run.", show_default=False)],
    inputs: Annotated[
        list[str], typer.Argument(help="Image files, folders of images, or text files.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="FILE.csv or FILE.jsonl (default: CSV to the terminal).", show_default=False)
    ] = None,
    prototype: Annotated[
        str | None, typer.Option(help="One model of a run that has several.", show_default=False)
    ] = None,
    trust: Trust = False,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Classify images or texts: a line for each, with its class and the probabilities of all classes."""
    if out is not None and out.suffix not in (".csv", ".jsonl"):
        raise ConfigError.at("--out", str(out), "must end in .csv or .jsonl")
    from feddf.oneshot.predict import given, inputs_of
    from feddf.saved.model_folder import load_model

    model = load_model(folder, prototype, device, trust=trust)
    found = inputs_of(model, inputs)
    predictions = model.predict(given(found))
    write = _as_lines if out is not None and out.suffix == ".jsonl" else _as_csv
    text = write(model, [name for name, _ in found], predictions)
    if out is None:
        print(text, end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode())
    out_console.print(f"{len(found)} predictions: {out}", soft_wrap=True, highlight=False)


def _as_csv(model: LoadedModel, names: list[str], predictions: list[Prediction]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["input", "class", *model.classes])
    for name, one in zip(names, predictions, strict=True):
        writer.writerow([name, one.label, *(f"{one.probabilities[label]:.6f}" for label in model.classes)])
    return text.getvalue()


def _as_lines(model: LoadedModel, names: list[str], predictions: list[Prediction]) -> str:
    rows = (
        {"input": name, "class": one.label, "probabilities": {key: round(p, 6) for key, p in one.probabilities.items()}}
        for name, one in zip(names, predictions, strict=True)
    )
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _table(text: str | None) -> Any:
    """Return a TOML table that was written as an option, or the text itself."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"'{text}' is not a TOML table: {error}") from None


def _source(text: str) -> Any:
    """Return a pool source: a folder is all its images, and a file its lines of text."""
    if Path(text).is_dir():
        return f"images:{text}"
    return f"lines:{text}" if Path(text).is_file() else _table(text)


@contextmanager
def _shown() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that shows how far the teachers are asked: a bar on a terminal, a line for each elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    begun: set[tuple[str, int]] = set()
    with Progress(*columns, console=out_console, disable=not out_console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)

        def update(teacher: str, done: int, total: int) -> None:
            bar.update(task, description=f"asking {teacher}", completed=done, total=total)
            if done < total:
                begun.add((teacher, total))
            elif not out_console.is_terminal:
                said = "asked about" if (teacher, total) in begun else "remembered its answers to"
                out_console.print(f"{teacher}: {said} {total} inputs", soft_wrap=True, highlight=False)

        yield update


def _summary(result: FusionResult) -> None:
    report = result.report
    for which, figures in report.sets.items():
        table = Table(title=f"On {report.sizes[which]} {which} examples")
        for column in ("model", "accuracy %", "of its classes %", "calibration error %"):
            table.add_column(column, justify="left" if column == "model" else "right")
        for name, one in figures.items():
            table.add_row(name, *(f"{100 * value:.1f}" for value in (one.accuracy, one.own_accuracy, one.ece)))
        out_console.print(table)
    asked = f"{len(result.asked)} of {len(report.teachers)} teachers were asked, the answers of the others remembered"
    out_console.print(asked, soft_wrap=True, highlight=False)
    for name, why in report.outliers.items():
        complain(f"teacher {name} {why}")
