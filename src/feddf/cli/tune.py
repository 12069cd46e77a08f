"""``feddf tune``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tomli_w
import typer

from feddf.cli.words import NameOrFile, Out, apart, free, number, numbers, out_console
from feddf.experiments import tune as tuning
from feddf.runs import ConfigError, Experiment, build, load
from feddf.runs.config import parse


def tune(
    name_or_file: NameOrFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY[=V1,V2,...]... [seeds=0] [parallel=1] [extensions=4] [KEY=VALUE]...",
            help="What to tune, with a grid of your own or the paper's (local_rate, proximal, server_momentum), and "
            "values that replace the configuration's.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Try a grid of values, extend it while the best lies on its edge, and keep the best configuration."""
    own, rest = apart(words, {"seeds": "0", "parallel": "1", "extensions": "4"})
    grid = {key: values for word in rest if (values := _grid(key := word.partition("=")[0], word)) is not None}
    experiment = load(name_or_file, [word for word in rest if word.partition("=")[0] not in grid])
    if not grid:
        known = ", ".join(tuning.PAPER)
        raise ConfigError(f"nothing to tune: name a key ({known}), or give values of your own, for instance alpha=1,10")
    target = out or free(Path("runs") / f"{experiment.name}-tune")
    for key, values in grid.items():
        for value in values:  # a mistake is said before anything is trained
            parse({**experiment.model_dump(), key: value})
    build(experiment)
    trials, best = tuning.tune(
        experiment,
        grid,
        numbers("seeds", own["seeds"]),
        target,
        parallel=number("parallel", own["parallel"]),
        extensions=number("extensions", own["extensions"], least=0),
        say=lambda text: out_console.print(text, soft_wrap=True, highlight=False),
    )
    _keep(experiment, trials, best, target)


def _grid(key: str, word: str) -> Sequence[float] | None:
    """Return the values to try, or ``None`` for a word that is not about tuning."""
    _, equals, text = word.partition("=")
    if not equals:
        if key not in tuning.PAPER:
            raise ConfigError.at(
                key, "no values", f"the paper has grids for {', '.join(tuning.PAPER)} only; give yours"
            )
        return tuning.PAPER[key]
    field = Experiment.model_fields.get(key)
    if "," not in text or field is None or "float" not in str(field.annotation):
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError.at(key, text, "must be numbers with commas between them") from None


def _keep(experiment: Experiment, trials: Sequence[tuning.Trial], best: tuning.Trial, target: Path) -> None:
    result = tuning.table(trials, best)
    (target / "tune.md").write_text(result.markdown(), encoding="utf-8")
    (target / "tune.csv").write_text(result.csv(), encoding="utf-8")
    chosen = parse({**experiment.model_dump(), **best.values}).model_dump(exclude_none=True)
    (target / "best.toml").write_text(tomli_w.dumps(chosen), encoding="utf-8")
    out_console.print(result.table())
    setting = ", ".join(f"{key} = {value:g}" for key, value in best.values.items())
    out_console.print(f"best by validation: {setting}; its configuration: {target / 'best.toml'}", soft_wrap=True)
