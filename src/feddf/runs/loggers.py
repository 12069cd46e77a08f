"""Trackers of other people: thin sinks for the numbers of each round. The run folder stays the truth.

A tracker that fails, or whose package is missing, says so once and is left out from then on; a run never stops for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from feddf.config import Record
from feddf.config.errors import reason
from feddf.config.names import TRACKERS
from feddf.runtime.atomic import write_atomically


class Tracker(Protocol):
    """Where numbers go."""

    def __call__(self, round: int, numbers: Mapping[str, float]) -> None:
        """Take in what was measured in a round."""
        ...

    def close(self) -> None:
        """Finish; nothing comes after it."""
        ...


Make = Callable[[Path, Mapping[str, Any], int], Tracker]
"""(run folder, configuration by full names, rounds that are done already) -> a tracker."""


def numbers_of(record: Record) -> dict[str, float]:
    """Return the numbers of a round's record by the names under which they are tracked."""
    found: dict[str, Any] = {f"{name}/{which}": v for name, one in record["models"].items() for which, v in one.items()}
    found |= {"ensemble": record["ensemble"], "avg_logits": record.get("avg_logits")}
    found |= {"clients/used": len(record["clients"])}
    found |= {"clients/dropped": len(record["dropped"]), "bytes/up": sum(record["bytes_up"].values())}
    found |= {"bytes/down": sum(record["bytes_down"].values())}
    found |= {f"seconds/{stage}": value for stage, value in record["seconds"].items()}
    found |= {f"clients/{name}": value for name, value in record["metrics_of_clients"].items()}
    return {name: float(value) for name, value in found.items() if value is not None}


@contextmanager
def open_loggers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], done: int, complain: Callable[[str], None]
) -> Iterator[Callable[[Record], None]]:
    """Give a function that sends a record to all trackers, and close them at the end."""
    open_ones: dict[str, Tracker] = {}

    def attempt(name: str, action: Callable[[], Any]) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # a tracker may chat; the standard output is the command's own
                return action()
        except Exception as error:  # whatever a tracker does, the run goes on
            open_ones.pop(name, None)
            missing = isinstance(error, ImportError) and name in list(TRACKERS)
            why = f"pip install 'feddf[{name}]'" if missing else reason(error)
            complain(f"the tracker '{name}' is left out of this run: {why}")
            return None

    for name in names:
        made = attempt(name, lambda name=name: TRACKERS[name](folder, config, done))  # type: ignore[misc]
        if made is not None:
            open_ones[name] = made

    def send(record: Record) -> None:
        numbers = numbers_of(record)
        for name, tracker in list(open_ones.items()):
            attempt(name, lambda tracker=tracker: tracker(record["round"], numbers))  # type: ignore[misc]

    try:
        yield send
    finally:
        for name, tracker in list(open_ones.items()):
            attempt(name, tracker.close)


class _Tensorboard:
    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
        if not done:
            rows = "".join(f"    {name} = {value}\n" for name, value in config.items())
            self._writer.add_text("configuration", rows, 0)

    def __call__(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Mlflow:
    """The run's id is kept in its folder, so that a resumed run goes on in the same place."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        library: Any = import_module("mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            library.set_tracking_uri("sqlite:///mlruns.db")
        self._client = library.MlflowClient()
        kept, project = folder / "mlflow-run", str(config.get("name", "feddf"))
        if kept.is_file():
            self._run = kept.read_text().strip()
            return
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        for name, value in config.items():
            self._client.log_param(self._run, name, str(value)[:500])
        write_atomically(kept, f"{self._run}\n".encode())

    def __call__(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=round)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _Wandb:
    """Also Trackio, which has the same calls."""

    def __init__(self, run: Any, finish: Callable[[], None]) -> None:
        self._run = run
        self.close = finish

    def __call__(self, round: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=round)


def _identity(folder: Path) -> str:
    """Return a name that follows from the folder's place, so that a resumed run goes on, and no other run joins it."""
    return sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def tensorboard(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """TensorBoard: ``tensorboard --logdir runs`` shows it."""
    return _Tensorboard(folder, config, done)


def mlflow(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """MLflow: the place that the variable MLFLOW_TRACKING_URI names, or the file mlruns.db here."""
    return _Mlflow(folder, config, done)


def wandb(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """Weights & Biases; with the variable WANDB_MODE=offline nothing leaves the machine."""
    library: Any = import_module("wandb")
    project = str(config.get("name", "feddf"))
    run = library.init(
        project=project, name=folder.name, id=_identity(folder), resume="allow", dir=str(folder), config=dict(config)
    )
    return _Wandb(run, run.finish)


def trackio(folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """Trackio, on this machine: ``trackio show``. It knows runs by their names alone."""
    library: Any = import_module("trackio")
    project, name = str(config.get("name", "feddf")), f"{folder.name}-{_identity(folder)[:6]}"
    run = library.init(project=project, name=name, config=dict(config), resume="allow" if done else "never")
    return _Wandb(run, library.finish)  # finished by the run itself, Trackio would finish it again at the end
