"""Binarized weights: one bit for each weight and one scale for each filter, in training and on the way to the server.

The weights w of a filter become α sign(w) with α = mean |w| (Rastegari et al. 2016). The first and the last layer,
BatchNorm and biases keep their full precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from feddf.states import state_of
from feddf.types import Sent, State, Steps, Training

Estimator = Literal["straight-through", "error-feedback"]


def binarized(weight: Tensor) -> Tensor:
    """Return α sign(w), with one α = mean |w| a filter (the first dimension); the sign of zero counts as plus."""
    flat = weight.reshape(len(weight), -1)
    scale = flat.abs().mean(dim=1, keepdim=True)
    return torch.where(flat < 0, -scale, scale).reshape(weight.shape)


class Binarized(nn.Module):
    """A parametrization: the network computes with α sign(w), and the full-precision w learns.

    ``error-feedback``: w ← w − η ∇ℓ(Q(w)), the gradient at the binarized weights; what Q leaves out stays in w and is
    made up for later (Lin et al. 2020). ``straight-through``: the same where |w| ≤ 1, and no gradient beyond, where
    the sign would not change any more (Hubara et al. 2016).
    """

    def __init__(self, estimator: Estimator) -> None:
        super().__init__()
        self.estimator = estimator

    def forward(self, weight: Tensor) -> Tensor:
        """Return the binarized weight, whose gradient goes to the full-precision one."""
        binary: Tensor = _PassedOn.apply(weight, self.estimator == "straight-through")  # type: ignore[no-untyped-call]
        return binary


class _PassedOn(torch.autograd.Function):
    """α sign(w) forwards, and the gradient as it is backwards (but for large weights, if clipped)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, clipped: bool) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.clipped = clipped
        return binarized(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient * (weight.abs() <= 1) if ctx.clipped else gradient, None


def inner_layers(model: nn.Module) -> list[str]:
    """Return the names of the convolutions and linear layers between the first one and the last."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)][1:-1]


def binarize(model: nn.Module, estimator: Estimator) -> list[str]:
    """Let the model's inner layers compute with binarized weights; return the names of these weights."""
    names = inner_layers(model)
    for name in names:
        parametrize.register_parametrization(model.get_submodule(name), "weight", Binarized(estimator))
    return [f"{name}.weight" for name in names]


def _binary_client(model: nn.Module, training: Training, estimator: Estimator) -> Steps:
    """Full-precision weights learn behind binarized ones, which alone are sent, one bit a weight: a client half."""
    names = binarize(model, estimator)
    if not names:
        raise ValueError("it has no layer between its first and its last that could be binarized")

    def finish() -> Sent:
        keep_binarized(model)
        return Sent(BinaryState.of(state_of(model, training.job.state), names))

    return Steps(finish=finish)


straight_through = partial(_binary_client, estimator="straight-through")
error_feedback = partial(_binary_client, estimator="error-feedback")


def keep_binarized(model: nn.Module) -> None:
    """Replace full-precision weights by the binarized ones that the model computed with; nothing else is left."""
    for name in inner_layers(model):
        parametrize.remove_parametrizations(model.get_submodule(name), "weight", leave_parametrized=True)


@dataclass(frozen=True)
class Bits:
    """A binarized weight: its signs, eight to a byte, and a scale for each filter."""

    signs: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor) -> Bits:
        """Pack a weight all of whose values are ± the scale of their filter."""
        flat = weight.detach().reshape(len(weight), -1)
        signs = torch.from_numpy(np.packbits(flat.numpy() >= 0))
        return cls(signs, flat[:, 0].abs().clone(), tuple(weight.shape))

    def weight(self) -> Tensor:
        """Unpack."""
        count = int(np.prod(self.shape))
        if self.signs.dtype != torch.uint8 or self.signs.shape != (-(-count // 8),):
            raise ValueError(f"{self.signs.numel()} bytes of signs cannot be {count} weights")
        if self.scales.shape != self.shape[:1]:
            raise ValueError(f"{self.scales.numel()} scales cannot be those of {self.shape[0]} filters")
        plus = torch.from_numpy(np.unpackbits(self.signs.numpy(), count=count)).reshape(self.shape[0], -1).bool()
        return torch.where(plus, self.scales[:, None], -self.scales[:, None]).reshape(self.shape)


class BinaryState(Mapping[str, Tensor]):
    """A state of which some weights are packed as bits: this is what travels; it is unpacked when it is read."""

    def __init__(self, plain: State, bits: Mapping[str, Bits], order: Sequence[str]) -> None:
        self.plain, self.bits = dict(plain), dict(bits)
        self._order = tuple(order)
        if len(set(self._order)) < len(self._order) or set(self._order) != self.plain.keys() | self.bits.keys():
            raise ValueError("the names of a packed state must be those of its tensors, each once")

    @classmethod
    def of(cls, state: State, names: Sequence[str]) -> BinaryState:
        """Pack the named weights of a state."""
        plain = {key: tensor for key, tensor in state.items() if key not in names}
        return cls(plain, {key: Bits.of(state[key]) for key in names}, list(state))

    def __getitem__(self, name: str) -> Tensor:
        return self.bits[name].weight() if name in self.bits else self.plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __reduce__(self) -> tuple[Any, ...]:
        return BinaryState, (self.plain, self.bits, self._order)


def wire(state: State) -> State:
    """Return the tensors that really travel: for a packed state its plain ones, signs and scales."""
    if not isinstance(state, BinaryState):
        return state
    signs = {f"{key}.signs": bits.signs for key, bits in state.bits.items()}
    return {**state.plain, **signs, **{f"{key}.scales": bits.scales for key, bits in state.bits.items()}}
