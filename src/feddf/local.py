"""Algorithm 2: what a client does between receiving the server's weights and sending its own back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import ceil, cos, pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from feddf.batches import batches, resident
from feddf.config.sections import LocalConfig
from feddf.runtime.compile import forward_of
from feddf.runtime.execution import Execution
from feddf.seeds import derive, seeded, torch_generator
from feddf.states import read_off
from feddf.types import Augment, Examples, Job, Prepare, Prototype, Update


def local_update(
    job: Job,
    *,
    prototypes: Mapping[str, Prototype],
    train: Examples,
    local: LocalConfig,
    augment: Augment | None = None,
    prepare: Prepare | None = None,
    disclose: bool = False,
    execution: Execution = Execution(),
) -> Update:
    """Train on the client's own examples at a constant rate (no momentum, no decay): Algorithm 2.

    x ← x − η ∇ℓ(x; b) for every mini-batch b of P_k, for E epochs, or Adam's step. ``local.proximal`` is FedProx's μ:
    the gradient of μ/2 ‖x − x_{t−1}‖² is added (appendix B; Li et al. 2018). ``local.decay`` lets the rate fall to zero
    over the round's steps (the ablation of appendix C.3). The optimizer is new in every round. A client without
    examples sends back what it received, with n_k = 0.

    With ``local.logit_adjustment`` τ the loss is the cross-entropy of f(x) + τ log((n_kc + ε) / n_k), ε = 0.001 n_k/M,
    over the client's own class counts n_kc, which it keeps to itself (logit adjustment, Menon et al. 2021; balanced
    softmax, Ren et al. 2020; FedLC, Zhang et al. 2022): the model that it sends speaks of likelihoods and not of the
    client's prior.

    ``prepare`` changes the model before it is trained, as a method demands it. With ``disclose`` the client tells how
    many examples it has of each class.

    ``execution.device`` is where all this is computed; the update is on the CPU.
    """
    indices = job.client.indices
    assert indices is not None, f"client {job.client.id} has no indices: its data are not here"
    counts = torch.bincount(train.labels[indices], minlength=train.n_classes).tolist() if disclose else None
    with execution.begun() as device:
        model = prototypes[job.client.prototype].load(job.state, device).train()  # line 2
        finish = prepare(model, job) if prepare else partial(read_off, like=job.state)
        losses = _train(model, indices, train, job.seed, local, augment, execution, device)  # lines 3 to 5
        return Update(  # line 6
            job.client.id,
            job.client.prototype,
            job.round,
            finish(model),
            len(indices),
            {"train_loss": float(torch.stack(losses).mean())} if losses else {},
            tuple(counts) if counts is not None else None,
        )


def _train(
    model: nn.Module,
    indices: Tensor,
    train: Examples,
    seed: int,
    local: LocalConfig,
    augment: Augment | None,
    execution: Execution,
    device: torch.device,
) -> list[Tensor]:
    """Take all steps; return the losses of the last epoch. No step waits for the device."""
    forward = forward_of(model, execution.compile, execution.precision)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    received = [weight.detach().clone() for weight in weights] if local.proximal else []
    make = torch.optim.Adam if local.optimizer == "adam" else torch.optim.SGD
    optimizer = make(weights, lr=local.rate)
    rates = _rates(optimizer, local.decay, local.epochs * n_batches(len(indices), local.batch))
    shuffle = torch_generator(derive(seed, "shuffle"))
    distort = torch_generator(derive(seed, "augment"))
    adjustment = (log_prior(train.labels[indices], train.n_classes) * local.logit_adjustment).to(device)
    labels = resident(train.labels, device)
    losses: list[Tensor] = []
    with seeded(derive(seed, "dropout"), device):
        for _ in range(local.epochs):  # line 3
            losses = []
            order = mini_batches(indices, local.batch, shuffle)
            for chosen, raw in batches(train.inputs.raw, order, device):  # line 4
                inputs = train.inputs.encode(augment(raw, distort) if augment else raw)
                logits = forward(inputs)
                if local.logit_adjustment:
                    logits = logits + adjustment
                loss = F.cross_entropy(logits, labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                if local.proximal:
                    _add_proximal_gradient(weights, received, local.proximal)
                optimizer.step()  # line 5
                rates.step()
                losses.append(loss.detach())
    return losses


def log_prior(labels: Tensor, n_classes: int) -> Tensor:
    """Return log((n_c + ε) / n) of each class c among n labels, ε = 0.001 n / M: finite for classes that do not occur.

    >>> log_prior(torch.tensor([0, 0, 1, 1]), 2)
    tensor([-0.6921, -0.6921])
    """
    n = max(1, len(labels))
    counts = torch.bincount(labels, minlength=n_classes).to(torch.float32)
    return ((counts + 0.001 * n / n_classes) / n).log()


def _rates(optimizer: torch.optim.Optimizer, decay: str, steps: int) -> LRScheduler:
    """Return the rate's schedule: constant, or falling to zero over the round's steps."""
    shapes: dict[str, Callable[[int], float]] = {
        "none": lambda done: 1.0,
        "linear": lambda done: 1 - done / max(1, steps),
        "cosine": lambda done: (1 + cos(pi * done / max(1, steps))) / 2,
    }
    return LambdaLR(optimizer, shapes[decay])


def _add_proximal_gradient(weights: list[nn.Parameter], received: list[Tensor], mu: float) -> None:
    """Add μ (x − x_{t−1}) to the gradient."""
    for weight, origin in zip(weights, received, strict=True):
        if weight.grad is not None:
            weight.grad.add_(weight.detach() - origin, alpha=mu)


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
