"""Attacks on the averaged weights. Δ is a client's change, μ and σ are the honest changes' mean and deviation.

What an attacker sends stays inside the gate's bounds: values are cut at just below its largest, and BatchNorm's
statistics are the attacker's own. ``attack.scale`` is an attack's strength; each has a default of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from feddf.admit import LARGEST
from feddf.attacks.hostile import Attack, Forge, Forgery, Scene
from feddf.config.errors import ConfigError
from feddf.config.sections import AttackConfig
from feddf.data.unlabeled import all_rows
from feddf.seeds import derive, torch_generator
from feddf.states import is_statistic
from feddf.types import Examples, Inputs, Reply, State


def sign_flip(config: AttackConfig, scene: Scene) -> Attack:
    """Send x − s Δ (s = 5): as far the other way."""
    return Attack(forge=_moving(lambda forgery, own, honest: -_scale(config, 5.0) * own))


def noise(config: AttackConfig, scene: Scene) -> Attack:
    """Send x̂ + N(0, s²) (s = 0.5)."""

    def forged(forgery: Forgery, own: Tensor, honest: Tensor) -> Tensor:
        generator = torch_generator(derive(forgery.job.seed, "attack"))
        return own + _scale(config, 0.5) * torch.randn(own.shape, generator=generator, dtype=own.dtype)

    return Attack(forge=_moving(forged))


def alie(config: AttackConfig, scene: Scene) -> Attack:
    """A Little Is Enough (Baruch et al. 2019): μ − s σ in every coordinate (s = 1.5)."""
    return Attack(forge=_moving(lambda forgery, own, honest: honest.mean(0) - _scale(config, 1.5) * _deviation(honest)))


def ipm(config: AttackConfig, scene: Scene) -> Attack:
    """Inner product manipulation (Xie et al. 2020): −s μ (s = 5)."""
    return Attack(forge=_moving(lambda forgery, own, honest: -_scale(config, 5.0) * honest.mean(0)))


def min_max(config: AttackConfig, scene: Scene) -> Attack:
    """Min-Max (Shejwalkar, Houmansadr 2021): μ − γ σ, γ the largest for which it is no outlier.

    That is, no farther from any honest change than the two farthest honest changes are from each other.
    """

    def forged(forgery: Forgery, own: Tensor, honest: Tensor) -> Tensor:
        mean, direction = honest.mean(0), -_deviation(honest)
        widest = torch.cdist(honest, honest).max()
        return mean + direction * _largest(lambda g: bool((honest - mean - g * direction).norm(dim=1).max() <= widest))

    return Attack(forge=_moving(forged))


def mimic(config: AttackConfig, scene: Scene) -> Attack:
    """Copy one honest client (Karimireddy et al. 2022), the first by name: others' data count for less."""
    return Attack(forge=_moving(lambda forgery, own, honest: honest[0]))


def scaled_layer(config: AttackConfig, scene: Scene) -> Attack:
    """Multiply the last layer by s (1,000)."""
    s = _scale(config, 1e3)
    return Attack(forge=_last_layer(scene, lambda weight, bias: (s * weight, s * bias)))


