"""Private heads: on a frozen extractor, each client solves for a linear head and releases it once, with noise.

FedAUXfdp (Hoech et al. 2022, arXiv 2205.14960) does so for binary logistic regression. Here the loss is softmax's, the
noise is the accountant's, and what the solver leaves unsolved is part of the sensitivity.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from feddf.privacy.noise import Noise
from feddf.types import Examples, Job, Reply

TOLERANCE = 1e-3  # the norm of the gradient at which a head counts as solved
MOST_STEPS = 100_000
BIAS = 0.25  # b, the constant input of a head


def sensitivity(regularization: float) -> float:
    """Return the most by which one record, added or removed, moves a solved head: (√2 + 2τ) / Λ.

    A head minimizes J(W) = Σ_i ℓ(W x_i, y_i) + Λ/2 ‖W‖² with softmax's cross-entropy ℓ and ‖x_i‖ ≤ 1. J is Λ-strongly
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
    rows = features.flatten(features.ndim - 1).double().nan_to_num(0, 0, 0) / clip  # else one record spoils a head
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


def private_heads(
    features: Tensor, labels: Tensor, channels: int, *, noise: Noise, clip: float, regularization: float
) -> tuple[Tensor, Tensor]:
    """Return the noisy heads of K clients: weights (K × M × d) and biases (K × M) for the features as they are.

    Features (K × n × d) are cut to the norm ``clip``; labels are −1 where a client has fewer than n examples. The noise
    is z times the sensitivity (:func:`feddf.privacy.accountant.noise_for`).
    """
    return released(
        solve_heads(extended(features, clip), labels, channels, regularization), noise, clip, regularization
    )


def released(heads: Tensor, noise: Noise, clip: float, regularization: float) -> tuple[Tensor, Tensor]:
    """Return solved heads with noise on them, as weights and biases for the features as they are."""
    heads = heads + noise(heads.shape, sensitivity(regularization))
    return heads[..., :-1] * (sqrt(1 - BIAS**2) / clip), heads[..., -1] * BIAS


def head_update(job: Job, *, train: Examples, clip: float, regularization: float, noise: Noise) -> Reply:
    """Let a client solve for its head instead of training: the reply has the weights of a linear model."""
    indices = job.client.indices
    assert indices is not None, f"client {job.client.id} has no indices: its data are not here"
    features, labels = train.inputs.batch(indices).flatten(1)[None], train.labels[indices][None]
    given = {"clip": clip, "regularization": regularization}
    weight, bias = private_heads(features, labels, train.n_classes, noise=noise, **given)
    state = {key: (weight if key.endswith("weight") else bias)[0].to(old) for key, old in job.state.items()}
    return Reply(job.id, job.client.prototype, job.round, state, len(indices))
