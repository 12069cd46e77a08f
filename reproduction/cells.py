"""Cells as run folders: named by the hash of their configuration, shared by artifacts, run in parallel, resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from feddf.config import ConfigError, Experiment, differences
from feddf.config.keys import all_keys, flat, is_free
from feddf.report.read import Run, read_run
from feddf.runs.many import FAILED, failure_of, run_many, unfinished
from feddf.runs.store import RunFolder
from feddf.runtime.atomic import write_atomically
from feddf.states import digest
from reproduction.artifact import Artifact, Scale, cells_at
from reproduction.scales import experiment_of

Say = Callable[[str], None]


@cache
def frozen_defaults() -> dict[str, Any]:
    """Return the defaults that a run's name leaves out: those of the day on which the kept runs got their names.

    A key that came later is left out at its own default, so that it changes no name. Whoever changes the default of a
    key that is not in the table adds the old one there: the kept runs had it.
    """
    table: dict[str, Any] = json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))
    later = {name: key.default for name, key in all_keys().items() if name not in table}
    return {**json.loads(json.dumps(later, default=_as_json)), **table}


def _as_json(value: object) -> object:
    """Return what JSON cannot say as something that is no value: a key without a default."""
    return {"needed": repr(value)}


TITLES = ("name", "description")
"""Keys that change no result."""


def decisive_values(experiment: Experiment) -> dict[str, Any]:
    """Return all that determines a run's result and differs from the frozen defaults, by the keys' full names."""
    values = flat(experiment.model_dump(mode="json"))
    return {
        name: _entries(name, value)
        for name, value in sorted(values.items())
        if not is_free(name, Experiment) and name not in TITLES and value != frozen_defaults().get(name)
    }


def _entries(name: str, value: Any) -> Any:
    """Return a value; of the tables in a list, what differs from the defaults of such tables."""
    if not isinstance(value, list):
        return value
    return [
        {key: one for key, one in table.items() if one != frozen_defaults().get(f"{name}.{key}")}
        if isinstance(table, dict)
        else table
        for table in value
    ]


def hash_of(experiment: Experiment) -> str:
    """Return a name for all that determines a run's result: equal hashes mean equal models."""
    return hashlib.sha256(json.dumps(decisive_values(experiment), sort_keys=True).encode()).hexdigest()[:16]


def experiments_of(artifact: Artifact, scale: Scale, seeds: Sequence[int]) -> dict[str, list[Experiment]]:
    """Return the experiments of each cell, one a seed, by the cell's name."""
    return {
        cell.name: [experiment_of(artifact, cell, scale, seed) for seed in seeds] for cell in cells_at(artifact, scale)
    }


KEPT = ("config.toml", "metrics.jsonl", FAILED)
"""What is kept of a finished cell: its configuration and its records, which are small, but no weights."""

HASH = "models.sha256"


def to_do(experiments: Mapping[str, Sequence[Experiment]], kept: Path) -> dict[str, Experiment]:
    """Return the experiments that have no kept result, by their hash."""
    unique = {hash_of(one): one for mine in experiments.values() for one in mine}
    return {name: one for name, one in unique.items() if not is_kept(kept / name, one)}


def is_kept(path: Path, experiment: Experiment) -> bool:
    """Say whether a folder holds the run of this experiment; one of another is a mistake in the table of defaults."""
    if not (path / "config.toml").exists():
        return False
    if changed := differences(RunFolder(path).experiment(), experiment, also_free=TITLES):
        raise ConfigError(
            f"{path} was kept with other values ({'; '.join(changed[:3])}); if a default changed, add the old one to "
            "reproduction/defaults.json"
        )
    return True


@dataclass(frozen=True)
class Asked:
    """How cells are run. Runs go on in ``runs``; what is small of those that have ended is kept in ``kept``.

    ``parallel`` run at a time, in processes of their own, with 0 one after the other in this process. With
    ``only_finished`` nothing is run, and cells may lack runs.
    """

    scale: Scale
    seeds: Sequence[int]
    runs: Path
    kept: Path
    parallel: int
    only_finished: bool = False


def run_cells(experiments: Mapping[str, Sequence[Experiment]], asked: Asked, say: Say) -> dict[str, list[Run]]:
    """Run what is not finished yet, and return the runs of each cell."""
    folder, kept = asked.runs, asked.kept
    missing = to_do(experiments, kept)
    count = len({hash_of(one) for mine in experiments.values() for one in mine})
    if len(missing) < count:
        say(f"{count - len(missing)} of {count} runs are finished already")
    wanted = {folder / name: _as_begun(folder / name, one) for name, one in missing.items() if not asked.only_finished}
    left = unfinished(wanted)
    for path in wanted.keys() - set(left):
        keep(path, kept)
    for done, (path, failure) in enumerate(run_many(wanted, asked.parallel, complain=say), 1):
        keep(path, kept)
        say(f"{path.name}: {failure or 'done'} ({done} of {len(left)})")
    return {
        cell: [read_run(path) for path in (kept / hash_of(one) for one in mine) if _came_to_its_end(path)]
        for cell, mine in experiments.items()
    }


def _as_begun(path: Path, experiment: Experiment) -> Experiment:
    """Return the experiment; where another artifact began its run, as that one names and describes it."""
    return RunFolder(path).experiment() if is_kept(path, experiment) else experiment


def _came_to_its_end(kept: Path) -> bool:
    return (kept / "config.toml").exists() and not failure_of(kept)


def keep(run: Path, kept: Path) -> None:
    """Copy the small files of a finished run; the configuration last, because it says that the others are there.

    The hash of its final models is kept as well: who repeats the run can tell whether all bytes are the same.
    """
    (kept / run.name).mkdir(parents=True, exist_ok=True)
    server, _ = RunFolder.open(run).latest()
    if server is not None:
        write_atomically(kept / run.name / HASH, f"{digest(server.models)}\n".encode())
    for name in reversed(KEPT):
        if (run / name).exists():
            write_atomically(kept / run.name / name, (run / name).read_bytes())
