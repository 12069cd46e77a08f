"""What an experiment is, as plain checked values. Nothing in this package imports torch.

A section of a configuration file is the frozen type that a component takes: ``[local]`` is :class:`LocalConfig`, which
is handed whole to :func:`feddf.client.local_update`, and so on. Names are loaded when they are first used: a command
that only says what it can do does not wait for the types.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # explicit re-exports; the table below must list the same names
    from feddf.config.errors import ConfigError as ConfigError
    from feddf.config.experiment import Experiment as Experiment
    from feddf.config.experiment import Settings as Settings
    from feddf.config.experiment import differences as differences
    from feddf.config.experiment import load as load
    from feddf.config.experiment import parse as parse
    from feddf.config.experiment import with_values as with_values
    from feddf.config.records import Record as Record
    from feddf.config.sections import ClientsConfig as ClientsConfig
    from feddf.config.sections import DataConfig as DataConfig
    from feddf.config.sections import DistillConfig as DistillConfig
    from feddf.config.sections import EnsembleConfig as EnsembleConfig
    from feddf.config.sections import FedMAConfig as FedMAConfig
    from feddf.config.sections import FusionConfig as FusionConfig
    from feddf.config.sections import LocalConfig as LocalConfig
    from feddf.config.sections import PartitionConfig as PartitionConfig
    from feddf.config.sections import PoolConfig as PoolConfig
    from feddf.config.sections import PrototypeConfig as PrototypeConfig
    from feddf.config.sections import RunConfig as RunConfig
    from feddf.config.sections import SourceConfig as SourceConfig

_HOMES = {
    "errors": "ConfigError",
    "experiment": "Experiment Settings differences load parse with_values",
    "records": "Record",
    "sections": "ClientsConfig DataConfig DistillConfig FedMAConfig FusionConfig LocalConfig PartitionConfig "
    "PoolConfig PrototypeConfig RunConfig SourceConfig EnsembleConfig",
}
_HOME = {name: f"feddf.config.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'feddf.config' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
