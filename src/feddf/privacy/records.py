"""Privacy at record level: DP-SGD, and private heads on a frozen extractor. Clients add the noise before they send."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from math import sqrt

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from feddf.client import trained_weights
from feddf.config.privacy import PrivacyConfig
from feddf.privacy.accountant import steps_of_epoch
from feddf.privacy.noise import Noise, uniform
from feddf.types import Examples, Job, Reply, Steps, Training

CHUNK = 64  # records whose gradients are in memory at once
TOLERANCE = 1e-3  # the norm of the gradient at which a head counts as solved
MOST_STEPS = 100_000  # from Λ = 0.01 on they are enough for 100,000 examples: whether it fails must tell nothing
BIAS = 0.25  # b, the constant input of a head

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) -> the loss of a batch."""


# DP-SGD


def dp_sgd(model: nn.Module, training: Training, *, noise: Noise, config: PrivacyConfig, batch_size: int) -> Steps:
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
    drawn: deque[int] = deque()  # batches may be drawn ahead of their use

    def batches(indices: Tensor) -> Iterator[Tensor]:
        for _ in range(steps_of_epoch(config.sampling)):
            chosen = indices[uniform(len(indices), noise.source) < config.sampling]
            drawn.append(len(chosen))
            yield chosen if len(chosen) else indices[:1]  # the one of an empty sample is not looked at

    def loss(outputs: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
        n = drawn.popleft()
        sums[:] = clipped_sum(model, training.outputs.loss, inputs[:n], labels[:n], config.clip)
        return torch.zeros((), requires_grad=True)  # the gradient is made below

    def correct() -> None:
        for weight, total in zip(trained_weights(model), sums, strict=True):
            weight.grad = (total + noise(total.shape, config.clip).to(total)) / batch_size
        for buffer, before in zip(model.buffers(), received, strict=True):
            buffer.copy_(before)

    return Steps(loss=loss, correct=correct, batches=batches)


def refuse_batchnorm(model: nn.Module) -> None:
    """Raise where a record's gradient depends on the others in its batch."""
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ValueError("BatchNorm mixes the records of a batch: none can be protected; use norm = 'group' or 'none'")


def clipped_sum(model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, clip: float) -> list[Tensor]:
    """Return Σ_i g_i min(1, S/‖g_i‖) over all records, in the order of the trained weights."""
    weights = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}

    def of_one(weights: Mapping[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(model, dict(weights), (one.unsqueeze(0),)), label.unsqueeze(0))

    of_each = vmap(grad(of_one), in_dims=(None, 0, 0), randomness="different")
    totals = [torch.zeros_like(weight) for weight in weights.values()]
    for place in range(0, len(inputs), CHUNK):
        gradients = list(of_each(weights, inputs[place : place + CHUNK], labels[place : place + CHUNK]).values())
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in gradients]).norm(dim=0)
        share = (clip / norms.clamp(min=1e-12)).clamp(max=1).nan_to_num(0)  # a gradient that is none counts for nothing
        sums = [torch.einsum("n,n...->...", share, one.nan_to_num(0, 0, 0)) for one in gradients]
        totals = [before + new for before, new in zip(totals, sums, strict=True)]
    return totals


# Private heads: each client solves for a linear head and releases it once, with noise


