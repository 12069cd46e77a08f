"""``feddf fuse`` and ``feddf predict``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from feddf.cli.arguments import Trust, argument, complain, option, out_console, plain, remark, say
from feddf.config.errors import ConfigError
from feddf.config.foreign import parse_toml
from feddf.runtime.atomic import write_atomically

if TYPE_CHECKING:
    from feddf.fusing.fuse import FusionResult
    from feddf.saved.model import Prediction

_TEACHER = 'A model to fuse: a path, or a TOML table such as \'{path = "a.onnx", classes = ["cat", "dog"]}\'.'
_RESUME = "Reuse what an interrupted fusion has cached; a finished one is left as it is."
_OVERRIDES = "The folder to write, and values that replace others, for instance distill.steps=1000."


def fuse(
    config: Annotated[str | None, argument(metavar="[CONFIG.toml]", help="A configuration (docs/fuse.md).")] = None,
    overrides: Annotated[list[str] | None, argument(metavar="[OUT] [KEY=VALUE]...", help=_OVERRIDES)] = None,
    out: Annotated[Path | None, option(help="The folder to write.")] = None,
    teacher: Annotated[list[str] | None, option(help=_TEACHER)] = None,
    student: Annotated[str | None, option(help="The student's architecture, or a TOML table.")] = None,
    unlabeled: Annotated[list[str] | None, option(help="A folder of images, a text file, or a data set.")] = None,
    validation: Annotated[str | None, option(help="Labeled data for early stopping: a data set, or a table.")] = None,
    test: Annotated[str | None, option(help="Labeled data for the report only: a data set, or a table.")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the student as model.onnx too.")] = False,
    cache: Annotated[Path | None, option(help="Where predictions are cached (default: the user's cache).")] = None,
    device: Annotated[str | None, option(help="Where to compute: auto (the default), cpu, cuda, ...")] = None,
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    trust: Trust = False,
) -> None:
    """Fuse trained models of any architecture into one.

    For instance: feddf fuse --teacher A --teacher B.onnx --student resnet8 --unlabeled DIR --out OUT
    """
    words = [*(overrides or []), *([f"run.device={device}"] if device else [])]
    if config is not None and "=" in config and not Path(config).is_file():  # no file, but a first override
        words.insert(0, config)
        config = None
    if out is None and words and "=" not in words[0]:  # feddf fuse CONFIG.toml OUT
        out, words = Path(words[0]), words[1:]
    values = {
        "teachers": [_value(one) for one in teacher] if teacher else None,
        "student": _value(student),
        "pool": {"sources": [_value(one, is_source=True) for one in unlabeled]} if unlabeled else None,
        "validation": _value(validation), "test": _value(test), "onnx": onnx or None, "cache": cache and str(cache),
    }  # fmt: skip
    _fuse(config, values, words, out, resume, trust)


def _fuse(
    config: str | None, values: dict[str, Any], overrides: list[str], out: Path | None, resume: bool, trust: bool
) -> None:
    from feddf.config.fuse_config import load_fuse

    if out is None:
        raise ConfigError("name the folder to write with --out")
    given = load_fuse(config, {key: value for key, value in values.items() if value is not None}, overrides)
    from feddf.fusing.folder import fuse_to_folder, is_result_of

    if resume and is_result_of(out, given):
        say(f"{out} is finished already")
        return
    try:
        with _progress() as progress:
            result = fuse_to_folder(given, out, progress, trust=trust)
    except KeyboardInterrupt:
        remark("stopped; predictions of finished teachers are cached: the same command reuses them")
        raise
    _print_summary(result)
    say(f"model: {out}; its card: {out / 'README.md'}")


def predict(
    folder: Annotated[Path, argument(help="A folder of feddf fuse or feddf run.")],
    inputs: Annotated[list[str], argument(help="Image files, folders of images, or text files.")],
    out: Annotated[Path | None, option(help="FILE.csv or FILE.jsonl (default: CSV to the terminal).")] = None,
    prototype: Annotated[str | None, option(help="One model of a run that has several.")] = None,
    trust: Trust = False,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Classify images or texts with a fused model.

    Prints a line for each, with its class and the probabilities of all classes.
    """
    if out is not None and out.suffix not in (".csv", ".jsonl"):
        raise ConfigError.at("--out", str(out), "must end in .csv or .jsonl")
    from feddf.saved.model_folder import inputs_of, load_model

    model = load_model(folder, prototype, device, trust=trust)
    found = inputs_of(model, inputs)
    rows = zip(found, model.predict(list(found.values())), strict=True)
    text = "".join(_as_json(*row) for row in rows) if out and out.suffix == ".jsonl" else _as_csv(model.classes, rows)
    if out is None:
        print(plain(text), end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode("utf-8", "replace"))
    say(f"{len(found)} predictions: {out}")


def _as_csv(classes: Sequence[str], rows: Iterable[tuple[str, Prediction]]) -> str:
    text = io.StringIO()
    lines = ([name, one.label, *(f"{one.probabilities[each]:.6f}" for each in classes)] for name, one in rows)
    csv.writer(text, lineterminator="\n").writerows([["input", "class", *classes], *lines])
    return text.getvalue()


def _as_json(name: str, one: Prediction) -> str:
    probabilities = {each: round(value, 6) for each, value in one.probabilities.items()}
    return json.dumps({"input": name, "class": one.label, "probabilities": probabilities}, ensure_ascii=False) + "\n"


def _value(text: str | None, *, is_source: bool = False) -> Any:
    """Return a TOML table that was written as an option, or the text; a source that is a folder is all its images."""
    if text is not None and is_source and Path(text).exists():
        return f"{'images' if Path(text).is_dir() else 'lines'}:{text}"
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError as error:
        raise ConfigError(f"'{text}' is not a TOML table: {error}") from None


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that shows how far the teachers are: a bar on a terminal, a line for each elsewhere."""
    begun, lines = set[tuple[str, int]](), not out_console.is_terminal
    with Progress(console=out_console, disable=lines) as bar:
        task = bar.add_task("reading", total=None)

        def update(teacher: str, done: int, total: int) -> None:
            bar.update(task, description=f"evaluating {escape(plain(teacher))}", completed=done, total=total)
            if done < total:
                begun.add((teacher, total))
            elif lines:
                said = "evaluated on" if (teacher, total) in begun else "predictions were cached for"
                say(f"{teacher}: {said} {total} inputs")

        yield update


def _print_summary(result: FusionResult) -> None:
    report = result.report
    for which, figures in report.sets.items():
        numbers = [Column(name, justify="right") for name in ("accuracy %", "of its classes %", "calibration error %")]
        table = Table("model", *numbers, title=f"On {report.sizes[which]} {which} examples")
        for name, one in figures.items():
            table.add_row(name, *(f"{100 * value:.1f}" for value in (one.accuracy, one.own_accuracy, one.ece)))
        out_console.print(table)
    say(f"{len(result.evaluated)} of {len(report.teachers)} teachers were evaluated, the others' predictions cached")
    for name, why in report.outliers.items():
        complain(f"teacher {name} {why}")
