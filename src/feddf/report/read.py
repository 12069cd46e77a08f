"""Read run folders. Plain files in, plain values out; torch is not needed."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, cast

from feddf.config.errors import FeddfError, one_line
from feddf.config.experiment import presets
from feddf.config.foreign import parse_toml
from feddf.config.keys import all_keys, changes_of, default_of, flat, short, short_name
from feddf.config.records import Record, is_record
from feddf.runtime.atomic import read_json_lines, read_regular

TESTED = "tested.json"
"""The file of a finished run that says how its final models answer the test inputs of each class."""

_OWN = ("name", "description", "seed", "rounds")
"""Keys in which runs of one experiment may differ."""


class ReportError(FeddfError):
    """A folder cannot be reported on; the message says why."""

    exit_code = 2


def ensemble_accuracy(record: Mapping[str, Any]) -> Any:
    """Return the accuracy of the ensemble that taught; where the method has none, of the clients' averaged logits."""
    taught = record.get("ensemble") is not None or "no_ensemble" in record
    return record.get("ensemble" if taught else "avg_logits")


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells it."""

    path: Path
    config: dict[str, Any]
    """The configuration, by the full names of the keys."""
    records: Sequence[Record]
    usual: Collection[str] = ()
    """Keys that the method's name leaves out (see :func:`compared_as_one`)."""

    def value(self, name: str) -> Any:
        """Return the value of a key; its default, where the run's folder does not say (``None`` for an unknown key)."""
        known = all_keys().get(name)
        return self.config.get(name, known and known.default)

    @property
    def method(self) -> str:
        """The method, with all that is unusual about it (see :func:`method_name`)."""
        return method_name(self.config, self.usual)

    @property
    def over_flower(self) -> bool:
        """Whether the clients were Flower's: then it is not known what data they have."""
        return any(name.startswith("flower.") for name in self.config)

    @property
    def seed(self) -> int:
        """The experiment's seed."""
        return int(self.value("seed"))

    @property
    def rounds(self) -> list[int]:
        """The numbers of the rounds that are done."""
        return [record["round"] for record in self.records]

    @property
    def prototypes(self) -> list[str]:
        """The names of the architectures."""
        return sorted(self.records[-1]["models"]) if self.records else []

    @property
    def score(self) -> str:
        """The name of the score: accuracy, unless the run's outputs are scored otherwise."""
        return str(self.records[-1].get("score", "accuracy")) if self.records else "accuracy"

    def curve(self, prototype: str | None = None, which: Literal["averaged", "fused"] = "fused") -> list[float]:
        """Return test accuracies by round: of one prototype, or the mean over all."""
        names = [prototype] if prototype else self.prototypes
        if prototype and prototype not in self.prototypes:
            return [nan for _ in self.records]
        return [fmean(_number(record["models"][name][which]) for name in names) for record in self.records]

    def ensemble(self) -> list[float]:
        """Return the ensemble's test accuracy by round (not a number where it had none)."""
        return [_number(ensemble_accuracy(record)) for record in self.records]

    @property
    def seconds_a_round(self) -> float:
        """The mean seconds of a round (not a number before the first)."""
        spent = self.seconds()
        whole = sum(spent.get(stage, 0.0) for stage in ("train", "fuse", "evaluate"))  # 'ask' and 'distill' are in fuse
        return whole / len(self.records) if self.records else nan

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each stage, over all rounds."""
        total: dict[str, float] = defaultdict(float)
        for record in self.records:
            for stage, value in record.get("seconds", {}).items():
                total[stage] += value
        return dict(total)


def seeds_of(runs: Sequence[Run]) -> str:
    """Return the seeds of runs in words."""
    seeds = sorted({run.seed for run in runs})
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def scores_of(runs: Sequence[Run]) -> str:
    """Return the names of the runs' scores."""
    return " or ".join(dict.fromkeys(run.score for run in runs)) or "accuracy"


def method_name(config: Mapping[str, Any], usual: Collection[str] = ()) -> str:
    """Return a configuration's method, with all that is unusual about it but the ``usual`` keys.

    >>> method_name({"fusion.method": "fedavg", "local.prox_mu": 0.1})
    'fedprox+prox_mu=0.1'
    >>> method_name({"fusion.method": "feddf", "fusion.parts": ["class-counts"]})
    'feddf+class-counts'
    """
    unusual = {
        name: value
        for name, value in config.items()
        if _kind(name) == "method" and name not in ("fusion.method", "fusion.parts")
        if name not in all_keys() or value != all_keys()[name].default
    }
    base = short_name(str(config.get("fusion.method", default_of("fusion.method"))), unusual)
    implied = changes_of(base)[1]
    said = {name: value for name, value in unusual.items() if implied.get(name) != value and name not in usual}
    keys = (f"{short(name)}={value}" for name, value in said.items())
    return "+".join([base, *config.get("fusion.parts", ()), *keys])


def _number(value: float | None) -> float:
    return nan if value is None else value


