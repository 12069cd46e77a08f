"""Trackers of experiments: thin sinks for the numbers of each round. The run folder stays the truth.

A missing package is said before anything is trained. A tracker that fails says so once and is left out from then on; a
run never stops for it. One is made by a function of the run folder, the configuration by full names, and the number of
rounds that are done.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from feddf.config import Record
from feddf.config.errors import ConfigError, reason
from feddf.config.names import TRACKERS
from feddf.runtime.atomic import write_atomically


@dataclass(frozen=True)
class Tracker:
    """Where numbers go: called with what was measured in a round; after ``close`` nothing comes."""

    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], Any]

    def __call__(self, round: int, numbers: Mapping[str, float]) -> None:
        """Take in what was measured in a round."""
        self.log(round, numbers)


def numbers_of(record: Record) -> dict[str, float]:
    """Return the numbers of a round's record by the names under which they are tracked."""
    found: dict[str, Any] = {
        **{f"{name}/{which}": value for name, one in record["models"].items() for which, value in one.items()},
        "ensemble": record["ensemble"],
        "avg_logits": record.get("avg_logits"),
        "clients/used": len(record["clients"]),
        "clients/dropped": len(record["dropped"]),
        "bytes/up": sum(record["bytes_up"].values()),
        "bytes/down": sum(record["bytes_down"].values()),
        **{f"seconds/{stage}": value for stage, value in record["seconds"].items()},
        **{f"clients/{name}": value for name, value in record["metrics_of_clients"].items()},
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def check_installed(names: Iterable[str]) -> None:
    """Raise :class:`ConfigError` for a tracker that comes with feddf and whose package does not."""
    for name in set(names) & set(TRACKERS):
        if sys.modules[name] is None if name in sys.modules else find_spec(name) is None:
            allowed = f"its package is missing: pip install 'feddf[{name}]', or leave it out (loggers=[])"
            raise ConfigError.at(TRACKERS.key, name, allowed)


@contextmanager
def open_loggers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], done: int, complain: Callable[[str], None]
) -> Iterator[Callable[[Record], None]]:
    """Give a function that sends a record to all trackers, and close them at the end."""
    check_installed(names)
    trackers: dict[str, Any] = {}

    def attempt(name: str, action: Callable[..., Any], *given: Any) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # a tracker may chat; the standard output is the command's own
                return action(*given)
        except Exception as error:  # whatever a tracker does, the run goes on
            trackers.pop(name, None)
            complain(f"the tracker '{name}' is left out of this run: {reason(error)}")

    def send(record: Record) -> None:
        numbers = numbers_of(record)
        for name, tracker in list(trackers.items()):
            attempt(name, tracker, record["round"], numbers)

    for name in names:
        made = attempt(name, lambda known: TRACKERS[known](folder, config, done), name)
        if made is not None:
            trackers[name] = made
    try:
        yield send
    finally:
        for name, tracker in list(trackers.items()):
            attempt(name, tracker.close)


def tensorboard(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """TensorBoard: ``tensorboard --logdir runs`` shows it."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
    if not done:
        writer.add_text("configuration", "".join(f"    {name} = {value}\n" for name, value in config.items()), 0)

    def log(round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, round)
        writer.flush()

    return Tracker(log, writer.close)


def mlflow(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """MLflow: the place that the variable MLFLOW_TRACKING_URI names, or the file mlruns.db here.

    The run's id is kept in its folder, so that a resumed run goes on in the same place.
    """
    library: Any = import_module("mlflow")
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        library.set_tracking_uri("sqlite:///mlruns.db")
    client, kept = library.MlflowClient(), folder / "mlflow-run"
    if not kept.is_file():
        found = client.get_experiment_by_name(config["name"])
        experiment = found.experiment_id if found else client.create_experiment(config["name"])
        run = client.create_run(experiment, run_name=folder.name).info.run_id
        for name, value in config.items():
            client.log_param(run, name, str(value)[:500])
        write_atomically(kept, f"{run}\n".encode())
    run = kept.read_text().strip()

    def log(round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            client.log_metric(run, name, value, step=round)

    return Tracker(log, partial(client.set_terminated, run))


def wandb(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """Weights & Biases; with the variable WANDB_MODE=offline nothing leaves the machine."""
    place = {"id": _identity(folder), "dir": str(folder), "resume": "allow"}
    run = import_module("wandb").init(project=config["name"], name=folder.name, config=dict(config), **place)
    return Tracker(lambda round, numbers: run.log(dict(numbers), step=round), run.finish)


def trackio(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """Trackio, on this machine: ``trackio show``. It knows runs by their names alone."""
    library, name = import_module("trackio"), f"{folder.name}-{_identity(folder)[:6]}"
    resume = "allow" if done else "never"
    run = library.init(project=config["name"], name=name, config=dict(config), resume=resume)
    # finished by the run itself, Trackio would finish it again at the end
    return Tracker(lambda round, numbers: run.log(dict(numbers), step=round), library.finish)


def _identity(folder: Path) -> str:
    """Return a name that follows from the folder's place, so that a resumed run goes on, and no other run joins it."""
    return sha256(str(folder.resolve()).encode()).hexdigest()[:16]
