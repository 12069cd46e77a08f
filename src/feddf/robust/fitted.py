"""An average whose coefficients are fitted to labeled examples: a start that hostile clients can hardly move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from feddf.evaluate import spread
from feddf.fusion.average import trained
from feddf.robust.rules import change_norms, change_products, example_weights, moved, norm_clipping
from feddf.runtime.device import device_of, threads
from feddf.runtime.execution import Execution
from feddf.types import Examples, Resources, Rule, State, Update

STEPS = 50
BATCH = 256  # labeled examples in a step; of more, each step takes others
LONGEST = 3.0  # times the median norm: longer updates are left out; clipped, they would still set the direction
PRIOR = 0.05  # β: how much the coefficients are held to n_k / n


def fitted_average(resources: Resources, examples: Examples, execution: Execution = Execution()) -> Rule:
    """Return x + Σ c_k Δ_k, changes clipped at their median norm, with the c_k that explain labeled examples best.

    The c_k lie on the simplex and minimize ℓ(c) + β KL(c ‖ w), where ℓ is the loss of the averaged model and
    w_k = n_k / n, by exponentiated gradient: log c ← log c − ∇ℓ − β log (c / w), ∂ℓ/∂c_k = ⟨∇ℓ, Δ_k⟩. A harmful
    update loses its weight, a unique one gains some, and copies of an update share the weight of one.

    FedLAW (Li et al., "Revisiting Weighted Aggregation in Federated Learning with Neural Networks", ICML 2023) learns
    weights on a proxy set, too, with a factor that shrinks the average. Deviations: clipping, the prior, no factor, and
    a step of at most e-fold.
    """

    def rule(previous: State, updates: Sequence[Update]) -> State:
        if not trained(updates):
            return previous
        with threads(1), execution.begun() as device:  # bytes must not depend on the server's cores
            norms = change_norms(previous, [update.state for update in trained(updates)])
            usual = norms <= LONGEST * norms.median()
            used = [update for update, fits in zip(trained(updates), usual, strict=True) if fits]
            weights = example_weights(used)
            shortened = norm_clipping(change_products(previous, used), torch.ones_like(weights))
            log_w = log_c = weights.log()
            model = resources.prototypes[used[0].prototype].load(moved(previous, used, weights * shortened), device)
            for step in range(STEPS):
                _move(model, previous, used, log_c.softmax(dim=0) * shortened)
                slope = shortened * _slope(model, previous, used, examples, _batch(len(examples), step))
                bounded = slope / slope.abs().max().clamp_min(1)
                log_c = log_c - bounded - PRIOR * (log_c.log_softmax(dim=0) - log_w)
            return moved(previous, used, log_c.softmax(dim=0) * shortened)

    return rule


def _move(model: nn.Module, previous: State, updates: Sequence[Update], coefficients: Tensor) -> None:
    """Set the parameters to x + Σ c_k Δ_k."""
    for key, parameter in _parameters(model):
        change = (coefficients @ _rows(key, previous, updates)).view_as(parameter)
        parameter.data.copy_(previous[key] + change)


def _slope(model: nn.Module, previous: State, updates: Sequence[Update], examples: Examples, batch: Tensor) -> Tensor:
    """Return ⟨∇ℓ, Δ_k⟩ for each update, without the part that all have in common; an overflow counts as nothing."""
    device, inputs = device_of(model), examples.inputs
    loss = examples.outputs.loss(model(inputs.encode(inputs.raw[batch].to(device))), examples.labels[batch].to(device))
    names, parameters = zip(*_parameters(model), strict=True)
    slope = torch.zeros(len(updates), dtype=torch.float64)
    for key, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        slope += _rows(key, previous, updates) @ gradient.to("cpu", torch.float64).flatten()
    return (slope - slope.mean()).nan_to_num(0.0, 0.0, 0.0)


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(key, one) for key, one in sorted(model.named_parameters()) if one.requires_grad]


def _rows(key: str, previous: State, updates: Sequence[Update]) -> Tensor:
    """Return the changes of one tensor, a row for each update: updates may stay on disk."""
    before = previous[key].to(torch.float64)
    return torch.stack([(update.state[key].to(torch.float64) - before).flatten() for update in updates])


def _batch(n: int, step: int) -> Tensor:
    """Return the examples of a step: all where they are few, else some from everywhere, others in each step."""
    return torch.arange(n) if n <= BATCH else (spread(n, BATCH) + step) % n
