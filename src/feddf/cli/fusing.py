"""``feddf fuse``, ``inspect``, ``predict``; ``pool``, ``ask`` and ``contributions`` where models are not handed out."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress

from feddf.cli.arguments import (
    Overrides,
    Trust,
    argument,
    complain,
    give,
    option,
    out_console,
    plain,
    remark,
    say,
)
from feddf.config.errors import ConfigError, FeddfError, one_line
from feddf.config.foreign import parse_json, parse_toml, validated
from feddf.report.tables import percent, table_of
from feddf.runtime.atomic import read_regular, write_atomically

if TYPE_CHECKING:
    from feddf.config.fuse_config import FuseConfig
    from feddf.fusing.fuse import FusionResult
    from feddf.saved.model import LoadedModel, Prediction

_TEACHER = 'A model to fuse: a path, or a TOML table such as \'{path = "a.onnx", classes = ["cat", "dog"]}\'.'
_LABELED = "a data set, a table, or all of a folder with a folder of images for each class."
_RESUME = "Reuse what an interrupted fusion has cached; a finished one is left as it is."
_CHECK = "Do everything but the work: how each model is fed, what it returns, and what fusing will cost."
_OVERRIDES = "The folder to write, and values that replace others, for instance distill.steps=1000."


def fuse(
    config: Annotated[str | None, argument(metavar="[CONFIG.toml]", help="A configuration (docs/fuse.md).")] = None,
    overrides: Annotated[list[str] | None, argument(metavar="[OUT] [KEY=VALUE]...", help=_OVERRIDES)] = None,
    out: Annotated[Path | None, option(help="The folder to write.")] = None,
    teacher: Annotated[list[str] | None, option(help=_TEACHER)] = None,
    student: Annotated[str | None, option(help="The student's architecture, or a TOML table.")] = None,
    unlabeled: Annotated[list[str] | None, option(help="A folder of images, a text file, or a data set.")] = None,
    validation: Annotated[str | None, option(help=f"Labeled data for early stopping: {_LABELED}")] = None,
    test: Annotated[str | None, option(help=f"Labeled data for the report only: {_LABELED}")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the student as model.onnx too.")] = False,
    cache: Annotated[Path | None, option(help="Where predictions are cached (default: the user's cache).")] = None,
    device: Annotated[str | None, option(help="Where to compute: auto (the default), cpu, cuda, ...")] = None,
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    check: Annotated[bool, typer.Option("--check", help=_CHECK)] = False,
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
        "teachers": [_value(one, "path") for one in teacher] if teacher else None,
        "student": _value(student, "model"),
        "pool": {"sources": [_source(one) for one in unlabeled]} if unlabeled else None,
        "validation": _value(validation, "name"), "test": _value(test, "name"), "onnx": onnx or None,
        "cache": cache and str(cache),
    }  # fmt: skip
    from feddf.config.fuse_config import load_fuse

    if out is None and not check:
        raise ConfigError("name the folder to write with --out")
    given = load_fuse(config, {key: value for key, value in values.items() if value is not None}, words)
    if check or out is None:
        _check(given, trust)
    else:
        _fuse(given, out, resume, trust)


def _fuse(config: FuseConfig, out: Path, resume: bool, trust: bool) -> None:
    from feddf.fusing.folder import fuse_to_folder, is_result_of, plan
    from feddf.fusing.inputs import FeedingWarning

    if resume and is_result_of(out, config):
        say(f"{out} is finished already")
        return
    planned = None if out.exists() else plan(config, trust=trust)
    for teacher in planned.teachers if planned else ():
        say(f"{teacher.id}: {teacher.feeding.line if teacher.table is None else 'a table of answers'}")
    try:
        with _progress() as progress, warnings.catch_warnings(action="ignore"):
            warnings.simplefilter("always", FeedingWarning)
            warnings.showwarning = lambda message, *_, **__: complain(str(message))
            result = fuse_to_folder(config, out, progress, planned=planned)
    except KeyboardInterrupt:
        remark("stopped; predictions of finished teachers are cached: the same command reuses them")
        raise
    _print_summary(result)
    say(f"model: {out}; its card: {out / 'README.md'}")
    give({"folder": str(out), **asdict(result.report)})


def _check(config: FuseConfig, trust: bool) -> None:
    from feddf.fusing.folder import check, plan

    found = check(config, plan(config, trust=trust))
    for one in found["teachers"]:
        _print_inspection(one)
    say(f"student: {found['student']['fed']}; classes: {', '.join(found['classes'])}")
    answers, steps = found["seconds_of_answers"], found["seconds_of_distillation"]
    memory = found["bytes_of_memory"]
    cost = f"{answers:.0f} s for the teachers' answers to {found['pool_size']} inputs and the labeled ones"
    say(f"about {cost}, {steps:.0f} s for all {config.distill.steps} steps, {memory / 2**20:.0f} MB of memory")
    give(found)


def _asked(teacher: str, unlabeled: list[str], overrides: list[str] | None) -> FuseConfig:
    """Return the configuration of one teacher and a pool; nothing is distilled, so the student is any."""
    from feddf.config.fuse_config import load_fuse

    pool = {"sources": [_source(one) for one in unlabeled]}
    return load_fuse(None, {"teachers": [_value(teacher, "path")], "student": "linear", "pool": pool}, overrides or [])


_POOL = "The agreed inputs: a folder of images, a text file, a table, or a data set."


def pool(
    unlabeled: Annotated[list[str], option(help=_POOL)],
    out: Annotated[Path, option(help="The file to write, pool.json.")],
    overrides: Overrides = None,
    trust: Trust = False,
) -> None:
    """Write down which inputs a pool has, in order, so that all sites answer for the same ones.

    For instance: feddf pool --unlabeled images/ --out pool.json
    """
    from feddf.fusing.asking import pool_identity

    found = pool_identity(_asked("none", unlabeled, overrides), trust=trust)
    write_atomically(out, found.describe().encode())
    if found.duplicates:
        complain(f"{found.duplicates} of {len(found.hashes)} inputs are there twice")
    say(f"{len(found.hashes)} inputs, fingerprint {found.fingerprint[:16]}: {out}")
    give({"pool": str(out), "inputs": len(found.hashes), "fingerprint": found.fingerprint})


def ask(
    model: Annotated[str, argument(metavar="MODEL", help=_TEACHER)],
    unlabeled: Annotated[list[str], option(help=_POOL)],
    out: Annotated[Path, option(help="The file to write, FILE.answers.")],
    overrides: Overrides = None,
    pool: Annotated[Path | None, option(help="A pool.json that the inputs must be.")] = None,
    bits: Annotated[int, option(help="16, or 8.", min=8, max=16)] = 16,
    largest: Annotated[int | None, option(help="Store only so many classes of each input, the largest.", min=1)] = None,
    trust: Trust = False,
) -> None:
    """Let a model answer for unlabeled inputs: a site hands out the answers, and keeps the model.

    For instance: feddf ask model.onnx --unlabeled images/ --pool pool.json --out site-a.answers
    """
    from feddf.fusing import asking

    if bits not in (8, 16):
        raise ConfigError.at("--bits", bits, "must be 8 or 16")
    with _progress() as progress:
        given = _asked(model, unlabeled, overrides)
        found = asking.ask(given, out, bits=bits, largest=largest, agreed=pool, progress=progress, trust=trust)
    if found["duplicates"]:
        complain(f"{found['duplicates']} of {found['inputs']} inputs are there twice")
    say(f"fed {found['fed']}; classes: {', '.join(found['classes'][:12])}")
    say(f"{found['inputs']} answers, {found['bytes'] / 1000:.1f} kB, rounded by at most {found['lost']:.1e}: {out}")
    give(found)


def contributions(
    folder: Annotated[Path, argument(metavar="FOLDER", help="A folder that feddf fuse wrote.")],
) -> None:
    """Show what each teacher of a fusion added: what the ensemble would lose without it.

    On the pool, that is the share of its answers that would change; on labeled data, points of accuracy.
    """
    with one_line(FeddfError, f"{folder} holds no report of a fusion", (OSError, ValueError, KeyError)):
        report = parse_json(read_regular(folder / "report.json"))
        found: dict[str, dict[str, float]] = validated(dict[str, dict[str, float]], report["contributions"])
    give(found)
    names = dict.fromkeys(name for one in found.values() for name in one)
    rows = [[name, *(percent(one[name]) if name in one else "" for one in found.values())] for name in names]
    say(table_of(["teacher"], [f"{which} %" for which in found], rows))


def inspect(
    models: Annotated[list[str], argument(metavar="MODEL...", help=_TEACHER)],
    labeled: Annotated[str | None, option(help=f"Labeled data to try them on: {_LABELED}")] = None,
    trust: Trust = False,
) -> int:
    """Say what models are before they are fused: how each is fed (and its source), what it returns, how good and fast.

    For instance: feddf inspect site-a/ site-b.onnx --labeled digits
    """
    from feddf.config.fuse_config import LabeledConfig, TeacherConfig
    from feddf.fusing.inputs import RawInputs, load_labeled
    from feddf.fusing.inspecting import inspect_teacher
    from feddf.fusing.teachers import read_teacher

    given = LabeledConfig.model_validate(_value(labeled, "name")) if labeled else None
    found: list[dict[str, Any]] = []
    for one in models:
        try:
            for teacher in read_teacher(TeacherConfig.model_validate(_value(one, "path")), trust=trust):
                texts = "tokenizer" in teacher.feeding.values
                examples = load_labeled(given, "labeled", RawInputs(("",)) if texts else None, 0) if given else None
                found.append(inspect_teacher(teacher, examples))
                _print_inspection(found[-1])
        except FeddfError as error:  # the others are looked at all the same
            complain(str(error), "error")
            found.append({"source": one, "error": str(error)})
    give(found)
    return 2 if any("error" in one for one in found) else 0


def _print_inspection(found: dict[str, Any]) -> None:
    names = ", ".join(found["classes"][:12]) + (", ..." if len(found["classes"]) > 12 else "")
    say(f"{found['name']} ({found['source']}, {found['bytes'] / 2**20:.2f} MB)")
    say(f"  takes    {found['takes'] or 'inputs of its own preprocessing'}")
    say(f"  fed      {found['fed']}")
    meant = "" if not (form := found["form"]["positions"]) else f" at {'×'.join(map(str, form))} positions"
    meant = f" of {found['form']['kind']}{meant}" if meant or found["form"]["kind"] != "classes" else ""
    say(f"  returns  {found['n_outputs']} {found['outputs']}{meant} (by {found['outputs_said_by']})")
    say(f"  classes  {names or 'without names'}")
    right = f"{100 * found['accuracy']:.1f} % of {found['of_examples']} examples right, " if "accuracy" in found else ""
    say(f"  tried    {right}{found['seconds_for_1000']:.2f} s for 1,000 inputs")
    if found["warning"]:
        complain(found["warning"])


def predict(
    folder: Annotated[Path, argument(help="A folder of feddf fuse or feddf run.")],
    inputs: Annotated[list[str], argument(help="Image files, folders of images, or text files.")],
    out: Annotated[
        Path | None, option(help="FILE.csv or FILE.jsonl (default: CSV to the terminal); for masks also a folder.")
    ] = None,
    prototype: Annotated[str | None, option(help="One model of a run that has several.")] = None,
    trust: Trust = False,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Classify images or texts with a fused model.

    Prints a line for each, with its class and the probabilities of all classes; its labels; the values of a regression;
    or a line for each token of a text. Masks are written as PNG files whose pixels are class numbers, into a folder.
    """
    from feddf.saved.model_folder import inputs_of, load_model

    model = load_model(folder, prototype, device, trust=trust)
    masks = len(model.spec.outputs.positions) == 2
    if out is not None and out.suffix not in (".csv", ".jsonl") and not (masks and not out.suffix):
        raise ConfigError.at("--out", str(out), f"must end in .csv or .jsonl{', or be a folder for masks' * masks}")
    found = inputs_of(model, inputs)
    predicted = dict(zip(found, model.predict(list(found.values())), strict=True))
    parts = [part for name, one in predicted.items() for part in _parts(model, name, found[name], one)]
    rows = [{**said, **({"probabilities": shares} if shares else {})} for said, shares in parts]
    if out is not None and masks and not out.suffix:
        _write_masks(model, predicted, out)
        out /= "masks.csv"
    if out and out.suffix == ".jsonl":
        text = "".join(f"{dumps(row, ensure_ascii=False)}\n" for row in rows)
    else:
        lines = [{**said, **shares} for said, shares in parts] or [{"input": ""}]
        numbers = ([f"{one:.6f}" if isinstance(one, float) else one for one in line.values()] for line in lines)
        csv.writer(file := io.StringIO(), lineterminator="\n").writerows([list(lines[0]), *numbers])
        text = file.getvalue()
    give(rows)
    if out is None:
        out_console.out(plain(text), end="", highlight=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode("utf-8", "replace"))
    say(f"{len(found)} predictions: {out}")


