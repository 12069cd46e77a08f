"""Attacks on the ensemble: models that are trained to give harmful answers on the unlabeled pool, which attackers know.

LMA, CPA and HIPS are of Roux, Zimmer and Pokutta, "On the Byzantine-Resilience of Distillation-Based Federated
Learning" (ICLR 2025), where clients send answers. Here they send weights, so an attacker trains a model to answer so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf import evaluate
from feddf.attacks.hostile import Attack, Forgery, Scene
from feddf.attacks.on_weights import changes, moved
from feddf.config.errors import ConfigError
from feddf.config.sections import AttackConfig
from feddf.seeds import derive, torch_generator
from feddf.states import read_off
from feddf.types import Inputs, Reply, State

KNOWN = 512
"""Inputs of the pool that an attacker trains on."""

STEPS = 80
BATCH = 64

Answer = Callable[[Tensor], Tensor]
"""Honest probabilities (clients × inputs × classes) -> the answers to train for (inputs × classes)."""


def lma(config: AttackConfig, scene: Scene) -> Attack:
    """Loss maximisation: one-hot for the class that the honest mean finds least likely."""
    return _trained_for(scene, config, lambda honest: _one_hot(honest.mean(0).argmin(dim=1), honest))


def cpa(config: AttackConfig, scene: Scene) -> Attack:
    """Class prior: one-hot for the class that is least similar to the one that the honest mean chooses.

    Two classes are similar if honest clients find them likely for the same inputs (their covariance over inputs).
    """

    def answer(honest: Tensor) -> Tensor:
        mean = honest.mean(0)
        return _one_hot(torch.cov(mean.T).argmin(dim=1)[mean.argmax(dim=1)], honest)

    return _trained_for(scene, config, answer)


def hips(config: AttackConfig, scene: Scene) -> Attack:
    """Hiding in plain sight: to each input, the answer of the honest client that doubts the honest choice most."""

    def answer(honest: Tensor) -> Tensor:
        choice = honest.mean(0).argmax(dim=1)
        inputs = torch.arange(honest.shape[1])
        return honest[honest[:, inputs, choice].argmin(dim=0), inputs]

    return _trained_for(scene, config, answer)


def adaptive(config: AttackConfig, scene: Scene) -> Attack:
    """An attacker who knows the defence: the largest −s μ that norm clipping and a validation filter let pass.

    It goes against the honest mean, no longer than the median honest change, and only so far that its model is still
    as accurate on the attacker's own examples as half of the honest models are.
    """

    def forge(forgery: Forgery) -> State:
        honest = changes(forgery.job.state, forgery.alike)
        mean, longest = honest.mean(0), float(honest.norm(dim=1).median())
        own = forgery.job.client.indices
        assert own is not None, "an attack is simulated where the examples are"
        examples = scene.train.take(own[:128])

        def accuracy(state: State) -> float:
            return evaluate.accuracy(scene.prototypes[forgery.own.prototype].load(state), examples)

        typical = sorted(accuracy(update.state) for update in forgery.alike)[len(forgery.alike) // 2]
        best = mean
        for scale in (0.5, 0.0, -0.25, -0.5, -1.0, -2.0):
            candidate = scale * mean
            candidate = candidate * min(1.0, longest / max(1e-30, float(candidate.norm())))
            if accuracy(moved(forgery, candidate)) < typical:
                break
            best = candidate
        return moved(forgery, best)

    return Attack(forge=forge)


def _trained_for(scene: Scene, config: AttackConfig, answer: Answer) -> Attack:
    if scene.pool is None:
        raise ConfigError.at("attack.kind", config.kind, "it is an attack on the answers to a pool, and there is none")
    known = torch.arange(min(KNOWN, len(scene.pool))) * len(scene.pool) // min(KNOWN, len(scene.pool))
    inputs = scene.pool.take(known)

    def forge(forgery: Forgery) -> State:
        honest = torch.stack([_probabilities(scene, update, inputs) for update in forgery.honest or [forgery.own]])
        return _taught(scene, forgery, inputs, answer(honest).float())

    return Attack(forge=forge)


def _probabilities(scene: Scene, update: Reply, inputs: Inputs) -> Tensor:
    return evaluate.logits(scene.prototypes[update.prototype].load(update.state), inputs).softmax(dim=1)


def _taught(scene: Scene, forgery: Forgery, inputs: Inputs, targets: Tensor) -> State:
    """Train the attacker's own model towards the answers."""
    model = scene.prototypes[forgery.own.prototype].load(forgery.own.state)  # in eval mode: statistics stay
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch_generator(derive(forgery.job.seed, "attack"))
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(inputs.batch(chosen)), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return read_off(model, forgery.own.state)


def _one_hot(classes: Tensor, like: Tensor) -> Tensor:
    return F.one_hot(classes, like.shape[-1]).to(like.dtype)
