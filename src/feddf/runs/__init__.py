"""From a configuration to a folder of results."""

from __future__ import annotations

from feddf.runs.build import Parts, build
from feddf.runs.config import Experiment, load, presets
from feddf.runs.run import play
from feddf.runs.settings import ConfigError
from feddf.runs.store import RunFolder, StoreError

__all__ = ["ConfigError", "Experiment", "Parts", "RunFolder", "StoreError", "build", "load", "play", "presets"]
