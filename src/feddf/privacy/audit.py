"""An audit that attacks a plan: canaries are put in by secret coin flips, and guessed from what is released.

One run of the real mechanism has m canaries, each a record (or client) that moves a coordinate of its own as far as it
can. Those with the highest scores are guessed to be in, those with the lowest to be out. The number of right guesses
bounds ε from below: by Steinke, Nasr, Jagielski (2023) whatever the mechanism is, and by Mahloujifar, Melis, Chaudhuri
(2024) for the mechanism that is claimed, with some noise: down to 0.4 times the planned one.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from feddf.client import local_update
from feddf.config.privacy import PrivacyConfig
from feddf.config.sections import LocalConfig
from feddf.fusion.average import fedavg, uniform_average
from feddf.models.small import Linear
from feddf.outputs import classes
from feddf.privacy.accountant import Mechanism, PrivacyError, deltas_of, epsilon_of, least
from feddf.privacy.clients import noisy_groups
from feddf.privacy.dpsgd import dp_sgd
from feddf.privacy.heads import private_heads
from feddf.privacy.noise import Source, coins, system
from feddf.privacy.plan import Plan
from feddf.types import Client, Examples, Inputs, Job, Prototype, ServerState, Update

CLASSES = 4  # of the canaries' labels
SHARES = 1, 4, 16  # guesses are about all canaries, or the surest quarter or sixteenth


def p_value(m: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the chance of so many right guesses under (ε, δ): P[B ≥ v] + 2mδ max_i P[v > B ≥ v − i] / i.

    B is binomial: each of the guesses is right with e^ε/(1 + e^ε) (Steinke et al. 2023, theorem 5.2).
    """
    from scipy.stats import binom

    odds = binom(guesses, 1 / (1 + exp(-epsilon)))
    below = np.cumsum(odds.pmf(np.arange(right - 1, -1, -1))) / np.arange(1, right + 1)
    return min(1.0, float(odds.sf(right - 1) + 2 * m * delta * below.max(initial=0.0)))


def refutes(m: int, guesses: int, right: int, mechanism: Mechanism, significance: float) -> bool:
    """Say whether so many right guesses refute a mechanism's trade-off curve (Mahloujifar et al. 2024).

    What has the chance x has at least max_ε e^−ε (x − δ(ε)) with a neighbor, ε of either sign.
    """
    epsilons = np.linspace(0, 20, 201)
    deltas = np.array(deltas_of(mechanism, tuple(epsilons.tolist())))
    factors = np.concatenate([np.exp(-epsilons), np.exp(epsilons)])
    curve = np.concatenate([deltas, 1 - np.exp(-epsilons) * (1 - deltas)])  # δ(−ε) = 1 − e^−ε (1 − δ(ε))
    r, h = significance * right / m, significance * (guesses - right) / m
    for i in range(right - 1, -1, -1):
        more = max(h, float((factors * (r - curve)).max()))
        r, h = r + i / (guesses - i) * (more - h), more
        if r + h > guesses / m:
            return True
    return False


def lower_bounds(scores: Tensor, included: Tensor, mechanism: Mechanism, delta: float) -> tuple[float, float]:
    """Return the ε that is refuted with 95 % confidence: of any mechanism, and of the claimed kind with more noise."""
    m, order = len(scores), scores.argsort()
    halves = [m // share // 2 for share in SHARES]
    right = [int(included[order[-half:]].sum() + (~included[order[:half]]).sum()) for half in halves]
    tries = [(m, 2 * half, count) for half, count in zip(halves, right, strict=True)]
    level = 0.05 / len(tries)
    anyhow = least(lambda e: all(p_value(*one, e, delta) >= level for one in tries), 0.0, 30.0, 1e-3)

    def refuted(noise: float) -> bool:
        return any(refutes(*one, replace(mechanism, noise=noise), level) for one in tries)

    noise = least(refuted, 0.4 * mechanism.noise, 8 * mechanism.noise, 0.01)
    return anyhow, epsilon_of(replace(mechanism, noise=noise), delta) if refuted(noise) else 0.0


def canary_scores(
    plan: Plan, privacy: PrivacyConfig, epochs: int, m: int, scale: float = 1.0, source: Source = system
) -> tuple[Tensor, Tensor]:
    """Return the scores of m canaries, and which were in, after all planned rounds with ``scale`` times the noise."""
    included, noise = coins(m, 0.5, source), plan.noise * scale
    if plan.on == "dp-sgd":
        return _records(included, noise, plan.rounds, privacy, epochs, source), included
    if plan.on == "heads":
        return _heads(included, noise, privacy, source), included
    if plan.on == "weights":
        return _clients(included, noise, plan.rounds, privacy, source), included
    raise PrivacyError(f"privacy.mechanism = '{plan.on}': the audit is for 'dp-sgd', 'heads' and 'weights'")


def _records(there: Tensor, noise: float, rounds: int, privacy: PrivacyConfig, epochs: int, source: Source) -> Tensor:
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
    return _at_labels(next(value for key, value in state.items() if key.endswith("weight")), labels)


def _heads(included: Tensor, noise: float, privacy: PrivacyConfig, source: Source) -> Tensor:
    """Records with an input of their own each, for one head."""
    labels = torch.arange(len(included)) % CLASSES
    rows, there = torch.eye(len(included))[None] * privacy.clip, labels.where(included, -1)[None]
    given = {"noise": noise, "clip": privacy.clip, "regularization": privacy.regularization}
    return _at_labels(private_heads(rows, there, CLASSES, source=source, **given)[0][0], labels)


def _at_labels(weight: Tensor, labels: Tensor) -> Tensor:
    return weight.gather(0, labels[None])[0] - weight.mean(dim=0)


def _clients(included: Tensor, noise: float, rounds: int, privacy: PrivacyConfig, source: Source) -> Tensor:
    """Clients that change a weight of their own each, by more than the clip."""
    m, server = len(included), ServerState(0, {"m": {"w": torch.zeros(len(included))}})
    given: Any = {"clip": privacy.clip, "groups": privacy.groups, "quantile": privacy.quantile, "source": source}
    fuse = noisy_groups(fedavg(uniform_average), lambda number, what, make: make(), noise=noise, **given)
    changes = 10 * privacy.clip * torch.diag(included.float())
    for number in range(1, rounds + 1):
        rows = server.models["m"]["w"] + changes
        server = fuse(server, [Update(str(k), "m", number, {"w": rows[k]}, 1) for k in range(m)], 0).server
    return server.models["m"]["w"]


def audit(plan: Plan, privacy: PrivacyConfig, epochs: int, m: int, scale: float = 1.0) -> dict[str, float]:
    """Return what a plan claims and what canaries refute of it, with 95 % confidence."""
    scores, included = canary_scores(plan, privacy, epochs, m, scale)
    anyhow, of_kind = lower_bounds(scores, included, plan.a_round.repeated(plan.rounds), plan.delta)
    return {"claimed": plan.spent(plan.rounds), "lower bound": anyhow, "of this mechanism": of_kind, "canaries": m}
