"""Many experiments: one with several methods, seeds and settings; a run folder for each; run or resumed, n at a time.

The folders are those of ordinary runs: what was stopped is resumed, and what has ended is not run again. So is the
paper's tuning procedure (appendix C.2): grids that are extended until the best value lies inside them. Trials are
compared by the accuracy on the server's *validation* data; the test accuracy is shown as well and decides nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product, starmap
from pathlib import Path
from statistics import fmean
from typing import Any

from feddf.config import ConfigError, Experiment, differences, with_values
from feddf.config.errors import FeddfError
from feddf.config.keys import changes_of, default_of, short
from feddf.report.read import Run, read_run, run_folders, scores_of
from feddf.report.tables import Comparison, spread, statistics
from feddf.rounds import QuorumError
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder, StoreError, code_named_in, versions
from feddf.runtime.atomic import write_atomically
from feddf.saved.model_folder import CARD

FAILED = "failed.txt"
Say = Callable[[str], None]


def variant(experiment: Experiment, method: str, others: Sequence[str] = ()) -> Experiment:
    """Return the experiment with a method such as ``fedavg``, ``fedprox`` or ``feddf+prox+swag``.

    What only ``others`` name is at its default: a comparison's ``prox_mu=0.1`` is FedProx's, and not FedAvg's.
    """
    elsewhere = {key for other in others for key in changes_of(other)[1]} - changes_of(method)[1].keys()
    return with_values(experiment, {"fusion.method": method, **{key: default_of(key) for key in elsewhere}})


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
    experiment: Experiment, methods: Sequence[str], seeds: Sequence[int], swept: Mapping[str, Sequence[Any]] = {}
) -> list[Variation]:
    """Return the experiment for each setting of the swept keys, each seed and each method.

    All have the same shards, sampled clients and local training, as far as their methods have.
    """
    found = []
    for setting, seed, method in product(_settings(swept), seeds, methods):
        label = ",".join(f"{short(key)}={value}" for key, value in setting.items())
        base = with_values(experiment, {**setting, "seed": seed})
        found.append(Variation(label, method, variant(base, method, methods)))
    return found


def _settings(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def unused(path: Path) -> Path:
    """Return the path, or the path with the first number after it that no folder has yet."""
    candidates = [path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 10_000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def equal_folder(
    place: Path, wanted: Mapping[str, Experiment], allowed: Callable[[Path], bool] = Path.is_dir
) -> Path | None:
    """Return the folder at a place, or numbered after it, that holds just these runs, by name, under the same versions.

    There is none if the experiments name code of the user's own, which may have changed.
    """
    for folder in sorted(path for path in place.parent.glob("*") if path.name.startswith(place.name)):
        runs = {folder / name: experiment for name, experiment in wanted.items()}
        with suppress(FeddfError):
            if {*run_folders(folder)} == runs.keys() and allowed(folder) and all(starmap(_holds, runs.items())):
                return folder
    return None


def _holds(path: Path, experiment: Experiment) -> bool:
    folder = RunFolder(path)
    same = folder.versions() == versions(experiment) and not differences(folder.experiment(), experiment)
    return same and not code_named_in(experiment)


def run_many(
    wanted: Mapping[Path, Experiment],
    parallel: int = 0,
    *,
    run: Callable[[Path, Experiment], str | None] | None = None,
    trust: bool = False,
    complain: Say = warnings.warn,
) -> Iterator[tuple[Path, str]]:
    """Run or resume the experiments that have not ended; yield each folder when it has, and why its run failed.

    ``parallel`` of them run at a time, each in a process of its own. With 0 they run in this process, one after the
    other, by ``run`` where it is given (which then decides what happens if too few clients answer). A run of which too
    few clients sent a usable update would fail again: the reason is kept in its folder. Any other failure ends all.
    """
    _open_folders(wanted, complain)
    run = run or partial(_run_here, trust=trust)
    if parallel:
        yield from _run_in_processes(unfinished(wanted), parallel, trust)
    else:
        yield from ((path, run(path, wanted[path]) or "") for path in unfinished(wanted))


def _open_folders(wanted: Mapping[Path, Experiment], complain: Say) -> None:
    """Make the run folders that are not there; continue the others, if their runs are the same or shorter."""
    there = {path: RunFolder.open(path) for path in wanted if (path / "config.toml").exists()}
    for path, folder in there.items():  # all of them before any is made
        old, experiment = folder.experiment(), wanted[path]
        longer = ["rounds"] if experiment.rounds >= old.rounds else []
        if changed := differences(old, experiment, also_free=longer):
            raise StoreError(f"{path} holds a run with another configuration: {'; '.join(changed)}")
    for path, experiment in wanted.items():
        if path not in there:
            RunFolder.create(path, experiment)
    for path, folder in there.items():
        for warning in folder.continue_as(wanted[path]):
            complain(warning)


def unfinished(paths: Iterable[Path]) -> list[Path]:
    """Return the folders whose runs have rounds to do, or models to write, and did not fail for good."""
    return [path for path in paths if not failure_of(path) and not is_complete(path)]


def failure_of(path: Path) -> str:
    """Return why a run failed for good, if it did."""
    note = path / FAILED
    return note.read_text(encoding="utf-8") if note.is_file() else ""


def is_complete(path: Path) -> bool:
    """Say whether all rounds are in the log, and the card, which is written last, is not older than that."""
    log, card = path / "metrics.jsonl", path / CARD
    if not (log.exists() and card.exists() and card.stat().st_mtime_ns >= log.stat().st_mtime_ns):
        return False
    run = read_run(path)
    return bool(max(run.rounds, default=0) >= run.value("rounds"))


def _run_here(path: Path, experiment: Experiment, trust: bool) -> str | None:
    try:
        for _ in run_experiment(build(experiment, trust=trust), RunFolder.open(path)):
            pass
    except QuorumError as error:
        write_atomically(path / FAILED, str(error).encode())
        return str(error)
    return None


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
        if process.returncode != QuorumError.exit_code:
            raise StoreError(f"{path}: {reason}")
        write_atomically(path / FAILED, reason.encode())
        return reason

    with ThreadPoolExecutor(parallel) as pool:
        futures = {pool.submit(resume, path): path for path in paths}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise


PAPER: dict[str, tuple[float, ...]] = {
    "local.lr": (0.01, 0.05, 0.1, 0.5, 1.0, 1.5),
    "local.prox_mu": (0.001, 0.01, 0.1, 1.0),
    "fusion.momentum": (0.1, 0.2, 0.3, 0.4),
}
"""The initial grids of appendix C.2. Momentum is extended by adding the step, all others by the ratio."""

OPTION = "prototypes."  # before the name of an option that all architectures have, for instance prototypes.groups


def with_setting(experiment: Experiment, setting: Mapping[str, Any]) -> Experiment:
    """Return the experiment with other values of some keys and options."""
    options = {key.removeprefix(OPTION): value for key, value in setting.items() if key.startswith(OPTION)}
    whole = {name: int(value) if value == int(value) else value for name, value in options.items()}
    changes = {key: value for key, value in setting.items() if not key.startswith(OPTION)}
    if whole:
        changes["prototypes"] = tuple({**one.model_dump(), **whole} for one in experiment.prototypes)
    return with_values(experiment, changes)


@dataclass(frozen=True)
class Trial:
    """One setting with all its seeds: what came of it, or why nothing did."""

    values: Mapping[str, float]
    runs: Sequence[Run]
    failure: str = ""

    @property
    def score(self) -> float:
        """The validation accuracy at the last round: the mean over prototypes and seeds."""
        return fmean(validation(run) for run in self.runs) if not self.failure else float("-inf")


def validation(run: Run) -> float:
    """Return a run's validation accuracy at its last round, the mean over its prototypes."""
    return fmean(model["validation"] for model in run.records[-1]["models"].values())


