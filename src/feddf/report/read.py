"""Read run folders. Plain files in, plain values out; torch is not needed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

HARMLESS = ("data_dir", "engine", "workers", "ray_address", "keep_checkpoints", "log_clients", "log_ensemble")
"""Keys that change no model's bytes, as the configuration has them (which needs torch)."""

USUAL: dict[str, Any] = {
    "average_weights": "examples",
    "batchnorm": "average",
    "distill_clip": None,
    "distill_optimizer": "adam",
    "drop_worst": "none",
    "fedma_growth": 1.25,
    "held_out": 0.1,
    "local_binary": "none",
    "local_decay": "none",
    "local_optimizer": "sgd",
    "mode": "cached",
    "pool_augment": False,
    "proximal": 0.0,
    "server_momentum": 0.0,
    "start": "average",
    "stop": "validation",
    "swag_samples": 0,
    "swag_scale": 0.5,
    "teacher_average": "logits",
    "teacher_weights": "uniform",
    "temperature": 1.0,
}
"""The keys that make a method what it is, beside its name, and the value at which they go unsaid."""


class ReportError(Exception):
    """A folder cannot be reported on; the message says why."""


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells it."""

    path: Path
    config: dict[str, Any]
    records: Sequence[dict[str, Any]]

    @property
    def method(self) -> str:
        """The fusion that was used, with all that is unusual about it, for instance "fedavg+proximal=0.01"."""
        unusual = {key: self.config[key] for key in USUAL if key in self.config and self.config[key] != USUAL[key]}
        return "+".join([str(self.config["method"]), *(f"{key}={value}" for key, value in unusual.items())])

    @property
    def seed(self) -> int:
        """The experiment's seed."""
        return int(self.config["seed"])

    @property
    def rounds(self) -> list[int]:
        """The numbers of the rounds played so far."""
        return [record["round"] for record in self.records]

    @property
    def prototypes(self) -> list[str]:
        """The names of the architectures."""
        return sorted(self.records[-1]["models"]) if self.records else []

    def curve(self, prototype: str | None = None, which: str = "fused") -> list[float]:
        """Return test accuracies by round: of one prototype, or the mean over all."""
        names = [prototype] if prototype else self.prototypes
        return [fmean(_number(record["models"][name][which]) for name in names) for record in self.records]

    def ensemble(self) -> list[float]:
        """Return the ensemble's test accuracy by round (not a number where it had none)."""
        return [_number(record["ensemble"]) for record in self.records]

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each stage, over all rounds."""
        total: dict[str, float] = {}
        for record in self.records:
            for stage, value in record["seconds"].items():
                total[stage] = total.get(stage, 0.0) + value
        return total


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def read_run(path: Path) -> Run:
    """Return the run in a folder."""
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"{path} is not a run folder: it has no config.toml") from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ReportError(f"cannot read {path / 'config.toml'}: {error}") from None
    return Run(path, config, _records(path / "metrics.jsonl"))


def find_runs(path: Path) -> list[Run]:
    """Return the run in a folder, or all runs directly below it."""
    if (path / "config.toml").is_file() or not path.is_dir():
        return [read_run(path)]
    found = [read_run(entry) for entry in sorted(path.iterdir()) if (entry / "config.toml").is_file()]
    if not found:
        raise ReportError(f"{path} holds no run")
    return found


def alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs of the same experiment: those that differ in method, seed and length at the most."""
    own = {"name", "about", "method", "seed", "rounds", "versions", *USUAL, *HARMLESS}
    groups: dict[str, list[Run]] = {}
    for run in runs:
        shared = {key: value for key, value in run.config.items() if key not in own}
        groups.setdefault(json.dumps(shared, sort_keys=True), []).append(run)
    return list(groups.values())


def _records(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break  # a line that a crash cut off
    return records
