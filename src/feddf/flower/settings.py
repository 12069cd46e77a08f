"""The settings of a run over Flower, and what clients are told of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import model_validator

from feddf.config import ConfigError, LocalConfig, Settings
from feddf.config.names import BINARIZATIONS, METHOD_PARTS, PARTS
from feddf.config.sections import Section, key
from feddf.runs.methods import named_part
from feddf.types import Part, Resources

PARTS_KEY = "parts"
"""The entry of the train config that names the parts of the method, as JSON, each with what its half is told."""

MakePart = Callable[..., Part]
"""What a part's name stands for: a function of the client's resources, and of what the half is told."""

OVER_FLOWER: Mapping[str, Mapping[str, Any]] = {
    "clients": {"fraction": 1.0},  # all take part
    "fusion": {"defense": "robust"},  # clients are not trusted
    "run": {"engine": "in-process"},  # the server's own work
}
"""The keys whose defaults are others over Flower."""


class FlowerConfig(Section):
    """``[flower]``: what only a run over Flower has, and what its server was given."""

    evaluate_fraction: float = key(0.0, "the share of clients (one at least) that try fused models", ge=0, le=1)
    train_config: dict[str, bool | int | float | str] = key({}, "further entries of the clients' train config")
    prototypes: tuple[str, ...] = key((), "the architectures that the server knows")
    pool_size: int = key(0, "the number of the server's unlabeled inputs")
    validation_size: int = key(0, "the number of the server's validation examples")


class FlowerSettings(Settings):
    """The settings of a run over Flower, as its folder keeps them. Clients have an hour to answer, by default.

    >>> from feddf.config import ClientsConfig
    >>> FlowerSettings(clients=ClientsConfig(total=3)).clients.fraction
    1.0
    """

    flower: FlowerConfig = FlowerConfig()

    @model_validator(mode="before")
    @classmethod
    def _as_over_flower(cls, given: Any) -> Any:
        """Fill in what is usual over Flower, wherever nothing else is given."""
        tables = dict(given)
        for name, usual in OVER_FLOWER.items():
            section = tables.get(name, {})
            section = section.model_dump(exclude_unset=True) if isinstance(section, Section) else section
            tables[name] = {**usual, **section} if isinstance(section, Mapping) else section
        if isinstance(tables["clients"], Mapping) and "total" not in tables["clients"]:
            raise ConfigError("the key 'clients.total' is missing: say how many are expected")
        return tables

    @property
    def deadline(self) -> float:
        """Seconds that a client has to answer."""
        return self.clients.timeout or 3600.0


def check_travel(settings: FlowerSettings, parts: Sequence[Part]) -> None:
    """Raise for what a method asks of clients that cannot be asked over Flower."""
    for part in parts:
        if not part.name and (part.half is not Part.half or part.fit):
            allowed = "its clients' half does not travel by itself: give its Part the name by which clients find it"
            raise ConfigError.at("fusion.method", settings.fusion.method, allowed)
    fraction = settings.flower.evaluate_fraction
    if fraction and not all(part.weights_down for part in parts):
        raise ConfigError.at("flower.evaluate_fraction", fraction, "this method sends clients no weights; set it to 0")


def parts_config(parts: Sequence[Part]) -> dict[str, str]:
    """Return the entry that names the parts of a method, if it has any that clients have to know."""
    named = {part.name: dict(part.told) for part in parts if part.name}
    return {PARTS_KEY: json.dumps(named)} if named else {}


def train_config(settings: FlowerSettings, parts: Sequence[Part]) -> dict[str, Any]:
    """Return what clients that train are told: ``[local]``, FedProx's μ under Flower's name for it, and the parts."""
    local = {f"local-{name}": value for name, value in settings.local.model_dump().items()}
    named = parts_config(parts)
    lost = {"lost-state": settings.clients.lost_state} if named else {}
    return {**local, "proximal-mu": settings.local.prox_mu, **named, **lost, **settings.flower.train_config}


def local_config(told: Mapping[str, Any]) -> LocalConfig:
    """Return the section ``[local]`` from what a client was told."""
    return LocalConfig(**{name: told[f"local-{name}"] for name in LocalConfig.model_fields if f"local-{name}" in told})


def parts_in(told: Mapping[str, Any], resources: Resources, own: Mapping[str, MakePart] | None = None) -> list[Part]:
    """Return the parts that a server names; a name that is neither feddf's nor the client's own is refused."""
    found: list[Part] = []
    for name, arguments in json.loads(told.get(PARTS_KEY, "{}")).items():
        if not any(
            name in names for names in (own or {}, PARTS, METHOD_PARTS, BINARIZATIONS)
        ):  # no module:attribute is
            raise ValueError(f"this client does not know the part '{name[:60]}'; give it to client_app as parts")
        mine = own[name](resources, **arguments) if own and name in own else None
        found.append(mine or named_part(name, resources, arguments))
    return found
