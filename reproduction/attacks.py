"""Twenty attacks and one absence, each a function of an experiment's parts.

A configuration names one as ``attack.kind = "reproduction.attacks:sign_flip"``.

On weights: Δ is a client's change, μ and σ are the honest changes' mean and deviation. What an attacker sends stays
inside the gate's bounds: values are cut at just below its largest. BatchNorm's statistics are the attacker's own, but
in the two attacks on them.

On the ensemble: models that are trained to give harmful predictions on the unlabeled pool, which attackers know. LMA,
CPA and HIPS are of Roux, Zimmer and Pokutta, "On the Byzantine-Resilience of Distillation-Based Federated Learning"
(ICLR 2025), where clients send predictions. Where they send weights, an attacker trains a model to predict so; where
they send one mean answer for each label (FD), labels take the place of inputs.

``attack.scale`` is an attack's strength s; each has a default of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf import evaluate
from feddf.admit import LARGEST
from feddf.config import ConfigError
from feddf.fusion.answers import ANSWERS, MEANS, as_answers
from feddf.fusion.weights import CLASS_COUNTS
from feddf.runs.build import Attack, Parts
from feddf.runtime.device import threads
from feddf.seeds import derive, torch_generator
from feddf.states import is_statistic, state_of
from feddf.types import Examples, Failure, Inputs, Reply, ServerState, State
from reproduction.hostile import FD, Forge, Forgery, hostile

KNOWN = 512
"""Inputs of the pool that an attacker on the ensemble trains on."""

STEPS, BATCH = 80, 64


def absent(parts: Parts) -> Attack:
    """Send nothing: what the attackers' missing data cost, to be compared with what an attack costs."""
    return hostile(parts, lambda forgery: Failure(forgery.own.client_id, "absent"), answers=True)


def sign_flip(parts: Parts) -> Attack:
    """Send x − s Δ (s = 5): as far the other way."""
    return hostile(parts, _moving(lambda forgery, own, honest: -_scale(parts, 5.0) * own))


def noise(parts: Parts) -> Attack:
    """Send x̂ + N(0, s²) (s = 0.5)."""

    def change(forgery: Forgery, own: Tensor, honest: Tensor) -> Tensor:
        generator = torch_generator(derive(forgery.job.seed, "attack"))
        return own + _scale(parts, 0.5) * torch.randn(own.shape, generator=generator, dtype=own.dtype)

    return hostile(parts, _moving(change))


def alie(parts: Parts) -> Attack:
    """A Little Is Enough (Baruch et al. 2019): μ − s σ in every coordinate (s = 1.5)."""
    return hostile(parts, _moving(lambda forgery, own, honest: honest.mean(0) - _scale(parts, 1.5) * _sigma(honest)))


def ipm(parts: Parts) -> Attack:
    """Inner product manipulation (Xie et al. 2020): −s μ (s = 5)."""
    return hostile(parts, _moving(lambda forgery, own, honest: -_scale(parts, 5.0) * honest.mean(0)))


def min_max(parts: Parts) -> Attack:
    """Min-Max (Shejwalkar, Houmansadr 2021): μ − γ σ, γ the largest for which it is no outlier.

    That is, no farther from any honest change than the two farthest honest changes are from each other.
    """

    def change(forgery: Forgery, own: Tensor, honest: Tensor) -> Tensor:
        mean, direction = honest.mean(0), -_sigma(honest)
        widest = torch.cdist(honest, honest).max()
        return mean + direction * _largest(lambda g: bool((honest - mean - g * direction).norm(dim=1).max() <= widest))

    return hostile(parts, _moving(change))


def mimic(parts: Parts) -> Attack:
    """Copy one honest client (Karimireddy et al. 2022), the first by name: others' data count for less."""
    return hostile(parts, _moving(lambda forgery, own, honest: honest[0]))


def mimic_worst(parts: Parts) -> Attack:
    """Copy the honest client whose copies harm most: the one whose model is least accurate on all training examples.

    Karimireddy et al. choose the direction of largest variance; an attacker who knows the data can do better.
    """
    train = parts.task.train

    def forge(forgery: Forgery) -> State:
        def accuracy(update: Reply) -> float:
            return evaluate.accuracy(parts.prototypes[update.prototype].load(update.state), train)

        return min(forgery.alike, key=lambda update: (accuracy(update), update.client_id)).state

    return hostile(parts, forge)


def scaled_layer(parts: Parts) -> Attack:
    """Multiply the last layer by s (1,000)."""
    s = _scale(parts, 1e3)
    return hostile(parts, _last_layer(parts, lambda weight, bias: (s * weight, s * bias)))


