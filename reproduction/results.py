"""What was measured of an artifact: small files with the numbers, the paper's beside them, and how to repeat them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from feddf.config import Experiment
from feddf.report.read import Run
from feddf.runtime.atomic import write_atomically
from reproduction.artifact import Artifact, Cell, cells_at
from reproduction.cells import Asked, Say, experiments_of, hash_of, run_cells
from reproduction.judging import NotReached, Values, judge, verdict
from reproduction.scales import experiment_of, run_on


def reproduce(artifact: Artifact, asked: Asked, say: Say) -> dict[str, Any]:
    """Run the cells that are not finished, and return what was measured and the verdict on the claim.

    It is on the comparisons whose cells are there.
    """
    scale, seeds = asked.scale, asked.seeds
    runs: dict[str, list[Run]] = {}
    values: Values
    experiments: dict[str, list[Experiment]] = {}
    if artifact.compute is not None:
        values = artifact.compute(scale, seeds)
    else:
        experiments = experiments_of(artifact, scale, seeds)
        runs = run_cells(experiments, asked, say)
        values = {k: v for cell, mine in runs.items() if mine for k, v in artifact.values_of(cell, mine).items()}

    def entry(cell: Cell) -> dict[str, Any]:
        configuration = experiment_of(artifact, cell, scale, 0)
        return {
            "row": cell.row,
            "column": cell.column,
            "paper": cell.paper,
            "values": _by_seed(values.get(cell.name, {})),
            "also": {label: _by_seed(values.get(f"{cell.name}: {label}", {})) for label in artifact.also},
            "preset": cell.preset,
            "configuration": configuration.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
            "hashes": [hash_of(one) for one in experiments.get(cell.name, []) if one.seed in values.get(cell.name, {})],
            "curves": [_curve(run) for run in runs.get(cell.name, [])],
        }

    findings = judge(artifact.comparisons, values, {cell.name for cell in cells_at(artifact, scale)})
    return {
        "artifact": artifact.name,
        "title": artifact.title,
        "claim": artifact.claim,
        "verdict": verdict(findings),
        "scale": scale,
        "run_on": run_on(artifact, scale),
        "unit": artifact.unit,
        "seeds": list(seeds),
        "command": f"python -m reproduction {artifact.name} --scale {scale} --seeds {','.join(map(str, seeds))}",
        "findings": [finding.as_json() for finding in findings],
        "cells": [entry(cell) for cell in cells_at(artifact, scale)],
        "hours": round(sum(sum(run.seconds().values()) for mine in runs.values() for run in mine) / 3600, 2),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU used",
        "versions": {name: version(name) for name in ("feddf", "torch", "numpy")},
        "date": date.today().isoformat(),
    }


def _by_seed(values: Mapping[int, float]) -> dict[str, float | str]:
    """Return a number for each seed as JSON can hold it: "> 12" where a target was not reached in 12 rounds."""
    return {str(seed): repr(one) if isinstance(one, NotReached) else round(one, 4) for seed, one in values.items()}


def _curve(run: Run) -> dict[str, list[float | None]]:
    def rounded(values: Sequence[float]) -> list[float | None]:
        return [None if value != value else round(value, 4) for value in values]

    return {
        "averaged": rounded(run.curve(which="averaged")),
        "fused": rounded(run.curve()),
        "ensemble": rounded(run.ensemble()),
    }


def write(found: Mapping[str, Any], folder: Path) -> Path:
    """Write an artifact's results into the folder of their scale; return the file."""
    path: Path = folder / found["scale"] / f"{found['artifact']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    return path
