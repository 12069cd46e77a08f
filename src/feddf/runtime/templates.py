"""Models are copied instead of built again: building draws initial weights, which are thrown away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def copier(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Return how to copy a model that was built for this, with weights of any value; ``None`` if it may not be copied.

    Nobody computes with the original, so no state of one copy can reach another. A network's own class may hold
    anything: only those of torch and feddf are copied, and only while all that they hold besides tensors are values.
    """
    if not all(map(_is_plain, model.modules())):
        return None
    shapes = {weight: (weight.shape, weight.dtype, weight.requires_grad) for weight in model.parameters()}
    for weight in shapes:
        weight.data = weight.data.new_empty(0)  # a copy's are its own

    def copied() -> nn.Module:
        done: dict[Any, Any] = {}
        for weight, (shape, dtype, learned) in shapes.items():
            done[weight] = nn.Parameter(torch.empty(shape, dtype=dtype), learned)
        new: nn.Module = _copied(model, done)
        return new

    return copied


_VALUES = bool, int, float, str, type(None), torch.dtype


def _is_plain(module: nn.Module) -> bool:
    own = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}
    values = [one for value in own.values() for one in (value if isinstance(value, tuple | list) else [value])]
    ours = type(module).__module__.startswith(("torch.nn.modules.", "feddf."))
    weights = all(weight is None or type(weight) is nn.Parameter for weight in module._parameters.values())
    return ours and weights and all(isinstance(one, _VALUES) or one in ({}, set()) for one in values)


def _copied(thing: Any, done: dict[Any, Any]) -> Any:
    """Return a plain module's copy; weights and modules that occur twice are ``done`` once."""
    if thing is None or thing in done:
        return done.get(thing)
    if not isinstance(thing, nn.Module):
        return done.setdefault(thing, thing.clone())
    new = done[thing] = object.__new__(type(thing))
    for name, value in vars(thing).items():
        if name in ("_parameters", "_buffers", "_modules"):
            value = {key: _copied(one, done) for key, one in value.items()}
        new.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
    return new
