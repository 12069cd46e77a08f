"""An audit that attacks a plan: canaries are put in by secret coin flips, and guessed from what is released.

A canary is a record (or client) at the mechanism's worst case, and its score says how far the release has moved in the
very direction in which this canary moves it. m canaries are in one run, as orthogonal to each other, or alone in runs
of their own. The number of right guesses bounds ε from below: by Steinke, Nasr, Jagielski (2023) whatever the mechanism
is; and, canaries being independent trials of it, for the mechanism that is claimed, with some noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, exp, inf, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from feddf.client import local_update
from feddf.config.privacy import PrivacyConfig
from feddf.config.sections import LocalConfig
from feddf.fusion.average import fedavg, uniform_average
from feddf.fusion.ensemble import CachedTargets, EnsembleTargets, MakeTargets
from feddf.models.small import Linear
from feddf.outputs import classes
from feddf.privacy.accountant import Mechanism, advantage_of, epsilon_of, least
from feddf.privacy.clients import noisy_answers, noisy_groups, noisy_votes
from feddf.privacy.dpsgd import dp_sgd
from feddf.privacy.heads import BIAS, extended, released, solve_heads
from feddf.privacy.noise import Source, coins, system
from feddf.privacy.plan import Plan
from feddf.types import Client, Examples, Inputs, Job, Prototype, ServerState, State, Update

CLASSES = 4  # of the canaries' labels
SHARES = 1, 4, 16  # guesses are about all canaries, or the surest quarter or sixteenth
LEVEL = 0.05 / 3  # of each bound (two here, one by membership): together they hold with 95 % confidence
RUN = 1000  # canaries of one run, where a run can have several
INPUTS = 64  # of the pool on which a canary votes; half of them are answered at the most


def p_value(m: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the chance of so many right guesses under (ε, δ): P[B ≥ v] + 2mδ max_i P[v > B ≥ v − i] / i.

    B is binomial: each of the guesses is right with e^ε/(1 + e^ε) (Steinke et al. 2023, theorem 5.2).
    """
    from scipy.stats import binom

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
    from scipy.stats import binom

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


def canary_scores(
    plan: Plan, privacy: PrivacyConfig, epochs: int, m: int, scale: float = 1.0, source: Source = system
) -> tuple[Tensor, Tensor]:
    """Return the scores of m canaries, and which were in, after all planned rounds with ``scale`` times the noise."""
    included, noise = coins(m, 0.5, source), plan.noise * scale
    run: Callable[[Tensor], Tensor] = {
        "dp-sgd": partial(_records, noise=noise, rounds=plan.rounds, privacy=privacy, epochs=epochs, source=source),
        "heads": partial(_heads, noise=noise, privacy=privacy, source=source),
        "weights": partial(_clients, noise=noise, rounds=plan.rounds, privacy=privacy, source=source),
        "answers": partial(_answers, noise=noise, rounds=plan.rounds, source=source),
        "votes": partial(_votes, noise=noise, rounds=plan.rounds, privacy=privacy, source=source),
    }[plan.on]
    return torch.cat([run(some) for some in included.split(RUN)]), included


def _records(
    there: Tensor, *, noise: float, rounds: int, privacy: PrivacyConfig, epochs: int, source: Source
) -> Tensor:
    """Records with an input of their own each, in the training of a client that has no others."""
    m, labels = len(there), torch.arange(len(there)) % CLASSES
    inputs = Inputs(torch.arange(m), lambda rows: 100.0 * F.one_hot(rows, m).float())  # far beyond the clip
    canaries = Examples(inputs, labels, classes(CLASSES))
    prototype = Prototype("linear", lambda: Linear((m,), CLASSES))
    state = {key: torch.zeros_like(value) for key, value in prototype.build().state_dict().items()}
    half = dp_sgd(noise=noise, clip=privacy.clip, sampling=privacy.sampling, batch_size=1, source=source)
    client = Client("canaries", "linear", there.nonzero().flatten())
    given: Any = {"prototypes": {"linear": prototype}, "train": canaries, "half": half}
    for number in range(rounds):
        job = Job(client, number + 1, state, 0)
        state = dict(local_update(job, local=LocalConfig(epochs=epochs, lr=1e-9 / privacy.clip), **given).state)
    weight = next(value for key, value in state.items() if key.endswith("weight"))
    return weight.gather(0, labels[None])[0] - weight.mean(dim=0)


