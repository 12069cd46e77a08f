"""The settings of a run over Flower, and what clients are told of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from feddf.rounds import sample_size
from feddf.runs.settings import Contradiction, Positive, Settings, Share


class FlowerSettings(Settings):
    """The settings of a run over Flower, as its folder keeps them: feddf's own keys, and what the server was given."""

    transport: Literal["flower"] = "flower"
    engine: Literal["processes", "in-process", "ray"] = "in-process"
    fraction: Share = 1.0
    clients: Positive
    deadline: float = Field(default=3600.0, gt=0)
    evaluate_fraction: float = Field(default=0.0, ge=0, le=1)
    train_config: dict[str, bool | int | float | str] = Field(default_factory=dict)
    prototypes: tuple[str, ...] = ()
    pool_size: int = 0
    validation_size: int = 0

    def contradictions(self, *, labelled: bool, pooled: bool) -> Iterator[Contradiction]:
        """Yield what is right alone and wrong together."""
        yield self.method == "fedma", "method", "through Flower there are 'feddf' and 'fedavg'"
        yield from super().contradictions(labelled=labelled, pooled=pooled)
        yield (
            self.evaluate_fraction > 0 and sample_size(self.clients, self.evaluate_fraction) < 1,
            "evaluate_fraction",
            f"no client would be asked of {self.clients}; it must be 0, or above {0.5 / self.clients:g}",
        )

    @field_validator("prototypes", mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        return tuple(given) if isinstance(given, list) else given


def orders(settings: FlowerSettings) -> dict[str, Any]:
    """Return what clients are told of local training; FedProx's μ under the name that Flower gives it."""
    told = {
        "local-epochs": settings.local_epochs,
        "local-batch": settings.local_batch,
        "local-rate": settings.local_rate,
        "local-optimizer": settings.local_optimizer,
        "local-decay": settings.local_decay,
        "proximal-mu": settings.proximal,
    }
    return {**told, **({"disclose": True} if settings.discloses else {}), **settings.train_config}
