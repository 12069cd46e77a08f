"""Many experiments: one with several methods, seeds and settings; a run folder for each; run or resumed, n at a time.

The folders are those of ordinary runs: what was stopped is resumed, and what has ended is not run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from feddf.config import Experiment, differences, with_values
from feddf.config.keys import changes_of, default_of, short
from feddf.report.read import read_run
from feddf.rounds import QuorumError
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder, StoreError
from feddf.runtime.atomic import write_atomically
from feddf.saved.model_folder import CARD

FAILED = "failed.txt"


def variant(experiment: Experiment, method: str, others: Sequence[str] = ()) -> Experiment:
    """Return the experiment with a method such as ``fedavg``, ``fedprox`` or ``feddf+prox+swag``.

    What only ``others`` name is at its default: a comparison's ``prox_mu=0.1`` is FedProx's, and not FedAvg's.
    """
    mine, elsewhere = changes_of(method)[1], {key for other in others for key in changes_of(other)[1]}
    return with_values(
        experiment, {"fusion.method": method, **{key: default_of(key) for key in elsewhere - mine.keys()}}
    )


@dataclass(frozen=True)
class Variation:
    """One run of a comparison: what was set (text such as "alpha=0.1", or nothing), the method and the experiment."""

    setting: str
    method: str
    experiment: Experiment

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return "-".join(filter(None, [self.setting, self.method.replace(":", "."), f"seed{self.experiment.seed}"]))


def grid(
    experiment: Experiment,
    methods: Sequence[str],
    seeds: Sequence[int],
    swept: Mapping[str, Sequence[Any]] | None = None,
) -> list[Variation]:
    """Return the experiment for each setting of the swept keys, each seed and each method.

    All have the same shards, sampled clients and local training, as far as their methods have.
    """
    swept = swept or {}
    found = []
    for values in product(*swept.values()):
        setting = dict(zip(swept, values, strict=True))
        label = ",".join(f"{short(key)}={value}" for key, value in setting.items())
        variants = {method: variant(with_values(experiment, setting), method, methods) for method in methods}
        found += [
            Variation(label, method, with_values(variants[method], {"seed": seed}))
            for seed in seeds
            for method in variants
        ]
    return found


def run_many(
    wanted: Mapping[Path, Experiment],
    parallel: int = 0,
    *,
    run: Callable[[Path, Experiment], None] | None = None,
    trust: bool = False,
    complain: Callable[[str], None] = warnings.warn,
) -> Iterator[tuple[Path, str]]:
    """Run or resume the experiments that have not ended; yield each folder when it has, and why its run failed.

    ``parallel`` of them run at a time, each in a process of its own. With 0 they run in this process, one after the
    other, by ``run`` where it is given (which then decides what happens if too few clients answer). A run of which too
    few clients sent a usable update would fail again: the reason is kept in its folder. Any other failure ends all.
    """
    open_folders(wanted, complain)
    left = unfinished(wanted)
    if parallel:
        yield from _run_in_processes(left, parallel, trust)
        return
    for path in left:
        if run is None:
            yield path, _run_here(path, wanted[path], trust)
        else:
            run(path, wanted[path])
            yield path, ""


def open_folders(wanted: Mapping[Path, Experiment], complain: Callable[[str], None]) -> None:
    """Make the run folders that are not there; continue the others, if their runs are the same or shorter."""
    there = {path: (path / "config.toml").exists() for path in wanted}
    for path, experiment in wanted.items():  # all of them before any is made
        if there[path]:
            old = RunFolder.open(path).experiment()
            longer = ["rounds"] if experiment.rounds >= old.rounds else []
            if changed := differences(old, experiment, also_free=longer):
                raise StoreError(f"{path} holds a run with another configuration: {'; '.join(changed)}")
    for path, experiment in wanted.items():
        if not there[path]:
            RunFolder.create(path, experiment)
            continue
        for warning in RunFolder.open(path).continue_as(experiment):
            complain(warning)


def unfinished(paths: Iterable[Path]) -> list[Path]:
    """Return the folders whose runs have rounds to do, or models to write, and did not fail for good."""
    return [path for path in paths if not failure_of(path) and not _is_complete(path)]


def failure_of(path: Path) -> str:
    """Return why a run failed for good, if it did."""
    note = path / FAILED
    return note.read_text(encoding="utf-8") if note.is_file() else ""


def _is_complete(path: Path) -> bool:
    """Say whether all rounds are in the log, and the card, which is written last, is not older than that."""
    log, card = path / "metrics.jsonl", path / CARD
    if not (log.exists() and card.exists() and card.stat().st_mtime_ns >= log.stat().st_mtime_ns):
        return False
    run = read_run(path)
    return bool(max(run.rounds, default=0) >= run.value("rounds"))


def _run_here(path: Path, experiment: Experiment, trust: bool) -> str:
    try:
        for _ in run_experiment(build(experiment, trust=trust), RunFolder.open(path)):
            pass
    except QuorumError as error:
        return _fail(path, str(error))
    return ""


def _fail(path: Path, reason: str) -> str:
    write_atomically(path / FAILED, reason.encode())
    return reason


def _run_in_processes(paths: Sequence[Path], parallel: int, trust: bool) -> Iterator[tuple[Path, str]]:
    workers = max(1, (os.cpu_count() or 1) // parallel)
    running: set[subprocess.Popen[str]] = set()

    def resume(path: Path) -> str:
        command = [sys.executable, "-P", "-m", "feddf", "resume", str(path), f"run.workers={workers}"]
        command += ["--trust"] if trust else []
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.add(process)
        _, complaint = process.communicate()
        running.discard(process)
        if process.returncode == 0:
            return ""
        reason = (complaint.strip().splitlines() or [f"exit code {process.returncode}"])[-1].removeprefix("error: ")
        if process.returncode == QuorumError.exit_code:
            return _fail(path, reason)
        raise StoreError(f"{path}: {reason}")

    with ThreadPoolExecutor(parallel) as pool:
        futures = {pool.submit(resume, path): path for path in paths}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            for process in list(running):
                process.terminate()
            raise
