"""Algorithm 2: what a client does between receiving the server's weights and sending its own back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import ceil, cos, pi
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from feddf.accelerate import Accelerate, eager
from feddf.binary import BinaryState, Estimator, binarise, settle
from feddf.seeds import derive, seeded, torch_generator
from feddf.states import copy
from feddf.types import Examples, Job, Prototype, Update

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""(raw batch, generator) -> raw batch."""

Frozen = Callable[[Job], Collection[str]]
"""A job -> the names of the parameters that must stay as they were sent."""


def local_update(
    job: Job,
    *,
    prototypes: Mapping[str, Prototype],
    train: Examples,
    epochs: int,
    batch: int,
    rate: float,
    optimizer: Literal["sgd", "adam"] = "sgd",
    decay: Literal["none", "linear", "cosine"] = "none",
    proximal: float = 0.0,
    augment: Augment | None = None,
    accelerate: Accelerate = eager,
    binary: Estimator | None = None,
    frozen: Frozen | None = None,
    disclose: bool = False,
) -> Update:
    """Train on the client's own examples at a constant rate (no momentum, no decay): Algorithm 2.

    x ← x − η ∇ℓ(x; b) for every mini-batch b of P_k, for E epochs, or Adam's step. ``proximal`` is FedProx's μ: the
    gradient of μ/2 ‖x − x_{t−1}‖² is added (appendix B; Li et al. 2018). The optimizer is new in every round. A client
    without examples sends back what it received, with n_k = 0. ``decay`` lets the rate fall to zero over the round's
    steps (the ablation of appendix C.3). With ``disclose`` the client tells how many examples it has of each class.
    With ``binary`` the network computes with binarised weights (:mod:`feddf.binary`), full-precision ones learn behind
    them and are forgotten at the end, and one bit a weight is sent.
    """
    indices = job.client.indices
    assert indices is not None, f"client {job.client.id} has no indices: its data are not here"
    model = prototypes[job.client.prototype].load(job.state).train()  # line 2
    packed = binarise(model, binary) if binary else []
    forward = model if binary else accelerate(model)  # each binarised model is of a class of its own
    fixed = set(frozen(job)) if frozen else set()
    weights = [weight for name, weight in model.named_parameters() if name not in fixed]
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in fixed)
    sent = [weight.detach().clone() for weight in weights] if proximal else []
    stepper = torch.optim.Adam(weights, lr=rate) if optimizer == "adam" else torch.optim.SGD(weights, lr=rate)
    rates = _rates(stepper, decay, epochs * n_batches(len(indices), batch))
    shuffle = torch_generator(derive(job.seed, "shuffle"))
    distort = torch_generator(derive(job.seed, "augment"))
    losses: list[Tensor] = []
    with seeded(derive(job.seed, "dropout")):
        for _ in range(epochs):  # line 3
            losses = []
            for chosen in mini_batches(indices, batch, shuffle):  # line 4
                raw = train.inputs.raw[chosen]
                inputs = train.inputs.encode(augment(raw, distort) if augment else raw)
                loss = F.cross_entropy(forward(inputs), train.labels[chosen])
                stepper.zero_grad()
                loss.backward()
                if proximal:
                    _pull(weights, sent, proximal)
                stepper.step()  # line 5
                rates.step()
                losses.append(loss.detach())
    metrics = {"train_loss": float(torch.stack(losses).mean())} if losses else {}
    if packed:
        settle(model)
    trained = model.state_dict()
    state = copy({key: trained[key] for key in job.state})  # in the order in which it was sent
    counts = torch.bincount(train.labels[indices], minlength=train.n_classes).tolist() if disclose else None
    return Update(  # line 6
        job.client.id,
        job.client.prototype,
        job.round,
        BinaryState.of(state, packed) if packed else state,
        len(indices),
        metrics,
        tuple(counts) if counts is not None else None,
    )


def _rates(stepper: torch.optim.Optimizer, decay: str, steps: int) -> LRScheduler:
    """Return the rate's schedule: constant, or falling to zero over the round's steps."""
    shapes: dict[str, Callable[[int], float]] = {
        "none": lambda done: 1.0,
        "linear": lambda done: 1 - done / max(1, steps),
        "cosine": lambda done: (1 + cos(pi * done / max(1, steps))) / 2,
    }
    return LambdaLR(stepper, shapes[decay])


def _pull(weights: list[nn.Parameter], sent: list[Tensor], proximal: float) -> None:
    """Add μ (x − x_{t−1}) to the gradient."""
    for weight, origin in zip(weights, sent, strict=True):
        if weight.grad is not None:
            weight.grad.add_(weight.detach() - origin, alpha=proximal)


def n_batches(n: int, size: int) -> int:
    """Return how many batches :func:`mini_batches` makes of n examples."""
    return ceil(n / size) - (1 if n > size and n % size == 1 else 0)


def mini_batches(indices: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices in random order, ``size`` at a time.

    A last batch of one example joins the batch before it: BatchNorm has no variance of a single value.
    """
    order = indices[torch.randperm(len(indices), generator=generator)]
    batches = list(order.split(size)) if len(order) else []
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    yield from batches
