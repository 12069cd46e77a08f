"""One good model out of many: fusion of neural networks that were trained apart, by ensemble distillation (FedDF).

The pieces compose by plain calls; ``examples/`` shows whole programs. Names are loaded when they are first
used, so that reading reports (``feddf.report``) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddf.data.datasets import DATASETS, Dataset
    from feddf.data.partition import dirichlet, iid, split
    from feddf.data.unlabeled import adapt
    from feddf.engines.in_process import in_process
    from feddf.engines.processes import Processes
    from feddf.evaluate import accuracy
    from feddf.fusion.average import average, fedavg
    from feddf.fusion.distill import Schedule
    from feddf.fusion.ensemble import avg_logits
    from feddf.fusion.feddf import feddf
    from feddf.local import local_update
    from feddf.models import MODELS
    from feddf.rounds import Federation, QuorumError
    from feddf.runs.build import build
    from feddf.runs.config import Experiment, load
    from feddf.runs.run import play
    from feddf.runs.settings import ConfigError
    from feddf.runs.store import RunFolder
    from feddf.states import initial
    from feddf.types import (
        Client,
        Examples,
        Failure,
        Fused,
        Inputs,
        Job,
        Prototype,
        Round,
        ServerState,
        Update,
    )

_HOMES = {
    "types": "Client Examples Failure Fused Inputs Job Prototype Round ServerState Update",
    "states": "initial",
    "evaluate": "accuracy",
    "data": "DATASETS Dataset dirichlet iid split",
    "data.unlabeled": "adapt",
    "models": "MODELS",
    "engines": "Processes in_process",
    "local": "local_update",
    "fusion": "Schedule average avg_logits fedavg feddf",
    "rounds": "Federation QuorumError",
    "runs": "ConfigError Experiment RunFolder build load play",
}
_HOME = {name: f"feddf.{module}" for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'feddf' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


__all__ = [
    "DATASETS",
    "MODELS",
    "Client",
    "ConfigError",
    "Dataset",
    "Examples",
    "Experiment",
    "Failure",
    "Federation",
    "Fused",
    "Inputs",
    "Job",
    "Processes",
    "Prototype",
    "QuorumError",
    "Round",
    "RunFolder",
    "Schedule",
    "ServerState",
    "Update",
    "accuracy",
    "adapt",
    "average",
    "avg_logits",
    "build",
    "dirichlet",
    "fedavg",
    "feddf",
    "iid",
    "in_process",
    "initial",
    "load",
    "local_update",
    "play",
    "split",
]
