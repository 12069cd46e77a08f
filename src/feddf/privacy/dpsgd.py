"""DP-SGD at the client: each record's gradient is clipped, and noise hides any one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from feddf.client import trained_weights
from feddf.privacy.noise import Noise, coins
from feddf.types import Steps, Training

CHUNK = 64  # records whose gradients are in memory at once

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) -> the loss of a batch."""


def dp_sgd(
    model: nn.Module, training: Training, *, noise: Noise, clip: float, sampling: float, batch_size: int
) -> Steps:
    """Begin the client half of DP-SGD (Abadi et al. 2016), for SGD or Adam.

    A step's gradient is (Σ_i g_i min(1, S/‖g_i‖) + N(0, (z S)²)) / B. Its records are a secret Poisson sample, each
    with probability q, and 1/q steps are an epoch: neither the number of steps nor the divisor depends on how many
    records a client has, so that they do not tell its n_k. A sample without records is noise alone. What follows from
    the noisy gradients, the sent model above all, is post-processing. (S is ``clip``, q ``sampling`` and B
    ``batch_size``, best near q n_k.)
    """
    refuse_batchnorm(model)
    received = [buffer.clone() for buffer in model.buffers()]  # running statistics would be sent without noise
    sums: list[Tensor] = []
    drawn: deque[bool] = deque()  # batches may be drawn ahead of their use

    def batches(indices: Tensor) -> Iterator[Tensor]:
        for _ in range(steps_of_epoch(sampling)):
            chosen = indices[coins(len(indices), sampling, noise.source)]
            drawn.append(len(chosen) > 0)
            yield chosen if len(chosen) else indices[:1]  # the one of an empty sample is not looked at

    def loss(outputs: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
        nothing = [torch.zeros_like(weight) for weight in trained_weights(model)]
        sums[:] = clipped_sum(model, training.outputs.loss, inputs, labels, clip) if drawn.popleft() else nothing
        return torch.zeros((), requires_grad=True)  # the gradient is made below

    def correct() -> None:
        for weight, total in zip(trained_weights(model), sums, strict=True):
            weight.grad = (total + noise(total.shape, clip).to(total)) / batch_size
        for buffer, before in zip(model.buffers(), received, strict=True):
            buffer.copy_(before)

    return Steps(loss=loss, correct=correct, batches=batches)


def steps_of_epoch(sampling: float) -> int:
    """Return how many samples make an epoch."""
    return max(1, round(1 / sampling))


def refuse_batchnorm(model: nn.Module) -> None:
    """Raise where a record's gradient depends on the others in its batch."""
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ValueError(
            "BatchNorm mixes the records of a batch, so none can be protected; use norm = 'group' or 'none'"
        )


def record_gradients(model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
    """Return the gradient of each record's own loss, by the weight's name: one row a record."""
    weights = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}

    def of_one(weights: Mapping[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(model, dict(weights), (one.unsqueeze(0),)), label.unsqueeze(0))

    found: Mapping[str, Tensor] = vmap(grad(of_one), in_dims=(None, 0, 0), randomness="different")(
        weights, inputs, labels
    )
    return found


def clipped_sum(model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, clip: float) -> list[Tensor]:
    """Return Σ_i g_i min(1, S/‖g_i‖) over all records, in the order of the trained weights."""
    totals: list[Tensor] = []
    for some, their in zip(inputs.split(CHUNK), labels.split(CHUNK), strict=True):
        gradients = list(record_gradients(model, loss, some, their).values())
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in gradients]).norm(dim=0)
        share = (clip / norms.clamp(min=1e-12)).clamp(max=1).nan_to_num(0)  # a gradient that is none counts for nothing
        sums = [torch.einsum("n,n...->...", share, one.nan_to_num(0, 0, 0)) for one in gradients]
        totals = [before + new for before, new in zip(totals, sums, strict=True)] if totals else sums
    return totals
