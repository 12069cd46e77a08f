"""The settings of a run over Flower, and what clients are told of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from feddf.runs.settings import Settings, Share


class FlowerSettings(Settings):
    """The settings of a run over Flower, as its folder keeps them: feddf's own keys, and what the server was given."""

    transport: Literal["flower"] = "flower"
    engine: Literal["processes", "in-process", "ray"] = "in-process"
    fraction: Share = 1.0
    clients: int = Field(default=2, ge=1)
    deadline: float = Field(default=3600.0, gt=0)
    evaluate_fraction: float = Field(default=0.0, ge=0, le=1)
    prototypes: tuple[str, ...] = ()
    pool_size: int = 0
    validation_size: int = 0

    @field_validator("prototypes", mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        return tuple(given) if isinstance(given, list) else given


def orders(settings: Settings) -> dict[str, Any]:
    """Return what clients are told of local training; FedProx's μ under the name that Flower gives it."""
    told = {
        "local-epochs": settings.local_epochs,
        "local-batch": settings.local_batch,
        "local-rate": settings.local_rate,
        "local-optimizer": settings.local_optimizer,
        "local-decay": settings.local_decay,
        "proximal-mu": settings.proximal,
    }
    return {**told, "disclose": True} if settings.discloses else told
