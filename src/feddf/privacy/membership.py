"""A membership attack from answers: LiRA (Carlini et al. 2022) in its distillation form (arXiv 2502.08001).

A client tells what its model says about the pool, and nothing else. The attacker distills that into a student, and asks
how sure the student is of a record: rather as students of shadow clients are that had the record, or as those that had
not? Shadow clients train as the attacked ones do, with the same noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from feddf.privacy.noise import coins
from feddf.runtime.device import threads
from feddf.types import Client, Examples, Inputs, Job, LocalTrain, Prototype, State

ATTACKED = 4  # of the clients a quarter is attacked, and the others are shadows
POOL = 500  # inputs whose answers are distilled, at the most


def membership(
    train: LocalTrain, prototype: Prototype, start: State, examples: Examples, pool: Inputs, clients: int, size: int
) -> tuple[Tensor, Tensor]:
    """Return log-likelihood ratios, and which records were in, for all pairs of an attacked client and a record.

    Each client has a secret half of the first 2 ``size`` examples, and starts from the weights that are public.
    """
    records = torch.arange(min(2 * size, len(examples)))
    shadows = clients - clients // ATTACKED
    inside = coins(clients * len(records), 0.5).reshape(clients, -1)
    inside[1:shadows:2] = ~inside[0 : shadows - 1 : 2]  # of two shadows one has a record and one has not
    asked = pool.batch(torch.arange(min(POOL, len(pool))))
    sure = []
    for k, mine in enumerate(inside):
        reply = train(Job(Client(f"client-{k}", prototype.name, records[mine]), 1, start, k))
        with threads(1):
            student = distilled(prototype, start, reply.state, asked)
        sure.append(confidence(student(examples.inputs.batch(records)).detach(), examples.labels[records]))
    found = torch.stack(sure)
    densities = []
    for those in (inside[:shadows], ~inside[:shadows]):
        seen = found[:shadows].where(those, torch.nan)
        mean = seen.nanmean(dim=0)
        deviation = (seen - mean).square().nanmean(dim=0).sqrt().clamp(min=1e-6)
        densities.append(torch.distributions.Normal(mean, deviation).log_prob(found[shadows:]))
    return (densities[0] - densities[1]).flatten(), inside[shadows:].flatten()


def distilled(prototype: Prototype, start: State, teacher: State, inputs: Tensor) -> torch.nn.Module:
    """Return a student that answers the inputs as the teacher does: cross-entropy, by L-BFGS."""
    student = prototype.load(start)
    for weight in student.parameters():
        weight.data = weight.data.contiguous()  # as L-BFGS wants gradients
    with torch.no_grad():
        answers = prototype.load(teacher)(inputs).softmax(dim=1)
    steps = torch.optim.LBFGS(student.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> float:
        steps.zero_grad()
        value = torch.nn.functional.cross_entropy(student(inputs), answers)
        value.backward()
        return float(value.detach())

    steps.step(loss)
    return student


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log p/(1 − p) of each record's label."""
    others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(dim=1)
    return logits.gather(1, labels[:, None])[:, 0] - others


def roc(scores: Tensor, included: Tensor) -> tuple[Tensor, Tensor]:
    """Return false and true positive rates at all thresholds, from the highest to the lowest."""
    inside = included[scores.argsort(descending=True)].double()
    return (1 - inside).cumsum(dim=0) / (1 - inside).sum(), inside.cumsum(dim=0) / inside.sum()
