"""An audit that attacks a plan: canaries are put in by secret coin flips, and guessed from what is released.

A canary is a record (or client) at the mechanism's worst case, and its score says how far the release has moved in the
very direction in which this canary moves it. m canaries are in one run, as orthogonal to each other, or alone in runs
of their own. The number of right guesses bounds ε from below: by Steinke, Nasr, Jagielski (2023) whatever the mechanism
is; and, canaries being independent trials of it, for the mechanism that is claimed, with some noise.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from math import ceil, exp, inf, sqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from feddf.client import local_update
from feddf.config.errors import one_line
from feddf.config.sections import DistillConfig, LocalConfig
from feddf.evaluate import logits
from feddf.fusion.average import fedavg, uniform_average
from feddf.fusion.distill import distill
from feddf.fusion.ensemble import CachedTargets
from feddf.models.small import Linear
from feddf.outputs import classes
from feddf.privacy.accountant import Mechanism, Plan, PrivacyError, advantage_of, epsilon_of, least, steps_of_epoch
from feddf.privacy.clients import noisy_answers, noisy_groups, noisy_votes
from feddf.privacy.noise import Noise, Source, uniform
from feddf.privacy.records import BIAS, dp_sgd, extended, released, solve_heads
from feddf.privacy.releases import Releases
from feddf.runtime.device import threads
from feddf.types import Client, Examples, Inputs, Job, LocalTrain, Prototype, ServerState, State, Update

with one_line(PrivacyError, "an audit needs SciPy: pip install 'feddf[privacy]'", ImportError):
    from scipy.stats import binom

CLASSES = 4  # of the canaries' labels
SHARES = 1, 4, 16  # guesses are about all canaries, or the surest quarter or sixteenth
LEVEL = 0.05 / 3  # of each bound (two here, one by membership): together they hold with 95 % confidence
RUN = 1000  # canaries of one run, where a run can have several
ATTACKED = 4  # of the clients a quarter is attacked, and the others are shadows
POOL = 500  # inputs whose answers are distilled, at the most
DISTILLATION = DistillConfig(steps=200, batch_size=POOL, lr=0.1, early_stopping="none")
INPUTS = 64  # of the pool on which a canary votes; half of them are answered at the most


def p_value(m: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the chance of so many right guesses under (ε, δ): P[B ≥ v] + 2mδ max_i P[v > B ≥ v − i] / i.

    B is binomial: each of the guesses is right with e^ε/(1 + e^ε) (Steinke et al. 2023, theorem 5.2).
    """
    odds = binom(guesses, 1 / (1 + exp(-epsilon)))
    below = np.cumsum(odds.pmf(np.arange(right - 1, -1, -1))) / np.arange(1, right + 1)
    return min(1.0, float(odds.sf(right - 1) + 2 * m * delta * below.max(initial=0.0)))


