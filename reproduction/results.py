"""What was measured of an artifact: small files with the numbers, the paper's beside them, and how to repeat them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from feddf.config import Experiment
from feddf.report.read import Run
from feddf.runtime.atomic import write_atomically
from reproduction.artifact import Artifact, Cell, Measured, cells_at, verdict
from reproduction.cells import Asked, Say, experiments_of, hash_of, run_cells
from reproduction.scales import experiment_of, reduction_of


def reproduce(artifact: Artifact, asked: Asked, say: Say) -> dict[str, Any]:
    """Run the cells that are not finished, and return what was measured and the verdict on the claim.

    It is on the comparisons whose cells are there.
    """
    scale, seeds = asked.scale, asked.seeds
    runs: dict[str, list[Run]] = {}
    experiments: dict[str, list[Experiment]] = {}
    if artifact.compute is not None:
        values = artifact.compute(scale, seeds)
    else:
        experiments = experiments_of(artifact, scale, seeds)
        runs = run_cells(experiments, asked, say)
        values = {cell: [artifact.measure(run) for run in mine] for cell, mine in runs.items() if mine}

    def entry(cell: Cell) -> dict[str, Any]:
        configuration = experiment_of(artifact, cell, scale, 0)
        return {
            "row": cell.row,
            "column": cell.column,
            "paper": cell.paper,
            "values": [round(value, 4) for value in values.get(cell.name, [])],
            "preset": cell.preset,
            "configuration": configuration.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
            "hashes": [hash_of(one) for one in experiments.get(cell.name, [])],
            "curves": [_curve(run) for run in runs.get(cell.name, [])],
        }

    findings = [one for one in artifact.check(Measured(values, artifact.higher_is_better)) if one.measured]
    return {
        "artifact": artifact.name,
        "title": artifact.title,
        "claim": artifact.claim,
        "verdict": verdict(findings),
        "scale": scale,
        "reduction": reduction_of(artifact, scale),
        "unit": artifact.unit,
        "seeds": list(seeds),
        "command": f"python -m reproduction {artifact.name} --scale {scale} --seeds {','.join(map(str, seeds))}",
        "findings": [{**asdict(finding), "clear": finding.clear} for finding in findings],
        "cells": [entry(cell) for cell in cells_at(artifact, scale)],
        "hours": round(sum(sum(run.seconds().values()) for mine in runs.values() for run in mine) / 3600, 2),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU used",
        "versions": {name: version(name) for name in ("feddf", "torch", "numpy")},
        "date": date.today().isoformat(),
    }


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
