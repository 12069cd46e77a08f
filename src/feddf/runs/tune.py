"""The paper's tuning procedure (appendix C.2): grids that are extended until the best value lies inside them.

Trials are ordinary runs in folders of their own, so tuning goes on where it was stopped. They are compared by the
accuracy on the server's *validation* data; the test accuracy is shown as well and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from feddf.config import ConfigError, Experiment, with_values
from feddf.config.keys import short
from feddf.report.read import Run, read_run
from feddf.report.tables import Comparison, spread, statistics
from feddf.runs.many import failure_of, run_many, unfinished

PAPER: dict[str, tuple[float, ...]] = {
    "local.lr": (0.01, 0.05, 0.1, 0.5, 1.0, 1.5),
    "local.prox_mu": (0.001, 0.01, 0.1, 1.0),
    "fusion.momentum": (0.1, 0.2, 0.3, 0.4),
}
"""The initial grids of appendix C.2."""

EVENLY_SPACED = {"fusion.momentum"}
"""Extended by adding the step; all others by multiplying with the ratio."""

Values = Mapping[str, float]
Grid = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Trial:
    """One setting with all its seeds: what came of it, or why nothing did."""

    values: Values
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
    grid: Grid,
    seeds: Sequence[int],
    out: Path,
    *,
    parallel: int = 1,
    extensions: int = 4,
    trust: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[list[Trial], Trial]:
    """Run every setting of the grid, extend it while the best lies on an edge, and return all trials and the best.

    Each key's grid is extended ``extensions`` times at the most, and not beyond the values that are allowed.
    """
    grids = {key: sorted(set(values)) for key, values in grid.items()}
    left = dict.fromkeys(grids, extensions)
    while True:
        trials = list(_trials(experiment, grids, seeds, out, parallel, trust, say))
        best = max(trials, key=lambda trial: trial.score)
        if best.failure:
            raise ConfigError(f"no setting came to its end; the last reason was: {best.failure}")
        further = {
            key: value
            for key in grids
            if left[key] and (value := beyond(key, grids[key], best.values[key])) is not None
            if _allowed(experiment, {**best.values, key: value})
        }
        if not further:
            return trials, best
        for key, value in further.items():
            say(f"the best {key} = {best.values[key]:g} lies on the edge of its grid, which is extended to {value:g}")
            grids[key], left[key] = sorted([*grids[key], value]), left[key] - 1


def beyond(key: str, values: Sequence[float], best: float) -> float | None:
    """Return the next value outside the (sorted) grid if the best is its first or its last, else ``None``.

    >>> beyond("local.lr", [0.01, 0.1, 1.0], 1.0)
    10.0
    >>> beyond("fusion.momentum", [0.1, 0.2], 0.1)
    0.0
    """
    if len(values) < 2 or best not in (values[0], values[-1]):
        return None
    edge, inside = (values[0], values[1]) if best == values[0] else (values[-1], values[-2])
    if key in EVENLY_SPACED or 0 in (edge, inside):
        return round(2 * edge - inside, 10)
    return float(f"{edge * edge / inside:.3g}")


def table(trials: Sequence[Trial], best: Trial) -> Comparison:
    """Return all settings side by side, the best one marked."""
    keys = list(best.values)
    rows: list[list[str]] = []
    numbers: list[dict[str, object]] = []
    for trial in sorted(trials, key=lambda trial: [trial.values[key] for key in keys]):
        setting = [f"{trial.values[key]:g}" for key in keys]
        values: dict[str, object] = {short(key): trial.values[key] for key in keys}
        if trial.failure:
            rows.append([*setting, "failed", trial.failure[:60], ""])
            numbers.append({**values, "failure": trial.failure})
            continue
        scores = {
            "validation": [validation(run) for run in trial.runs],
            "test": [run.curve()[-1] for run in trial.runs],
        }
        for measure, found in scores.items():
            in_percent = statistics([100 * value for value in found])
            numbers.append({**values, "measure": f"{measure} accuracy in %", **in_percent, "best": int(trial is best)})
        rows.append([*setting, *map(spread, scores.values()), "best" if trial is best else ""])
    return Comparison("Accuracy at the last round, in %", [*map(short, keys), "validation", "test", ""], rows, numbers)


def _trials(
    experiment: Experiment,
    grids: Grid,
    seeds: Sequence[int],
    out: Path,
    parallel: int,
    trust: bool,
    say: Callable[[str], None],
) -> Iterator[Trial]:
    settings = [dict(zip(grids, values, strict=True)) for values in product(*grids.values())]
    wanted = {_folder(out, one, seed): _trial(experiment, {**one, "seed": seed}) for one in settings for seed in seeds}
    left = len(unfinished(wanted))
    for done, (path, failure) in enumerate(run_many(wanted, parallel, trust=trust, complain=say), 1):
        result = f"failed: {failure}" if failure else f"validation {100 * validation(read_run(path)):.1f}"
        say(f"{path.name}: {result} ({done} of {left})")
    for setting in settings:
        mine = [_folder(out, setting, seed) for seed in seeds]
        failures = [text for path in mine if (text := failure_of(path))]
        yield Trial(setting, [read_run(path) for path in mine] if not failures else [], "; ".join(failures))


def _folder(out: Path, setting: Values, seed: int) -> Path:
    return out / f"{','.join(f'{short(key)}={value:.12g}' for key, value in setting.items())}-seed{seed}"


def _trial(experiment: Experiment, values: Values) -> Experiment:
    trial = with_values(experiment, values)
    if trial.data.validation == 0:
        raise ConfigError.at("data.validation", 0.0, "settings are chosen on validation data; hold some out (0.1)")
    return trial


def _allowed(experiment: Experiment, setting: Values) -> bool:
    try:
        with_values(experiment, setting)
    except ConfigError:
        return False
    return True
