"""The experiment that a run's configuration asks for: one value, from which server and clients take their parts."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from feddf import Experiment
from feddf.config import parse
from feddf.runs.build import Task, build_task


def experiment_of(run_config: Mapping[str, Any]) -> Experiment:
    models = [name.strip() for name in str(run_config["models"]).split(",")]
    return parse({
        "name": "feddf-cifar",
        "seed": int(run_config["seed"]),
        "rounds": int(run_config["rounds"]),
        "prototypes": models,
        "data": {
            "name": str(run_config["data"]),
            "folder": str(run_config["data-folder"]),
            "train_size": int(run_config["data-size"]) or None,
        },
        "partition": {"alpha": float(run_config["alpha"])},
        "clients": {"total": int(run_config["clients"]), "fraction": float(run_config["fraction"])},
        "local": {"epochs": int(run_config["local-epochs"])},
        "pool": {"sources": [str(run_config["pool"])]},
        "fusion": {"method": str(run_config["method"])},
        "distill": {"steps": int(run_config["distill-steps"])},
        "run": {"engine": "in-process"},  # of the server's own work: the clients are Flower's
    })  # fmt: skip


@cache
def task_of(experiment: str) -> Task:
    """Return the data in their places; a client's process keeps them from one round to the next."""
    return build_task(Experiment.model_validate_json(experiment))
