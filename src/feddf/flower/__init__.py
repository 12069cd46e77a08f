"""FedDF for Flower: a strategy for clients of different architectures, and a ClientApp around a model and data.

The server's side is :class:`FedDF`, a Flower strategy with a loop of its own; the client's is :func:`client_app`, or an
app of the user's own that says which architecture it has (:func:`introduce`). Needs the extra ``flower``.
"""

from __future__ import annotations

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:
    raise ImportError("feddf.flower needs Flower: pip install 'feddf[flower]'") from error

from feddf.flower.client import client_app, introduce
from feddf.flower.from_experiment import client_app_of, settings_of, strategy_of
from feddf.flower.settings import FlowerClientsConfig, FlowerConfig, FlowerSettings
from feddf.flower.strategy import FedDF

__all__ = [
    "FedDF",
    "FlowerClientsConfig",
    "FlowerConfig",
    "FlowerSettings",
    "client_app",
    "client_app_of",
    "introduce",
    "settings_of",
    "strategy_of",
]