def constant_class(config: AttackConfig, scene: Scene) -> Attack:
    """Always say ``attack.target``: the last layer is zero but for one bias of s (50)."""

    def forged(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.zeros_like(bias)
        chosen[config.target] = _scale(config, 50.0)
        return torch.zeros_like(weight), chosen

    return Attack(forge=_last_layer(scene, forged))


def shuffled_logits(config: AttackConfig, scene: Scene) -> Attack:
    """Answer with the next class's logit: the last layer's rows move by one."""
    return Attack(forge=_last_layer(scene, lambda weight, bias: (weight.roll(1, 0), bias.roll(1, 0))))


def label_flip(config: AttackConfig, scene: Scene) -> Attack:
    """Train with every label y as y + 1, and send x + s Δ (s = 1)."""

    def poison(train: Examples) -> Examples:
        return replace(train, labels=(train.labels + 1) % train.n_classes)

    return Attack(poison, _moving(lambda forgery, own, honest: _scale(config, 1.0) * own))


def backdoor(config: AttackConfig, scene: Scene) -> Attack:
    """Model replacement (Bagdasaryan et al. 2020): half of the images carry a trigger and ``attack.target`` as label.

    x + s Δ is sent, s by default the cohort's size over the number of attackers, so that the average becomes theirs.
    """
    if len(scene.train.inputs.raw.shape) != 4 or not isinstance(scene.train.inputs.raw, Tensor):
        raise ConfigError.at("attack.kind", config.kind, "a trigger needs images in memory")

    def poison(train: Examples) -> Examples:
        stamped, labels = with_trigger(train.inputs), train.labels.clone()
        assert isinstance(train.inputs.raw, Tensor)
        assert isinstance(stamped.raw, Tensor)
        raw = train.inputs.raw.clone()
        raw[::2], labels[::2] = stamped.raw[::2], config.target
        return replace(train, inputs=replace(train.inputs, raw=raw), labels=labels)

    def forged(forgery: Forgery, own: Tensor, honest: Tensor) -> Tensor:
        return own * _scale(config, (len(forgery.honest) + forgery.hostile) / max(1, forgery.hostile))

    return Attack(poison, _moving(forged))


def with_trigger(inputs: Inputs) -> Inputs:
    """Return images with a bright square of 3×3 in the corner at the bottom right."""
    raw = all_rows(inputs.raw).clone()
    raw[..., -3:, -3:] = raw.max()
    return replace(inputs, raw=raw)


# How a forged state is made


def _scale(config: AttackConfig, default: float) -> float:
    return default if config.scale is None else config.scale


def _moving(forge: Callable[[Forgery, Tensor, Tensor], Tensor]) -> Forge:
    """Return the forging of x + v, v a function of the attacker's own change and the honest changes (rows)."""

    def forged(forgery: Forgery) -> State:
        own = changes(forgery.job.state, [forgery.own])[0]
        return moved(forgery, forge(forgery, own, changes(forgery.job.state, forgery.alike)))

    return forged


def _last_layer(scene: Scene, forge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Forge:
    def forged(forgery: Forgery) -> State:
        state = dict(forgery.own.state)
        model = scene.prototypes[forgery.own.prototype].load(state)  # a state alone need not be in the layers' order
        name = [key for key, weight in model.named_parameters() if key.endswith("weight") and weight.ndim == 2][-1]
        beside = name.removesuffix("weight") + "bias"
        weight, bias = forge(state[name], state.get(beside, torch.zeros(len(state[name]))))
        return {**state, name: _cut(weight), **({beside: _cut(bias)} if beside in state else {})}

    return forged


def changes(sent: State, updates: Sequence[Reply]) -> Tensor:
    """Return the changes of the weights, one row an update; statistics and counters are left out."""
    keys = _moving_keys(sent)
    rows = [torch.cat([(update.state[key] - sent[key]).flatten() for key in keys]) for update in updates]
    return torch.stack(rows).to(torch.float64)


def moved(forgery: Forgery, change: Tensor) -> State:
    """Return the attacker's own state with its weights at x + ``change``."""
    sent, state, at = forgery.job.state, dict(forgery.own.state), 0
    for key in _moving_keys(sent):
        size = sent[key].numel()
        state[key] = _cut((sent[key] + change[at : at + size].reshape(sent[key].shape)).to(sent[key].dtype))
        at += size
    return state


def _moving_keys(sent: State) -> list[str]:
    """Return the names of the weights, sorted: a state that was read from a file has its tensors in any order."""
    return [key for key, tensor in sorted(sent.items()) if tensor.is_floating_point() and not is_statistic(key)]


def _cut(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor).clamp(-0.99 * LARGEST, 0.99 * LARGEST)


def _deviation(honest: Tensor) -> Tensor:
    return honest.std(dim=0, correction=0)


def _largest(passes: Callable[[float], bool], most: float = 64.0, steps: int = 20) -> float:
    """Return the largest number up to ``most`` that passes, by halving; zero passes."""
    low, high = 0.0, most
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low
