"""The settings of a run over Flower, and what clients are told of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import field_validator

from feddf.config import ClientsConfig, FusionConfig, LocalConfig, RunConfig, Settings
from feddf.config.experiment import Mistake
from feddf.config.sections import Section, cohort_size, key
from feddf.runs.methods import part_names

PARTS_ORDER = "parts"
"""The order that names the parts of the method, with commas between them."""


class FlowerClientsConfig(ClientsConfig):
    """``[clients]`` over Flower: all take part unless told otherwise, and each has an hour to answer."""

    number: int = key(..., "how many clients are expected", ge=1)
    fraction: float = key(1.0, "C, the share of the clients that take part in a round", gt=0, le=1)
    deadline: float = key(3600.0, "seconds that a client has to answer", gt=0)


class FlowerRunConfig(RunConfig):
    """``[run]`` over Flower: the server's own work is done in its own process unless told otherwise."""

    engine: Literal["processes", "in-process", "ray"] = key(
        "in-process", "where the server's jobs run", kind="execution"
    )


class FlowerFusionConfig(FusionConfig):
    """``[fusion]`` over Flower: clients are strangers unless told otherwise."""

    defence: Literal["none", "robust"] = key(
        "robust", "'robust': start, ensemble and trust that stand hostile clients, and a guard", kind="method"
    )


class FlowerConfig(Section):
    """``[flower]``: what only a run over Flower has, and what its server was given."""

    evaluate_fraction: float = key(0.0, "the share of the clients that try the fused model in a round", ge=0, le=1)
    train_config: dict[str, bool | int | float | str] = key({}, "further orders to clients that train")
    prototypes: tuple[str, ...] = key((), "the architectures that the server knows")
    pool_size: int = key(0, "the number of the server's unlabeled inputs")
    validation_size: int = key(0, "the number of the server's validation examples")


class FlowerSettings(Settings):
    """The settings of a run over Flower, as its folder keeps them.

    >>> FlowerSettings(clients=FlowerClientsConfig(number=3)).clients.fraction
    1.0
    """

    clients: FlowerClientsConfig
    fusion: FlowerFusionConfig = FlowerFusionConfig()
    run: FlowerRunConfig = FlowerRunConfig()
    flower: FlowerConfig = FlowerConfig()

    @field_validator("fusion", mode="before")
    @classmethod
    def _strangers(cls, given: Any) -> Any:
        """Take a plain section too: what it leaves open is as it is over Flower."""
        return given.model_dump(exclude_unset=True) if type(given) is FusionConfig else given

    def mistakes(self, *, labelled: bool, pooled: bool) -> Iterator[Mistake]:
        """Yield what is right alone and wrong together."""
        yield self.fusion.method == "fedma", "fusion.method", "through Flower there are 'feddf' and 'fedavg'"
        yield self.local.binary != "none", "local.binary", "Flower's arrays carry full precision only"
        yield from super().mistakes(labelled=labelled, pooled=pooled)
        fraction, number = self.flower.evaluate_fraction, self.clients.number
        yield (
            fraction > 0 and cohort_size(number, fraction) < 1,
            "flower.evaluate_fraction",
            f"no client would be asked of {number}; it must be 0, or above {0.5 / number:g}",
        )


def orders(settings: FlowerSettings) -> dict[str, Any]:
    """Return what clients are told: the section ``[local]``, and FedProx's μ under the name that Flower gives it."""
    local = {f"local-{name}": value for name, value in settings.local.model_dump().items()}
    named = ",".join(part_names(settings))
    parts = {PARTS_ORDER: named, "lost-state": settings.clients.lost_state} if named else {}
    return {**local, "proximal-mu": settings.local.proximal, **parts, **settings.flower.train_config}


def local_from(told: Mapping[str, Any]) -> LocalConfig:
    """Return the section ``[local]`` from what a client was told."""
    return LocalConfig(**{name: told[f"local-{name}"] for name in LocalConfig.model_fields if f"local-{name}" in told})