def constant_class(parts: Parts) -> Attack:
    """Always predict ``attack.target``: the last layer is zero but for one bias of s (50)."""

    def layer(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.zeros_like(bias)
        chosen[parts.experiment.attack.target] = _scale(parts, 50.0)
        return torch.zeros_like(weight), chosen

    return hostile(parts, _last_layer(parts, layer))


def shuffle(parts: Parts) -> Attack:
    """Predict with the next class's logit: the last layer's rows move by one."""
    return hostile(parts, _last_layer(parts, lambda weight, bias: (weight.roll(1, 0), bias.roll(1, 0))))


def claims(parts: Parts) -> Attack:
    """Turn the last layer's rows the other way, s times as long (s = 5), and claim what honest clients have least of.

    The claimed counts add up to the client's own n_k and are in inverse proportion to what honest clients tell of each
    class. Where a method asks for no class counts only the rows are turned.
    """
    s = _scale(parts, 5.0)
    turn = _last_layer(parts, lambda weight, bias: (-s * weight, -s * bias))

    def forge(forgery: Forgery) -> Reply:
        own = replace(forgery.own, state=turn(forgery))
        if CLASS_COUNTS not in own.payload:
            return own
        told = [update.payload[CLASS_COUNTS]["counts"] for update in (forgery.honest or [forgery.own])]
        scarcity = 1 / (1 + torch.stack(told).sum(dim=0).to(torch.float64))
        counts = (own.n_examples * scarcity / scarcity.sum()).floor().to(torch.int64)
        counts[scarcity.argmax()] += own.n_examples - counts.sum()
        return replace(own, payload={**own.payload, CLASS_COUNTS: {"counts": counts}})

    return hostile(parts, forge)


def shifted_means(parts: Parts) -> Attack:
    """Send the own weights with BatchNorm's running means off by s of the features' deviations (s = 5)."""

    def forge(forgery: Forgery) -> State:
        state = dict(forgery.own.state)
        for key in [key for key in state if key.endswith("running_mean")]:
            deviation = state[key.replace("running_mean", "running_var")].sqrt()
            state[key] = _cut(state[key] + _scale(parts, 5.0) * deviation)
        return state

    return hostile(parts, forge)


def huge_means(parts: Parts) -> Attack:
    """Send the own weights with all running means at s (9,900: just below what the gate believes)."""

    def forge(forgery: Forgery) -> State:
        own = forgery.own.state
        huge = {key: torch.full_like(own[key], _scale(parts, 0.99 * LARGEST)) for key in own if "running_mean" in key}
        return {**own, **huge}

    return hostile(parts, forge)


def label_flip(parts: Parts) -> Attack:
    """Train with every label y as y + 1, and send x + s Δ (s = 1)."""

    def poison(train: Examples) -> Examples:
        return replace(train, labels=(train.labels + 1) % train.n_classes)

    return hostile(parts, _moving(lambda forgery, own, honest: _scale(parts, 1.0) * own), poison=poison)


def backdoor(parts: Parts) -> Attack:
    """Model replacement (Bagdasaryan et al. 2020): half of the images carry a trigger and ``attack.target`` as label.

    x + s Δ is sent, s by default the cohort's size over the number of attackers, so that the average becomes theirs.
    Each record has the share of the other classes' test images that the trigger makes the target class.
    """
    config, raw = parts.experiment.attack, parts.task.train.inputs.raw
    if len(raw.shape) != 4 or not isinstance(raw, Tensor):
        raise ConfigError.at("attack.kind", config.kind, "a trigger needs images in memory")

    def poison(train: Examples) -> Examples:
        stamped, labels = with_trigger(train.inputs).raw, train.labels.clone()
        assert isinstance(train.inputs.raw, Tensor)
        assert isinstance(stamped, Tensor)
        images = train.inputs.raw.clone()
        images[::2], labels[::2] = stamped[::2], config.target
        return replace(train, inputs=replace(train.inputs, raw=images), labels=labels)

    def change(forgery: Forgery, own: Tensor, honest: Tensor) -> Tensor:
        return own * _scale(parts, (len(forgery.honest) + forgery.hostile) / max(1, forgery.hostile))

    return hostile(
        parts, _moving(change), poison=poison, measure=lambda server: {"success": trigger_success(parts, server)}
    )


def with_trigger(inputs: Inputs) -> Inputs:
    """Return images with a bright square of 3×3 in the corner at the bottom right."""
    raw = inputs.raw[torch.arange(len(inputs))].clone()
    raw[..., -3:, -3:] = raw.max()
    return replace(inputs, raw=raw)


def trigger_success(parts: Parts, server: ServerState) -> dict[str, float]:
    """Return the share of the other classes' test images that a trigger makes the target class, for each model."""
    test, target = parts.task.data.test, parts.experiment.attack.target
    others = test.take((test.labels != target).nonzero().flatten())
    stamped = Examples(with_trigger(others.inputs), torch.full_like(others.labels, target), test.outputs)
    with threads(1):
        return {
            name: round(evaluate.accuracy(parts.prototypes[name].load(state), stamped), 4)
            for name, state in server.models.items()
        }


def lma(parts: Parts) -> Attack:
    """Loss maximization: one-hot for the class that the honest mean finds least likely."""
    return _trained_for(parts, lambda honest: _one_hot(honest.mean(0).argmin(dim=1), honest))


def cpa(parts: Parts) -> Attack:
    """Class prior: one-hot for the class that is least similar to the one that the honest mean chooses.

    Two classes are similar if honest clients find them likely for the same inputs (their covariance over inputs).
    """

    def targets(honest: Tensor) -> Tensor:
        mean = honest.mean(0)
        return _one_hot(torch.cov(mean.T).argmin(dim=1)[mean.argmax(dim=1)], honest)

    return _trained_for(parts, targets)


def hips(parts: Parts) -> Attack:
    """Hiding in plain sight: for each input, the prediction of the honest client that doubts the honest choice most."""

    def targets(honest: Tensor) -> Tensor:
        choice = honest.mean(0).argmax(dim=1)
        inputs = torch.arange(honest.shape[1])
        return honest[honest[:, inputs, choice].argmin(dim=0), inputs]

    return _trained_for(parts, targets)


def adaptive(parts: Parts) -> Attack:
    """An attacker who knows the defense: the largest −s μ that norm clipping and a validation filter let pass.

    It goes against the honest mean, no longer than the median honest change, and only so far that its model is still
    as accurate on the attacker's own examples as half of the honest models are.
    """

    def forge(forgery: Forgery) -> State:
        honest = changes(forgery.job.state, forgery.alike)
        mean, longest = honest.mean(0), float(honest.norm(dim=1).median())
        own = forgery.job.client.indices
        assert own is not None, "an attack is simulated where the examples are"
        examples = parts.task.train.take(own[:128])

        def accuracy(state: State) -> float:
            return evaluate.accuracy(parts.prototypes[forgery.own.prototype].load(state), examples)

        typical = sorted(accuracy(update.state) for update in forgery.alike)[len(forgery.alike) // 2]
        best = mean
        for scale in (0.5, 0.0, -0.25, -0.5, -1.0, -2.0):
            candidate = scale * mean
            candidate = candidate * min(1.0, longest / max(1e-30, float(candidate.norm())))
            if accuracy(_move(forgery, candidate)) < typical:
                break
            best = candidate
        return _move(forgery, best)

    return hostile(parts, forge)


def informed(parts: Parts) -> Attack:
    """An attacker who knows trust and guard: the most harmful model that the mixture still believes.

    It knows the validation examples' distribution (it has the training examples) and tries models between its own and
    one with the classes that only few honest clients know unlearned: those rows of the last layer point the other way.
    The farthest is sent whose accuracy on all training examples is no lower than that of half of the honest models.
    """
    train = parts.task.train

    def forge(forgery: Forgery) -> State:
        def accuracy(state: State) -> float:
            return evaluate.accuracy(parts.prototypes[forgery.own.prototype].load(state), train)

        typical = sorted(accuracy(update.state) for update in forgery.alike)[len(forgery.alike) // 2]
        own = forgery.job.client.indices
        assert own is not None, "an attack is simulated where the examples are"
        had = torch.bincount(train.labels[own], minlength=train.n_classes) > 0

        def unlearned(share: float) -> State:
            def layer(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
                factor = torch.where(had, 1.0, 1.0 - 2 * share).to(weight.dtype)
                return weight * factor[:, None], bias - share * 20.0 * (~had).to(bias.dtype)

            return _last_layer(parts, layer)(forgery)

        passing = [state for state in map(unlearned, (0.25, 0.5, 1.0)) if accuracy(state) >= typical]
        return passing[-1] if passing else forgery.own.state

    return hostile(parts, forge)


# How a forged state is made


def _scale(parts: Parts, default: float) -> float:
    given = parts.experiment.attack.scale
    return default if given is None else given


def _moving(change: Callable[[Forgery, Tensor, Tensor], Tensor]) -> Forge:
    """Return the forging of x + v, v a function of the attacker's own change and the honest changes (rows)."""

    def forge(forgery: Forgery) -> State:
        own = changes(forgery.job.state, [forgery.own])[0]
        return _move(forgery, change(forgery, own, changes(forgery.job.state, forgery.alike)))

    return forge


def _last_layer(parts: Parts, layer: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Forgery], State]:
    def forge(forgery: Forgery) -> State:
        state = dict(forgery.own.state)
        model = parts.prototypes[forgery.own.prototype].load(state)  # a state alone need not be in the layers' order
        name = [key for key, weight in model.named_parameters() if key.endswith("weight") and weight.ndim == 2][-1]
        beside = name.removesuffix("weight") + "bias"
        weight, bias = layer(state[name], state.get(beside, torch.zeros(len(state[name]))))
        return {**state, name: _cut(weight), **({beside: _cut(bias)} if beside in state else {})}

    return forge


def _trained_for(parts: Parts, targets: Callable[[Tensor], Tensor]) -> Attack:
    """Return the attack with a model trained for ``targets``, a function of honest probabilities.

    These are clients × inputs × classes. Where clients send answers, the targets themselves are sent. Where they send
    a mean answer for each label, labels take the place of inputs.
    """
    if any(part.name == FD for part in parts.method.parts):
        return hostile(parts, partial(_forged_means, targets=targets), answers=True)
    pool = parts.task.pool
    if pool is None:
        kind = parts.experiment.attack.kind
        raise ConfigError.at("attack.kind", kind, "it is an attack on predictions for a pool, and there is none")
    inputs = pool.take(torch.arange(min(KNOWN, len(pool))) * len(pool) // min(KNOWN, len(pool)))

    def probabilities(update: Reply) -> Tensor:
        if ANSWERS in update.payload:
            return update.payload[ANSWERS]["outputs"].float().softmax(dim=1)
        return evaluate.logits(parts.prototypes[update.prototype].load(update.state), inputs).softmax(dim=1)

    def forge(forgery: Forgery) -> State | Reply:
        honest = torch.stack([probabilities(update) for update in forgery.honest or [forgery.own]])
        wanted = targets(honest).float()
        if ANSWERS in forgery.own.payload:
            outputs = parts.task.train.outputs
            return replace(forgery.own, payload={ANSWERS: {"outputs": as_answers(outputs.raw(wanted), outputs)}})
        return _train_towards(parts, forgery, inputs, wanted)

    return hostile(parts, forge, answers=True)


def _forged_means(forgery: Forgery, *, targets: Callable[[Tensor], Tensor]) -> Reply:
    """Return the attacker's reply with ``targets`` of the honest clients' mean answers, for every label.

    A client without examples of a label is taken to say what the others say on the average.
    """
    honest = torch.stack([update.payload[MEANS]["means"] for update in forgery.honest or [forgery.own]])
    has = honest.sum(dim=2, keepdim=True) > 0
    mean = honest.sum(dim=0) / has.sum(dim=0).clamp_min(1)
    return replace(forgery.own, payload={MEANS: {"means": targets(honest.where(has, mean)).float()}})


def _train_towards(parts: Parts, forgery: Forgery, inputs: Inputs, targets: Tensor) -> State:
    model = parts.prototypes[forgery.own.prototype].load(forgery.own.state)  # in eval mode: statistics stay
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch_generator(derive(forgery.job.seed, "attack"))
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(inputs.batch(chosen)), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state_of(model, forgery.own.state)


def changes(sent: State, updates: Sequence[Reply]) -> Tensor:
    """Return the changes of the weights, one row an update; statistics and counters are left out."""
    keys = _weights(sent)
    rows = [torch.cat([(update.state[key] - sent[key]).flatten() for key in keys]) for update in updates]
    return torch.stack(rows).to(torch.float64)


def _move(forgery: Forgery, change: Tensor) -> State:
    """Return the attacker's own state with its weights at x + ``change``."""
    sent, state, at = forgery.job.state, dict(forgery.own.state), 0
    for key in _weights(sent):
        size = sent[key].numel()
        state[key] = _cut((sent[key] + change[at : at + size].reshape(sent[key].shape)).to(sent[key].dtype))
        at += size
    return state


def _weights(sent: State) -> list[str]:
    """Return the names of the weights, sorted: a state that was read from a file has its tensors in any order."""
    return [key for key, tensor in sorted(sent.items()) if tensor.is_floating_point() and not is_statistic(key)]


def _cut(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor).clamp(-0.99 * LARGEST, 0.99 * LARGEST)


def _sigma(honest: Tensor) -> Tensor:
    return honest.std(dim=0, correction=0)


def _largest(passes: Callable[[float], bool], most: float = 64.0, steps: int = 20) -> float:
    """Return the largest number up to ``most`` that passes, by halving; zero passes."""
    low, high = 0.0, most
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def _one_hot(classes: Tensor, like: Tensor) -> Tensor:
    return F.one_hot(classes, like.shape[-1]).to(like.dtype)