def least_epsilon(scores: Tensor, included: Tensor, delta: float) -> float:
    """Return the ε up to which any mechanism is refuted."""
    m, order = len(scores), scores.argsort()
    halves = [m // share // 2 for share in SHARES]
    right = [int(included[order[-half:]].sum() + (~included[order[:half]]).sum()) for half in halves]
    tries = [(m, 2 * half, count) for half, count in zip(halves, right, strict=True)]
    return least(lambda e: all(p_value(*one, e, delta) >= LEVEL / len(tries) for one in tries), 0.0, 30.0, 1e-3)


def most_noise(scores: Tensor, included: Tensor, mechanism: Mechanism) -> float:
    """Return the noise from which on the claimed mechanism is refuted, or infinity.

    "In" is guessed beyond the threshold that is best for a quarter of the canaries; guesses about the others are
    counted. They are independent, and under a mechanism each is right with (1 + TV)/2 at the most, where TV = δ(0) is
    the total variation between neighbors.
    """
    some = len(scores) // 4
    order = scores[:some].argsort()
    inside = included[:some][order].long()
    threshold = scores[:some][order][(1 - 2 * inside).cumsum(dim=0).argmax()]
    right = int(((scores > threshold) == included)[some:].sum())

    def refuted(noise: float) -> bool:
        chance = (1 + advantage_of(replace(mechanism, noise=noise))) / 2
        return float(binom.sf(right - 1, len(scores) - some, chance)) < LEVEL

    noise = least(refuted, 0.2 * mechanism.noise, 10 * mechanism.noise, 0.01)
    return noise if refuted(noise) else inf


def canary_scores(plan: Plan, m: int, scale: float = 1.0, source: Source = os.urandom) -> tuple[Tensor, Tensor]:
    """Return the scores of m canaries, and which were in, after all planned rounds with ``scale`` times the noise."""
    included = uniform(m, source) < 0.5
    noise = Noise(plan.a_round.noise * scale, source)
    scores = {"dp-sgd": _records, "heads": _heads, "weights": _clients, "answers": _answers, "votes": _votes}
    return torch.cat([scores[plan.privacy.chosen](some, plan, noise) for some in included.split(RUN)]), included


def _records(there: Tensor, plan: Plan, noise: Noise) -> Tensor:
    """Records with an input of their own each, in the training of a client that has no others."""
    m, labels, privacy = len(there), torch.arange(len(there)) % CLASSES, plan.privacy
    inputs = Inputs(torch.arange(m), lambda rows: 100.0 * F.one_hot(rows, m).float())  # far beyond the clip
    canaries = Examples(inputs, labels, classes(CLASSES))
    prototype = Prototype("linear", lambda: Linear((m,), CLASSES))
    state: State = {key: torch.zeros_like(value) for key, value in prototype.build().state_dict().items()}
    half = partial(dp_sgd, noise=noise, config=privacy, batch_size=1)
    client = Client("canaries", "linear", there.nonzero().flatten())
    local = LocalConfig(epochs=plan.a_round.times // steps_of_epoch(privacy.sampling), lr=1e-9 / privacy.clip)
    for number in range(plan.rounds):
        job, prototypes = Job(client, number + 1, state, 0), {"linear": prototype}
        state = local_update(job, prototypes=prototypes, train=canaries, local=local, half=half).state
    weight = next(value for key, value in state.items() if key.endswith("weight"))
    return weight.gather(0, labels[None])[0] - weight.mean(dim=0)


def _heads(included: Tensor, plan: Plan, noise: Noise) -> Tensor:
    """A record that is surely taken for another class, where no other record holds the head back; a client each.

    Records of both classes lie so close together that the head between them is steep. Far off on that way, at the
    canary, probabilities are 0 and 1: the gradient's norm is √2, and from Λ = 1 on the head moves by 94 % of the
    sensitivity (86 % at Λ = 0.1).
    """
    clip, regularization = plan.privacy.clip, plan.privacy.regularization
    n = ceil(200 * regularization) + 100
    features = clip * torch.tensor([[0.0, 1.0]] * n + [[0.02, 1.0]] * n + [[1.0, 0.0]]).expand(2, -1, -1)
    labels = torch.tensor([[1] * n + [0] * n + [-1], [1] * n + [0] * n + [1]])
    solved = solve_heads(extended(features, clip), labels, 2, regularization)

    def drawn(heads: Tensor, noise: Noise) -> Tensor:
        weight, bias = released(heads, noise, plan.privacy)
        return torch.cat([weight * clip / sqrt(1 - BIAS**2), bias.unsqueeze(-1) / BIAS], dim=-1).flatten(1)

    without, with_it = drawn(solved, Noise(0.0))
    scores: Tensor = (drawn(solved[included.long()], noise) - without) @ (with_it - without)
    return scores


def _clients(included: Tensor, plan: Plan, noise: Noise) -> Tensor:
    """Clients that change a weight of their own each, by more than the clip."""
    privacy, server = plan.privacy, ServerState(0, {"m": {"w": torch.zeros(len(included))}})
    fuse = noisy_groups(fedavg(uniform_average), Releases(), noise=noise, config=privacy)
    changes = 10 * privacy.clip * torch.diag(included.float())
    for number in range(1, plan.rounds + 1):
        rows = server.models["m"]["w"] + changes
        server = fuse(server, [Update(str(k), "m", number, {"w": row}, 1) for k, row in enumerate(rows)], 0).server
    return server.models["m"]["w"]


def _answers(included: Tensor, plan: Plan, noise: Noise) -> Tensor:
    """Clients that answer two inputs with a class of their own each, or say nothing."""
    m, mean = len(included), included.double().expand(2, -1) / len(included)
    told = [noisy_answers(mean, m, noise=noise, config=plan.privacy) for _ in range(plan.rounds)]
    return torch.stack(told).mean(dim=(0, 1))


def _votes(included: Tensor, plan: Plan, noise: Noise) -> Tensor:
    """A client that votes for class 0, or not at all; a run each. Its score is the log-likelihood, to first order."""
    half = INPUTS // 2
    config = plan.privacy.model_copy(update={"answered": half})

    def score(there: Tensor) -> float:
        votes = there * F.one_hot(torch.zeros(INPUTS).long(), CLASSES).double()
        told = noisy_votes(votes, 1, noise=noise, config=config)
        clear = told.any(dim=1).nonzero().flatten()
        tested = int(clear[-1]) + 1 if len(clear) == half else INPUTS  # after the last answer nothing is told of tests
        return len(clear) - tested / 2 + 1.2 * (float(told[:, 0].sum()) - len(clear) / CLASSES)

    return torch.tensor([sum(score(there) for _ in range(plan.rounds)) for there in included], dtype=torch.float64)


def lower_bounds(plan: Plan, scores: Tensor, included: Tensor) -> dict[str, float]:
    """Return what a plan claims, and what canaries refute of it."""
    mechanism = replace(plan.a_round, times=plan.a_round.times * plan.rounds)
    of_kind = epsilon_of(replace(mechanism, noise=most_noise(scores, included, mechanism)), plan.privacy.delta)
    refuted = {"lower bound": least_epsilon(scores, included, plan.privacy.delta), "bound for this mechanism": of_kind}
    return {"claimed": plan.spent(plan.rounds), **refuted, "canaries": len(scores)}


def roc(scores: Tensor, included: Tensor) -> tuple[Tensor, Tensor]:
    """Return false and true positive rates at all thresholds, from the highest to the lowest."""
    inside = included[scores.argsort(descending=True)].double()
    return (1 - inside).cumsum(dim=0) / (1 - inside).sum(), inside.cumsum(dim=0) / inside.sum()


# Membership, from answers


def membership(
    train: LocalTrain, prototype: Prototype, start: State, examples: Examples, pool: Inputs, clients: int, size: int
) -> tuple[Tensor, Tensor]:
    """Attack answers by LiRA (Carlini et al. 2022) in its distillation form (arXiv 2502.08001).

    A client tells what its model says about the pool, and nothing else. The attacker distills that into a student, and
    asks how sure the student is of a record: rather as students of shadow clients are that had the record, or as those
    that had not? Returned are log-likelihood ratios, and which records were in, for all pairs of an attacked client and
    a record. Shadow clients train as the attacked ones do, with the same noise. Each client has a secret half of the
    first 2 ``size`` examples, and starts from the weights that are public.
    """
    records = torch.arange(min(2 * size, len(examples)))
    some, asked = examples.take(records), pool.take(torch.arange(min(POOL, len(pool))))
    shadows = clients - clients // ATTACKED
    inside = (uniform(clients * len(records)) < 0.5).reshape(clients, -1)
    inside[1:shadows:2] = ~inside[0 : shadows - 1 : 2]  # of two shadows one has a record and one has not
    sure = []
    for k, mine in enumerate(inside):
        reply = train(Job(Client(f"client-{k}", prototype.name, records[mine]), 1, start, k))
        with threads(1):
            student, answers = prototype.load(start), logits(prototype.load(reply.state), asked).softmax(dim=1)
            distill(student, CachedTargets(answers), asked, DISTILLATION, score=None, seed=k)
            sure.append(confidence(logits(student, some.inputs), some.labels))
    found, densities = torch.stack(sure), []
    for those in (inside[:shadows], ~inside[:shadows]):
        seen = found[:shadows].where(those, torch.nan)
        mean = seen.nanmean(dim=0)
        deviation = (seen - mean).square().nanmean(dim=0).sqrt().clamp(min=1e-6)
        densities.append(torch.distributions.Normal(mean, deviation).log_prob(found[shadows:]))
    return (densities[0] - densities[1]).flatten(), inside[shadows:].flatten()


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log p/(1 − p) of each record's label."""
    others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(dim=1)
    return logits.gather(1, labels[:, None])[:, 0] - others