def tune(
    experiment: Experiment,
    grid: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    out: Path,
    *,
    parallel: int = 1,
    extensions: int = 4,
    trust: bool = False,
    say: Say = print,
) -> tuple[list[Trial], Trial]:
    """Run every setting of the grid, extend it while the best lies on an edge, and return all trials and the best.

    Each key's grid is extended ``extensions`` times at the most, and not beyond the values that are allowed.
    """
    grids = {key: sorted(set(values)) for key, values in grid.items()}
    left = dict.fromkeys(grids, extensions)
    while True:
        trials = list(_trials(experiment, _settings(grids), seeds, out, say, parallel=parallel, trust=trust))
        best = max(trials, key=lambda trial: trial.score)
        if best.failure:
            raise ConfigError(f"no setting came to its end; the last reason was: {best.failure}")
        further: dict[str, float] = {}
        for key in grids:
            value = beyond(key, grids[key], best.values[key]) if left[key] else None
            if value is not None:
                with suppress(ConfigError):  # a value that is not allowed
                    with_setting(experiment, {**best.values, key: value})
                    further[key] = value
        if not further:
            return trials, best
        for key, value in further.items():
            say(f"the best {key} = {best.values[key]:g} lies on the edge of its grid, which is extended to {value:g}")
            grids[key], left[key] = sorted([*grids[key], value]), left[key] - 1


