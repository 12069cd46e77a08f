"""One good model out of many: fusion of neural networks that were trained apart, by ensemble distillation (FedDF).

The pieces compose by plain calls; ``examples/`` shows whole programs. Names are loaded when they are first
used, so that reading configurations and reports does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # explicit re-exports; the table below must list the same names
    from feddf.client import local_update as local_update
    from feddf.config import ClientsConfig as ClientsConfig
    from feddf.config import ConfigError as ConfigError
    from feddf.config import DataConfig as DataConfig
    from feddf.config import DistillConfig as DistillConfig
    from feddf.config import EnsembleConfig as EnsembleConfig
    from feddf.config import Experiment as Experiment
    from feddf.config import FedMAConfig as FedMAConfig
    from feddf.config import FusionConfig as FusionConfig
    from feddf.config import LocalConfig as LocalConfig
    from feddf.config import PartitionConfig as PartitionConfig
    from feddf.config import PoolConfig as PoolConfig
    from feddf.config import PrototypeConfig as PrototypeConfig
    from feddf.config import Record as Record
    from feddf.config import RunConfig as RunConfig
    from feddf.config import Settings as Settings
    from feddf.config import SourceConfig as SourceConfig
    from feddf.config import load as load
    from feddf.config.names import DATASETS as DATASETS
    from feddf.config.names import METHODS as METHODS
    from feddf.config.names import MODELS as MODELS
    from feddf.data.adapters import from_hugging_face as from_hugging_face
    from feddf.data.adapters import from_image_folder as from_image_folder
    from feddf.data.adapters import from_torch as from_torch
    from feddf.data.datasets import Dataset as Dataset
    from feddf.data.partition import dirichlet as dirichlet
    from feddf.data.partition import iid as iid
    from feddf.data.partition import split as split
    from feddf.data.unlabeled import match_inputs as match_inputs
    from feddf.engines.jobs import in_process as in_process
    from feddf.engines.processes import Processes as Processes
    from feddf.evaluate import accuracy as accuracy
    from feddf.fusing.fuse import FusionResult as FusionResult
    from feddf.fusing.fuse import StudentSpec as StudentSpec
    from feddf.fusing.fuse import fuse as fuse
    from feddf.fusing.teachers import TrainedModel as TrainedModel
    from feddf.fusing.teachers import of_module as of_module
    from feddf.fusion.average import average as average
    from feddf.fusion.average import average_by_prototype as average_by_prototype
    from feddf.fusion.average import fedavg as fedavg
    from feddf.fusion.average import momentum as momentum
    from feddf.fusion.distill import distill as distill
    from feddf.fusion.distill import make_students as make_students
    from feddf.fusion.ensemble import avg_logits as avg_logits
    from feddf.fusion.ensemble import avg_probabilities as avg_probabilities
    from feddf.fusion.ensemble import make_ensemble as make_ensemble
    from feddf.fusion.feddf import feddf as feddf
    from feddf.fusion.fedma import fedma as fedma
    from feddf.fusion.select import drop_worst as drop_worst
    from feddf.fusion.swag import swag as swag
    from feddf.outputs import Outputs as Outputs
    from feddf.outputs import classes as classes
    from feddf.rounds import Federation as Federation
    from feddf.rounds import QuorumError as QuorumError
    from feddf.rounds import run_round as run_round
    from feddf.rounds import run_rounds as run_rounds
    from feddf.runs.build import build as build
    from feddf.runs.methods import make_method as make_method
    from feddf.runs.run import run_experiment as run_experiment
    from feddf.runs.store import RunFolder as RunFolder
    from feddf.runtime.execution import Execution as Execution
    from feddf.saved.model_folder import load_model as load_model
    from feddf.states import init_state as init_state
    from feddf.types import Client as Client
    from feddf.types import ClientHalf as ClientHalf
    from feddf.types import Engine as Engine
    from feddf.types import Examples as Examples
    from feddf.types import Failure as Failure
    from feddf.types import Fused as Fused
    from feddf.types import Fusion as Fusion
    from feddf.types import Inputs as Inputs
    from feddf.types import Job as Job
    from feddf.types import LocalTrain as LocalTrain
    from feddf.types import Method as Method
    from feddf.types import Part as Part
    from feddf.types import Prototype as Prototype
    from feddf.types import Reply as Reply
    from feddf.types import Resources as Resources
    from feddf.types import Round as Round
    from feddf.types import Rule as Rule
    from feddf.types import Sent as Sent
    from feddf.types import ServerState as ServerState
    from feddf.types import State as State
    from feddf.types import Steps as Steps
    from feddf.types import Target as Target
    from feddf.types import Training as Training
    from feddf.types import Update as Update
    from feddf.types import WeightedLogits as WeightedLogits

_HOMES = {
    "config": "ClientsConfig ConfigError DataConfig DistillConfig Experiment FedMAConfig FusionConfig LocalConfig "
    "PartitionConfig PoolConfig PrototypeConfig Record RunConfig Settings SourceConfig EnsembleConfig load",
    "config.names": "DATASETS METHODS MODELS",
    "types": "Client ClientHalf Engine Examples Failure Fused Fusion Inputs Job LocalTrain Method Part Prototype Reply "
    "Resources Round Rule Sent ServerState State Steps Target Training Update WeightedLogits",
    "outputs": "Outputs classes",
    "states": "init_state",
    "evaluate": "accuracy",
    "data.adapters": "from_hugging_face from_image_folder from_torch",
    "data.datasets": "Dataset",
    "data.partition": "dirichlet iid split",
    "data.unlabeled": "match_inputs",
    "engines": "Processes in_process",
    "client": "local_update",
    "fusion.average": "average fedavg average_by_prototype momentum",
    "fusion.distill": "distill make_students",
    "fusion.ensemble": "avg_logits avg_probabilities make_ensemble",
    "fusion.feddf": "feddf",
    "fusion.fedma": "fedma",
    "fusion.select": "drop_worst",
    "fusion.swag": "swag",
    "fusing.fuse": "FusionResult StudentSpec fuse",
    "fusing.teachers": "TrainedModel of_module",
    "rounds": "Federation QuorumError run_round run_rounds",
    "runs.build": "build",
    "runs.methods": "make_method",
    "runs.run": "run_experiment",
    "runs.store": "RunFolder",
    "runtime.execution": "Execution",
    "saved.model_folder": "load_model",
}
_HOME = {name: f"feddf.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # it takes longer to load than all the rest here

        return version("feddf")
    if name not in _HOME:
        raise AttributeError(f"module 'feddf' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, "__version__"])
