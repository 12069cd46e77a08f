"""Averaging of weights: the start of every fusion, all of FedAvg, and momentum (FedAvgM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from feddf.states import weighted_mean
from feddf.types import Fused, Fusion, Prototype, Rule, ServerState, State, Update

VELOCITY = "velocity"  # what the velocities of momentum are called in the server's memory


def fedavg(rule: Rule) -> Fusion:
    """FedAvg (McMahan et al. 2017), per prototype: the next model is the weighted average of its clients' models."""

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        averaged = average_by_prototype(rule, server, updates)
        return Fused(server.next(averaged), averaged)

    return fuse


def average_by_prototype(rule: Rule, server: ServerState, updates: Sequence[Update]) -> dict[str, State]:
    """Apply a rule within each prototype's group of clients (lines 9 to 11 of Algorithm 3).

    Args:
        rule: how the weights of one prototype's clients are averaged, for example :func:`average`.
        server: the state whose models a prototype without updates keeps.
        updates: the updates of a round, of all prototypes.
    """
    return {
        prototype: rule(previous, [update for update in updates if update.prototype == prototype])
        for prototype, previous in sorted(server.models.items())
    }


def average(previous: State, updates: Sequence[Update]) -> State:
    """Return Σ n_k x̂_k / Σ n_k over the updates of one prototype (line 11 of Algorithm 3).

    BatchNorm's running statistics are averaged like weights (``docs/decisions/batchnorm.md``).
    Without any trained update the prototype keeps its previous weights.
    """
    used = trained(updates)
    return weighted_mean([one.state for one in used], [one.n_examples for one in used]) if used else previous


def uniform_average(previous: State, updates: Sequence[Update]) -> State:
    """Return the plain mean of the trained updates: what the released code does instead of weighting by n_k."""
    used = trained(updates)
    return weighted_mean([one.state for one in used], [1] * len(used)) if used else previous


def trained(updates: Sequence[Update]) -> list[Update]:
    """Return the updates of clients that had examples to train on."""
    return [update for update in updates if update.n_examples > 0]


def momentum(beta: float, inner: Fusion, prototypes: Mapping[str, Prototype]) -> Fusion:
    """Return v := β v + Δx; x := x − v (appendix C.2), Δx being the previous weights minus those of ``inner``.

    FedAvgM (Hsu et al. 2019), around any fusion. Only parameters have momentum; buffers (BatchNorm's statistics) are
    taken from ``inner``. The velocities are the server's memory, so a resumed run continues with them. With β = 0 this
    is ``inner``, up to rounding.

    Args:
        beta: β, between 0 and 1.
        inner: the fusion that momentum is added to.
        prototypes: the architectures, which tell parameters from buffers.
    """
    names = {
        name: {key for key, _ in prototype.build().named_parameters(remove_duplicate=False)}  # tied weights too
        for name, prototype in prototypes.items()
    }

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        fused = inner(server, updates, seed)
        models: dict[str, State] = {}
        velocities: dict[str, State] = {}
        for name, new in fused.server.models.items():
            old, before = server.models[name], server.memory.get(VELOCITY, {}).get(name, {})
            velocity = {key: old[key] - new[key] + beta * before.get(key, torch.zeros(())) for key in names[name]}
            velocities[name] = velocity
            models[name] = {key: old[key] - velocity[key] if key in velocity else new[key] for key in new}
        memory = {**fused.server.memory, VELOCITY: velocities}
        return replace(fused, server=replace(fused.server, models=models, memory=memory))

    return fuse
