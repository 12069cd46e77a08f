"""Arithmetic on state dicts. Parameters and buffers are told apart by what they hold: floats or counters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan

import torch
from torch import Tensor, nn

from feddf.seeds import derive, seed_torch
from feddf.types import Prototype, State


def init_state(prototype: Prototype, seed: int) -> State:
    """Return the prototype's initial weights x_0 (line 2 of Algorithm 3), which the seed decides."""
    with seed_torch(derive(seed, "init", prototype.name)):
        model = prototype.build()
    return copy(model.state_dict())


def weighted_mean(states: Sequence[State], weights: Sequence[float]) -> State:
    """Return Σ wᵢ stateᵢ / Σ wᵢ for floating tensors, and the largest value for integer ones.

    Floating tensors include BatchNorm's running mean and variance: an average that kept one client's
    statistics would not be a fair baseline. Integer buffers (BatchNorm's ``num_batches_tracked``) are
    counters, which have no meaningful mean. The sum runs in float64, in the order given, and is rounded
    once: the same states in the same order give the same bytes, and equal float32 states come back unchanged.

    >>> a, b = {"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}
    >>> weighted_mean([a, b], [2, 1])
    {'w': tensor([2.])}
    """
    total = float(sum(weights))
    if not states or total <= 0:
        raise ValueError(f"a weighted mean needs states with a positive total weight, got {list(weights)}")
    return {key: _mean((state[key] for state in states), weights, total) for key in states[0]}


def _mean(tensors: Iterable[Tensor], weights: Sequence[float], total: float) -> Tensor:
    """Stream over the tensors: a thousand clients' states may lie on disk, and one tensor is read at a time."""
    running: Tensor | None = None
    dtype = torch.float32
    for tensor, weight in zip(tensors, weights, strict=True):
        dtype = tensor.dtype
        if not tensor.is_floating_point():
            running = tensor.clone() if running is None else torch.maximum(running, tensor)
            continue
        if running is None:
            running = torch.zeros(tensor.shape, dtype=torch.float64)
        running.add_(tensor, alpha=float(weight))  # in float64, without a copy of the whole tensor
    assert running is not None
    return running.div_(total).to(dtype) if dtype.is_floating_point else running


def is_statistic(name: str) -> bool:
    """Say whether a tensor of a state is a BatchNorm's running statistic (or its counter), by its name."""
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def drift(state: State, center: State) -> float | None:
    """Return ‖w − c‖ / ‖c‖ over all weights but BatchNorm's statistics; ``None`` where it has no (finite) value."""
    keys = [key for key, value in center.items() if value.is_floating_point() and not is_statistic(key)]
    if any(key not in state or state[key].shape != center[key].shape for key in keys):
        return None  # a matched network has other widths
    away = sum(float((state[key].double() - center[key].double()).square().sum()) for key in keys)
    size = sum(float(center[key].double().square().sum()) for key in keys)
    found = (away / size) ** 0.5 if size else nan
    return round(found, 5) if isfinite(found) else None


def n_bytes(state: State) -> int:
    """Return the size of a state's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def copy(state: State) -> dict[str, Tensor]:
    """Return a state with storage of its own, on the CPU: there weights travel, are averaged and are kept."""
    plain = torch.contiguous_format
    return {key: tensor.detach().to("cpu", copy=True, memory_format=plain) for key, tensor in state.items()}


def on_cpu(state: State) -> State:
    """Return a state on the CPU; one that is there already is returned itself."""
    return state if all(tensor.device.type == "cpu" for tensor in state.values()) else copy(state)


def state_of(model: nn.Module, like: State) -> dict[str, Tensor]:
    """Return a model's weights and buffers, in the order of another state, with storage of their own."""
    trained = model.state_dict()
    return copy({key: trained[key] for key in like})


def fit_widths(model: nn.Module, state: State) -> None:
    """Give every linear layer and convolution the shape that the state has (matched layers may have grown)."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d) or state[f"{name}.weight"].shape == module.weight.shape:
            continue
        shape = state[f"{name}.weight"].shape
        module.weight = nn.Parameter(torch.empty(shape))
        if module.bias is not None:
            module.bias = nn.Parameter(torch.empty(shape[0]))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = shape
        else:
            module.out_channels, module.in_channels = shape[:2]


def all_finite(state: State) -> Tensor:
    """Return whether every floating value is a number, as one value on the state's device."""
    found = [tensor.isfinite().all() for tensor in state.values() if tensor.is_floating_point()]
    return torch.stack(found).all() if found else torch.tensor(True)


def digest(models: Mapping[str, State]) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bytes: equal digests mean equal models."""
    sha = hashlib.sha256()
    for name in sorted(models):
        for key in sorted(models[name]):
            tensor = models[name][key].detach().contiguous()
            sha.update(repr((name, key, str(tensor.dtype), tuple(tensor.shape))).encode())
            sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
