"""FedDF for Flower: a strategy for clients of different architectures, and a ClientApp around a model and data.

The server's side is :class:`FedDF`, a Flower strategy with a loop of its own; the client's is :func:`client_app`, or an
app of the user's own that says which architecture it has (:func:`announce`). Needs the extra ``flower``.
"""

from __future__ import annotations

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:
    raise ImportError("feddf.flower needs Flower: pip install 'feddf[flower]'") from error

from feddf.flower.client import announce, client_app, client_app_of
from feddf.flower.settings import FlowerConfig, FlowerSettings, settings_of
from feddf.flower.strategy import FedDF, strategy_of

__all__ = [
    "FedDF",
    "FlowerConfig",
    "FlowerSettings",
    "announce",
    "client_app",
    "client_app_of",
    "settings_of",
    "strategy_of",
]