def sensitivity(regularization: float) -> float:
    """Return the most by which one record, added or removed, moves a solved head: (√2 + 2τ) / Λ.

    FedAUXfdp (Hoech et al. 2022, arXiv 2205.14960) has it for binary logistic regression; here the loss is softmax's. A
    head minimizes J(W) = Σ_i ℓ(W x_i, y_i) + Λ/2 ‖W‖² with softmax's cross-entropy ℓ and ‖x_i‖ ≤ 1. J is Λ-strongly
    convex, so ‖W − W'‖ ≤ ‖∇J(W) − ∇J(W')‖ / Λ. Let W* and W' be the minima without and with the record (x, y): then
    ∇J(W*) = 0 and ∇J(W') = −∇ℓ(W' x, y), so ‖W* − W'‖ ≤ ‖∇ℓ‖ / Λ. The gradient is (p − e_y) xᵀ with class
    probabilities p, and ‖p − e_y‖² = Σ_{c≠y} p_c² + (1 − p_y)² ≤ 2 (1 − p_y)² ≤ 2. The solver stops at ‖∇J‖ ≤ τ, within
    τ/Λ of either minimum. (With a mean instead of the sum, Λ = nλ and replacing for adding, a 1-Lipschitz binary loss
    has the usual 2/(nλ). Here n is nowhere needed, and so need not be public.)
    """
    return (sqrt(2) + 2 * TOLERANCE) / regularization


def extended(features: Tensor, clip: float) -> Tensor:
    """Return (√(1 − b²) x/S, b), with x cut to the norm S: of norm 1 at the most, with a constant b for the bias.

    b is small: noise on the weights, which there are many of, is 1/√(1 − b²) times what it is without a bias.
    """
    rows = features.double().nan_to_num(0, 0, 0) / clip  # else one record spoils a head
    rows = rows / rows.norm(dim=-1, keepdim=True).clamp(min=1)
    return torch.cat([rows * sqrt(1 - BIAS**2), torch.full_like(rows[..., :1], BIAS)], dim=-1)


def solve_heads(inputs: Tensor, labels: Tensor, channels: int, regularization: float) -> Tensor:
    """Return the minima of J of K clients at once (K × M × d), by Nesterov's steps on one matrix product.

    J is smooth with n/2 + Λ, because softmax's Hessian is at most 1/2, and steps end when every gradient is within
    :data:`TOLERANCE`. Inputs (K × n × d) have norms of at most 1; labels are −1 where a client has fewer than n.
    """
    there = (labels >= 0).unsqueeze(-1)
    wanted = F.one_hot(labels.clamp(min=0), channels).double()
    smooth = 0.5 * there.sum(dim=1, keepdim=True) + regularization  # K × 1 × 1
    speed = (smooth.sqrt() - sqrt(regularization)) / (smooth.sqrt() + sqrt(regularization))
    heads = torch.zeros(len(inputs), channels, inputs.shape[-1], dtype=torch.float64)
    ahead = heads

    def gradient(heads: Tensor) -> Tensor:
        wrong = ((inputs @ heads.mT).softmax(dim=-1) - wanted) * there
        return wrong.mT @ inputs + regularization * heads

    for step in range(MOST_STEPS):
        moved = ahead - gradient(ahead) / smooth
        ahead, heads = moved + speed * (moved - heads), moved
        if step % 10 == 9 and float(gradient(heads).flatten(1).norm(dim=1).max()) <= TOLERANCE:
            return heads
    raise RuntimeError(f"private heads were not solved in {MOST_STEPS} steps")


def released(heads: Tensor, noise: Noise, config: PrivacyConfig) -> tuple[Tensor, Tensor]:
    """Return solved heads with noise of z times the sensitivity, as weights and biases for the features as they are."""
    heads = heads + noise(heads.shape, sensitivity(config.regularization))
    return heads[..., :-1] * (sqrt(1 - BIAS**2) / config.clip), heads[..., -1] * BIAS


def head_update(job: Job, *, train: Examples, noise: Noise, config: PrivacyConfig) -> Reply:
    """Let a client solve for its head instead of training: the reply has the weights of a linear model."""
    indices = job.client.indices
    assert indices is not None, f"client {job.client.id} has no indices: its data are not here"
    rows, labels = extended(train.inputs.batch(indices).flatten(1)[None], config.clip), train.labels[indices][None]
    weight, bias = released(solve_heads(rows, labels, train.n_classes, config.regularization), noise, config)
    state = {key: (weight if key.endswith("weight") else bias)[0].to(old) for key, old in job.state.items()}
    return Reply(job.id, job.client.prototype, job.round, state, len(indices))