def _parts(model: LoadedModel, name: str, given: Any, one: Prediction) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield what is said of an input (or of each token of a text), and the probabilities of its classes, if it has any.

    Values are said under their own names.
    """
    from feddf.saved.model import Tokens

    outputs, shares = model.spec.outputs, {each: round(value, 6) for each, value in one.probabilities.items()}
    if len(outputs.positions) != 1:
        yield ({"input": name, **shares}, {}) if outputs.has_units else ({"input": name, "class": one.label}, shares)
        return
    if not isinstance(model.preprocess, Tokens) or one.mask is None:
        raise ConfigError(f"the answers of a model at {outputs.positions[0]} places of no text are not written")
    words = model.preprocess.words(model.preprocess.read([given]))[0]
    for place, (word, said) in enumerate(zip(words, one.mask.movedim(-1, 0), strict=True)):
        each = (
            {"class": model.classes[int(said)]}
            if said.ndim == 0
            else dict(zip(model.classes, said.tolist(), strict=True))
        )
        if word:
            yield {"input": name, "place": place, "token": word, **each}, {}


def _write_masks(model: LoadedModel, predicted: dict[str, Prediction], out: Path) -> None:
    """Write masks as PNG files of a palette, at the size that the model sees; of labels, a file each."""
    from PIL import Image  # who gives images has it

    if model.spec.outputs.has_units or len(model.classes) > 256:
        allowed = "pixels of PNG files are up to 256 classes; use feddf.load_model for others"
        raise ConfigError.at("--out", str(out), allowed)
    out.mkdir(parents=True, exist_ok=True)
    stems = [Path(name).stem for name in predicted]
    for number, (stem, one) in enumerate(zip(stems, predicted.values(), strict=True)):
        name = stem if len(set(stems)) == len(stems) else f"{number}-{stem}"
        assert one.mask is not None, "the model answers at every pixel"
        masks = one.mask[None] if one.mask.ndim == 2 else one.mask
        names = [name] if one.mask.ndim == 2 else [f"{name}-{label}" for label in model.classes]
        for each, mask in zip(names, masks, strict=True):
            picture = Image.fromarray(mask.byte().numpy())
            picture.putpalette([factor * index % 256 for index in range(256) for factor in (37, 151, 83)])
            picture.save(out / f"{each}.png")
    say(f"{len(predicted)} masks: {out}")


def _source(text: str) -> Any:
    """Return a source of the pool: a folder is all its images, a file a table or lines of texts."""
    if _is_table(text) or Path(text).exists():
        return f"{'table' if _is_table(text) else 'images' if Path(text).is_dir() else 'lines'}:{text}"
    if not text.lstrip().startswith("{"):
        from feddf.config.names import SOURCES

        try:
            SOURCES.check(text, "--unlabeled")
        except ConfigError as error:
            raise ConfigError(f"{error}; nor is there a file or folder of that name") from None
    return _value(text)


def _is_table(text: str) -> bool:
    path = Path(text.partition("#")[0])
    return path.suffix.lower() in (".csv", ".parquet") and path.is_file()


def _value(text: str | None, word: str = "") -> Any:
    """Return a TOML table that was written as an option; or the text, as what the key ``word`` says in one."""
    if text is None or not text.lstrip().startswith("{"):
        if word == "name" and text and Path(text).is_dir():
            return {"name": f"folder:{text}", "part": "all"}
        text = f"table:{text}" if word == "name" and text and _is_table(text) else text
        return {word: text} if word and text is not None else text
    with one_line(ConfigError, f"'{text}' is not a TOML table", ValueError):
        return parse_toml(f"value = {text}")["value"]


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that shows how far teachers and student are: a bar on a terminal, a line for each elsewhere."""
    begun, lines = set[tuple[str, int]](), not out_console.is_terminal
    with Progress(console=out_console, disable=lines) as bar:
        task = bar.add_task("reading", total=None)

        def update(teacher: str, done: int, total: int) -> None:
            doing = "distilling the" if teacher == "student" else "evaluating"
            bar.update(task, description=f"{doing} {escape(plain(teacher))}", completed=done, total=total)
            if teacher == "student":
                if lines and done == total:
                    say(f"the student: distilled in {total} steps")
            elif done < total:
                begun.add((teacher, total))
            elif lines:
                said = "evaluated on" if (teacher, total) in begun else "predictions were cached for"
                say(f"{teacher}: {said} {total} inputs")

        yield update


def _print_summary(result: FusionResult) -> None:
    from feddf.fusing.card import all_figures, kept_start, matched

    report = result.report
    for which in report.sets:
        (first, *numbers), rows = all_figures(report, which)
        say(table_of([first], numbers, rows, fold=True, title=f"On {report.sizes[which]} {which} examples"))
    evaluated = len(result.evaluated)
    say(f"teachers evaluated: {evaluated}; with cached predictions or tables: {len(report.teachers) - evaluated}")
    if learned := kept_start(report):
        say(learned)
    for line in matched(report):
        say(line)
    for about in report.teachers:
        if about["outputs"] == "probabilities":
            say(f"{about['name']}: its outputs are probabilities")
    for name, why in report.outliers.items():
        complain(f"teacher {name} {why}")