def _heads(included: Tensor, *, noise: float, privacy: PrivacyConfig, source: Source) -> Tensor:
    """A record that is surely taken for another class, where no other record holds the head back; a client each.

    Records of both classes lie so close together that the head between them is steep. Far off on that way, at the
    canary, probabilities are 0 and 1: the gradient's norm is √2, and from Λ = 1 on the head moves by 94 % of the
    sensitivity (86 % at Λ = 0.1).
    """
    n, clip = ceil(200 * privacy.regularization) + 100, privacy.clip
    features = clip * torch.tensor([[0.0, 1.0]] * n + [[0.02, 1.0]] * n + [[1.0, 0.0]]).expand(2, -1, -1)
    labels = torch.tensor([[1] * n + [0] * n + [-1], [1] * n + [0] * n + [1]])
    solved = solve_heads(extended(features, clip), labels, 2, privacy.regularization)
    given: Any = {"clip": clip, "regularization": privacy.regularization, "source": source}

    def drawn(heads: Tensor, noise: float) -> Tensor:
        weight, bias = released(heads, noise=noise, **given)
        return torch.cat([weight * clip / sqrt(1 - BIAS**2), bias.unsqueeze(-1) / BIAS], dim=-1).flatten(1)

    without, with_it = drawn(solved, 0.0)
    scores: Tensor = (drawn(solved[included.long()], noise) - without) @ (with_it - without)
    return scores


def _clients(included: Tensor, *, noise: float, rounds: int, privacy: PrivacyConfig, source: Source) -> Tensor:
    """Clients that change a weight of their own each, by more than the clip."""
    m, server = len(included), ServerState(0, {"m": {"w": torch.zeros(len(included))}})
    given: Any = {"clip": privacy.clip, "groups": privacy.groups, "quantile": privacy.quantile, "source": source}
    fuse = noisy_groups(fedavg(uniform_average), lambda number, what, make: make(), noise=noise, **given)
    changes = 10 * privacy.clip * torch.diag(included.float())
    for number in range(1, rounds + 1):
        rows = server.models["m"]["w"] + changes
        server = fuse(server, [Update(str(k), "m", number, {"w": rows[k]}, 1) for k in range(m)], 0).server
    return server.models["m"]["w"]


def _answers(included: Tensor, *, noise: float, rounds: int, source: Source) -> Tensor:
    """Clients that answer two inputs with a class of their own each, or say nothing."""
    mean, make = included.double().expand(2, -1) / len(included), partial(noisy_answers, noise=noise, source=source)
    return torch.stack([_told(make, mean, len(included))["answers"].mean(dim=0) for _ in range(rounds)]).sum(dim=0)


def _votes(included: Tensor, *, noise: float, rounds: int, privacy: PrivacyConfig, source: Source) -> Tensor:
    """A client that votes for class 0, or not at all; a run each. Its score is the log-likelihood, to first order."""
    half = INPUTS // 2
    make = partial(noisy_votes, noise=noise, threshold=privacy.threshold, answered=half, source=source)

    def score(there: Tensor) -> float:
        labels = _told(make, there * F.one_hot(torch.zeros(INPUTS).long(), CLASSES).double(), 1)["labels"]
        clear = (labels >= 0).nonzero().flatten()
        tested = int(clear[-1]) + 1 if len(clear) == half else INPUTS  # after the last answer nothing is told of tests
        return len(clear) - tested / 2 + 1.2 * (int((labels == 0).sum()) - len(clear) / CLASSES)

    return torch.tensor([sum(score(there) for _ in range(rounds)) for there in included], dtype=torch.float64)


def _told(make: Callable[..., MakeTargets], mean: Tensor, clients: int) -> State:
    """Return what is released where so many clients' mean answer is given."""
    told: dict[str, Tensor] = {}

    def once(number: int, what: str, draw: Callable[[], State]) -> State:
        told.update(draw())
        return told

    given = EnsembleTargets(CachedTargets(mean), None, {})
    make(lambda updates, seed, past: given, once)([Update("", "m", 1, {}, 1)] * clients, 0, {})
    return told


def lower_bounds(plan: Plan, scores: Tensor, included: Tensor) -> dict[str, float]:
    """Return what a plan claims, and what canaries refute of it."""
    mechanism = plan.a_round.repeated(plan.rounds)
    of_kind = epsilon_of(replace(mechanism, noise=most_noise(scores, included, mechanism)), plan.delta)
    refuted = {"lower bound": least_epsilon(scores, included, plan.delta), "bound for this mechanism": of_kind}
    return {"claimed": plan.spent(plan.rounds), **refuted, "canaries": len(scores)}
