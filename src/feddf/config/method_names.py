"""A method by one name: the keys that ``fedprox``, ``feddf-plus`` or ``feddf+prox+swag`` stand for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from feddf.config.errors import ConfigError, nearest
from feddf.config.keys import default_of, flat, nested
from feddf.config.names import METHODS
from feddf.config.names import PARTS as NAMED
from feddf.config.sections import Section

PARTS: dict[str, tuple[str, Any]] = {
    "prox": ("local.prox_mu", 0.01),
    "momentum": ("fusion.momentum", 0.2),
    "adam": ("local.optimizer", "adam"),
    "decay": ("local.lr_schedule", "linear"),
    "adjusted": ("local.logit_adjustment", 1.0),
    "robust": ("fusion.defense", "robust"),
    "drop-worst": ("fusion.drop_worst", "paper"),
    "swag": ("ensemble.swag_samples", 10),
    "swa": ("distill.optimizer", "swa"),
    "sgd": ("distill.optimizer", "sgd"),
    "previous": ("distill.init", "previous"),
    "best": ("distill.init", "best"),
    "probabilities": ("ensemble.combine", "probabilities"),
    "class-rows": ("fusion.aggregation", "class-counts"),
    "class-counts": ("ensemble.weights", "class-counts"),
    "certainty": ("ensemble.weights", "certainty"),
    "views": ("pool.views", 4),
    "ema": ("ensemble.ema", 0.5),
    "held-out": ("distill.early_stopping", "held-out-loss"),
    "steps": ("distill.early_stopping", "none"),
}
"""What may be added to a method's name with a plus, and the key and value that it stands for."""

SHORT = {
    "fedprox": "fedavg+prox",
    "fedavgm": "fedavg+momentum",
    "feddistill": "feddf+swag+swa",
    "feddf-plus": "feddf+adjusted+class-counts+probabilities+class-rows",
    "feddf-plus-private": "feddf+adjusted",
}
"""Names for methods with parts."""


def changes_of(method: str) -> tuple[str, dict[str, Any]]:
    """Return the method without its parts, and the keys and values that the parts stand for.

    >>> changes_of("fedprox")
    ('fedavg', {'local.prox_mu': 0.01})
    >>> changes_of("fedprox+momentum")
    ('fedavg', {'local.prox_mu': 0.01, 'fusion.momentum': 0.2})
    """
    first, *added = method.split("+")
    name, *parts = [*SHORT.get(first, first).split("+"), *added]
    if (name not in METHODS and ":" not in name) or any(part not in PARTS and part not in NAMED for part in parts):
        allowed = f"{nearest(method, [*METHODS, *SHORT])} (your own is written as module:attribute)"
        if "+" in method:
            known = dict.fromkeys([*PARTS, *NAMED])
            allowed = f"parts that can be added to a method are {', '.join(f'+{part}' for part in known)}"
        raise ConfigError.at("fusion.method", method, allowed)
    named = tuple(part for part in parts if part not in PARTS)
    changes = dict(PARTS[part] for part in parts if part in PARTS)
    return name, {**changes, "fusion.parts": named} if named else changes


def spelled_out(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return nested tables in which ``fusion.method`` is a plain method and its parts are keys of their own.

    A part stands for its value in :data:`PARTS`, unless the configuration has another than the default (``prox_mu =
    0.1`` is FedProx's).
    """
    fusion = values.get("fusion")
    method = fusion.get("method") if isinstance(fusion, Mapping) else None
    if not isinstance(method, str) or method in METHODS:
        return values
    name, changes = changes_of(method)
    tables = {name: part.model_dump() if isinstance(part, Section) else part for name, part in values.items()}
    given = flat(tables)
    mine = {key: value for key, value in changes.items() if given.get(key, default_of(key)) == default_of(key)}
    return nested(tables, {"fusion.method": name, **mine})


def short_name(method: str, keys: Collection[str]) -> str:
    """Return the name of a method in which some keys are not at their default: that which stands for most of them.

    >>> short_name("fedavg", ["local.prox_mu"]), short_name("feddf", ["local.prox_mu"])
    ('fedprox', 'feddf')
    """
    fitting = {
        name: changes
        for name, (plain, changes) in ((name, changes_of(name)) for name in SHORT)
        if plain == method and changes.keys() <= set(keys)
    }
    return max(fitting, key=lambda name: len(fitting[name]), default=method)
