"""What an experiment is, as plain checked values. Nothing in this package imports torch.

A section of a configuration file is the frozen type that a component takes: ``[local]`` is :class:`LocalConfig`, which
is handed whole to :func:`feddf.local.local_update`, and so on.
"""

from __future__ import annotations

from feddf.config.errors import ConfigError
from feddf.config.experiment import Experiment, Settings, differences, load, parse, with_values
from feddf.config.presets import presets
from feddf.config.records import Record
from feddf.config.sections import (
    ClientsConfig,
    DataConfig,
    DistillConfig,
    FedMAConfig,
    FusionConfig,
    LocalConfig,
    PartitionConfig,
    PoolConfig,
    PrototypeConfig,
    RunConfig,
    SourceConfig,
    TeachersConfig,
)

__all__ = [
    "ClientsConfig",
    "ConfigError",
    "DataConfig",
    "DistillConfig",
    "Experiment",
    "FedMAConfig",
    "FusionConfig",
    "LocalConfig",
    "PartitionConfig",
    "PoolConfig",
    "PrototypeConfig",
    "Record",
    "RunConfig",
    "Settings",
    "SourceConfig",
    "TeachersConfig",
    "differences",
    "load",
    "parse",
    "presets",
    "with_values",
]
