"""What an experiment is, as plain checked values. Nothing in this package imports torch.

A section of a configuration file is the frozen type that a component takes: ``[local]`` is :class:`LocalConfig`, which
is handed whole to :func:`feddf.client.local_update`, and so on. Names are loaded when they are first used: a command
that only says what it can do does not wait for the types.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddf.config.errors import ConfigError
    from feddf.config.experiment import Experiment, Settings, differences, load, parse, with_values
    from feddf.config.records import Record
    from feddf.config.sections import (
        ClientsConfig,
        DataConfig,
        DistillConfig,
        EnsembleConfig,
        FedMAConfig,
        FusionConfig,
        LocalConfig,
        PartitionConfig,
        PoolConfig,
        PrototypeConfig,
        RunConfig,
        SourceConfig,
    )

__all__ = [
    "ClientsConfig", "ConfigError", "DataConfig", "DistillConfig", "EnsembleConfig", "Experiment", "FedMAConfig",
    "FusionConfig", "LocalConfig", "PartitionConfig", "PoolConfig", "PrototypeConfig", "Record", "RunConfig",
    "Settings", "SourceConfig", "differences", "load", "parse", "with_values",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'feddf.config' has no attribute {name!r}")
    homes = (vars(import_module(f"feddf.config.{home}")) for home in ("errors", "records", "sections", "experiment"))
    return next(home[name] for home in homes if name in home)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