def read_run(path: Path) -> Run:
    """Return the run in a folder."""
    try:
        config = parse_toml(read_regular(path / "config.toml").decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ReportError(f"{path} is not a run folder: it has no config.toml") from None
    except (OSError, ValueError) as error:
        raise ReportError(f"cannot read {path / 'config.toml'}: {error}") from None
    values = flat(config)
    known = {*all_keys(), "versions", "flower", ""}
    if other := [name for name in values if not {name, name.rpartition(".")[0]} & known]:
        raise ReportError(f"{path} is a run of another version: it has the key '{other[0]}'")
    lines, _ = read_json_lines(path / "metrics.jsonl", is_record)  # a damaged line may still be JSON
    return Run(path, values, cast(list[Record], lines))


def run_folders(path: Path) -> list[Path]:
    """Return a folder itself, if it is a run's, or the run folders one or two levels below it."""
    if os.access(path / "config.toml", os.F_OK):
        return [path]
    return [found.parent for pattern in ("*/config.toml", "*/*/config.toml") for found in sorted(path.glob(pattern))]


def collect(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return all runs in some paths, and a line about each that cannot be read; refuse if there is no run at all."""
    runs: list[Run] = []
    skipped: list[str] = []
    for path in dict.fromkeys(folder for given in paths for folder in run_folders(given) or [given]):
        try:
            runs.append(_read_whole(path))
        except ReportError as error:
            skipped.append(str(error))
    if not runs:
        raise ReportError("; ".join(skipped))
    return runs, skipped


def _read_whole(path: Path) -> Run:
    """Return a run of which all that a report shows can be read."""
    if path.is_dir() and not (path / "config.toml").is_file():
        raise ReportError(f"{path} holds no run")
    run, log = read_run(path), path / "metrics.jsonl"
    if not run.records and read_json_lines(log, is_record)[1] and read_regular(log).strip():
        raise ReportError(f"{path} is damaged: no line of its log is a round's record")
    with one_line(ReportError, f"{path} is damaged"):
        _ = int(run.value("rounds")), run.seed, run.method, run.curve(), run.curve(None, "averaged"), run.ensemble()
    return run


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that tell them apart."""
    names = [path.name or str(path) for path in paths]
    both = zip(names, paths, strict=True)
    return [name if names.count(name) == 1 else f"{path.parent.name}/{name}" for name, path in both]


def differing(runs: Sequence[Run], kinds: Sequence[str] = ("task", "method")) -> list[str]:
    """Return the keys of some kinds in which runs differ, without the method's name, the seed and the length."""
    names = dict.fromkeys(name for run in runs for name in run.config if _kind(name) in kinds)
    return [name for name in names if name not in (*_OWN, "fusion.method") and len(values_of(runs, name)) > 1]


def values_of(runs: Sequence[Run], name: str) -> set[str]:
    """Return the values of a key, as texts."""
    return {json.dumps(run.value(name), sort_keys=True, default=str) for run in runs}


def setting(run: Run, names: Sequence[str]) -> str:
    """Return the values of some keys as text, for instance "alpha=0.1, local.epochs=5"."""
    values = [(name, run.value(name)) for name in names]
    return ", ".join(f"{short(name)}={f'{value:g}' if isinstance(value, float) else value}" for name, value in values)


def every_prototype(runs: Sequence[Run]) -> list[str]:
    """Return the architectures of all runs: one may have others than the next."""
    return list(dict.fromkeys(name for run in runs for name in run.prototypes))


def grouped(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    """Return the runs that are alike in something, by what that is."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def by_seed(runs: Iterable[Run]) -> dict[int, Run]:
    """Return a run for each seed: a seed that was run twice counts once, as far as it got."""
    return {run.seed: run for run in sorted(runs, key=lambda run: len(run.records))}


def alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs of the same experiment: those that differ in method, seed and length at the most."""

    def experiment(run: Run) -> str:
        shared = {name: value for name, value in run.config.items() if _kind(name) == "task" and name not in _OWN}
        return json.dumps(shared, sort_keys=True, default=str)

    return [side_by_side(group) for group in grouped(runs, experiment).values()]


def side_by_side(runs: Sequence[Run]) -> list[Run]:
    """Return runs that are shown together, their methods named by what differs.

    So a name has neither what all of several methods share nor, where there is one method only, what the preset sets.
    """
    first = runs[0]
    if len({run.method for run in runs}) > 1:
        usual = {name for name in first.config if len(values_of(runs, name)) == 1}
    else:
        preset = flat(parse_toml(presets().get(str(first.value("name")), "")))
        usual = {name for name, value in preset.items() if first.value(name) == value}
    return [replace(run, usual=usual) for run in runs]


def _kind(name: str) -> str:
    """Return what a change of a key means (see :mod:`feddf.config.sections`)."""
    if name.startswith("versions."):
        return "execution"
    table = name.rpartition(".")[0]  # an entry of a table of options
    known = all_keys().get(name) or all_keys().get(table)
    return known.kind if known else "task"
