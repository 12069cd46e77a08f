"""Cells as run folders: named by the hash of their configuration, shared by artefacts, run in parallel, resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from feddf.config import Experiment
from feddf.config.keys import flat, is_free
from feddf.experiments.parallel import failure_of, has_ended, run_folders
from feddf.report.read import Run, read_run
from feddf.reproduce.artefact import Artefact, Scale, cells_at
from feddf.reproduce.scales import experiment_of
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder

Say = Callable[[str], None]


def hash_of(experiment: Experiment) -> str:
    """Return a name for all that determines a run's result: equal hashes mean equal models."""
    values = flat(experiment.model_dump(mode="json"))
    kept = {
        name: value
        for name, value in sorted(values.items())
        if not is_free(name, Experiment) and name not in ("name", "about")
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def experiments_of(artefact: Artefact, scale: Scale, seeds: Sequence[int]) -> dict[str, list[Experiment]]:
    """Return the experiments of each cell, one a seed, by the cell's name."""
    return {
        cell.name: [experiment_of(artefact, cell, scale, seed) for seed in seeds] for cell in cells_at(artefact, scale)
    }


def run_cells(
    experiments: Mapping[str, Sequence[Experiment]], folder: Path, parallel: int, say: Say
) -> dict[str, list[Run]]:
    """Run what is not finished yet, and return the runs of each cell. With ``parallel = 0`` all run in this process."""
    unique = {hash_of(one): one for mine in experiments.values() for one in mine}
    for name, experiment in unique.items():
        if not (folder / name / "config.toml").exists():
            RunFolder.create(folder / name, experiment)
    missing = [folder / name for name in unique if not has_ended(folder / name)]
    if len(missing) < len(unique):
        say(f"{len(unique) - len(missing)} of {len(unique)} runs are finished already")
    if parallel:
        for done, (path, failure) in enumerate(run_folders(missing, parallel), 1):
            say(f"{path.name}: {failure or 'done'} ({done} of {len(missing)})")
    else:
        for path in missing:
            list(run_experiment(build(unique[path.name]), RunFolder.open(path)))
    return {
        cell: [read_run(folder / hash_of(one)) for one in mine if not failure_of(folder / hash_of(one))]
        for cell, mine in experiments.items()
    }