def beyond(key: str, values: Sequence[float], best: float) -> float | None:
    """Return the next value outside the (sorted) grid if the best is its first or its last, else ``None``.

    Options of an architecture are not extended: what they allow is not known here.

    >>> beyond("local.lr", [0.01, 0.1, 1.0], 1.0)
    10.0
    >>> beyond("fusion.momentum", [0.1, 0.2], 0.1)
    0.0
    """
    if len(values) < 2 or best not in (values[0], values[-1]) or key.startswith(OPTION):
        return None
    edge, inside = (values[0], values[1]) if best == values[0] else (values[-1], values[-2])
    if key == "fusion.momentum" or 0 in (edge, inside):
        return round(2 * edge - inside, 10)
    return float(f"{edge * edge / inside:.3g}")


def table(trials: Sequence[Trial], best: Trial) -> Comparison:
    """Return all settings side by side, the best one marked."""
    keys, score = list(best.values), scores_of(best.runs)
    rows: list[list[str]] = []
    numbers: list[dict[str, object]] = []
    for trial in sorted(trials, key=lambda trial: [trial.values[key] for key in keys]):
        setting = [f"{trial.values[key]:g}" for key in keys]
        values: dict[str, object] = {short(key): trial.values[key] for key in keys}
        if trial.failure:
            rows.append([*setting, "failed", trial.failure[:60], ""])
            numbers.append({**values, "failure": trial.failure})
            continue
        scores = {"validation": [*map(validation, trial.runs)], "test": [run.curve()[-1] for run in trial.runs]}
        for measure, found in scores.items():
            in_percent = statistics([100 * value for value in found])
            numbers.append({**values, "measure": f"{measure} {score} in %", **in_percent, "best": int(trial is best)})
        rows.append([*setting, *map(spread, scores.values()), "best" if trial is best else ""])
    title = f"{score[0].upper()}{score[1:]} at the last round, in %"
    return Comparison(title, [*map(short, keys), "validation", "test", ""], rows, numbers)


def _trials(
    experiment: Experiment, settings: Sequence[dict[str, Any]], seeds: Sequence[int], out: Path, say: Say, **how: Any
) -> Iterator[Trial]:
    def folder(setting: Mapping[str, float], seed: int) -> Path:
        return out / f"{','.join(f'{short(key)}={value:.12g}' for key, value in setting.items())}-seed{seed}"

    wanted = {folder(one, seed): with_setting(experiment, {**one, "seed": seed}) for one in settings for seed in seeds}
    if any(trial.data.validation == 0 for trial in wanted.values()):
        raise ConfigError.at("data.validation", 0.0, "settings are chosen on validation data; hold some out (0.1)")
    left = len(unfinished(wanted))
    for done, (path, failure) in enumerate(run_many(wanted, complain=say, **how), 1):
        result = f"failed: {failure}" if failure else f"validation {100 * validation(read_run(path)):.1f}"
        say(f"{path.name}: {result} ({done} of {left})")
    for setting in settings:
        mine = [folder(setting, seed) for seed in seeds]
        failures = "; ".join(filter(None, map(failure_of, mine)))
        yield Trial(setting, [] if failures else [read_run(path) for path in mine], failures)
