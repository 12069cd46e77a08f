"""Averaging of weights: the start of every fusion, all of FedAvg, momentum (FedAvgM), and BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from feddf.evaluate import recalibrate
from feddf.runtime.device import threads
from feddf.runtime.execution import Execution
from feddf.states import copy, is_statistic, weighted_mean
from feddf.types import Fused, Fusion, Prototype, Resources, Rule, ServerState, State, Update

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
    taken from ``inner``. The velocities are the server's memory, so a resumed run goes on with them. With β = 0 this is
    ``inner``, up to rounding.

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


# BatchNorm's running statistics: averaged like weights, unless ``fusion.batchnorm`` says otherwise


def with_statistics(policy: str, rule: Rule, resources: Resources, execution: Execution = Execution()) -> Rule:
    """Return the rule with the statistics of the policy ``fusion.batchnorm``; 'local' is a fusion's matter."""
    if policy == "last":
        return last_statistics(rule)
    return recalibrated(rule, resources, execution) if policy == "recalibrate" else rule


def last_statistics(rule: Rule) -> Rule:
    """Take the statistics of the last client, by id: what the released code's average amounts to."""

    def apply(previous: State, updates: Sequence[Update]) -> State:
        averaged = rule(previous, updates)
        used = trained(updates)
        return {**averaged, **_statistics(used[-1].state)} if used else averaged

    return apply


def recalibrated(rule: Rule, resources: Resources, execution: Execution = Execution()) -> Rule:
    """Estimate the averaged model's statistics again on the unlabeled pool."""

    def apply(previous: State, updates: Sequence[Update]) -> State:
        averaged = rule(previous, updates)
        if averaged is previous or resources.pool is None or not any(map(is_statistic, averaged)):
            return averaged
        with threads(1), execution.begun() as device:  # in the server's own process: its cores must not matter
            model = resources.prototypes[updates[0].prototype].load(averaged, device)
            recalibrate(model, resources.pool)
            return copy(model.state_dict())

    return apply


def local_statistics(inner: Fusion) -> Fusion:
    """Let every client go on with its own statistics (SiloBN, Andreux et al. 2020); the server's are the average.

    They are remembered for each client that ever took part.
    """

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        fused = inner(server, updates, seed)
        now = {update.client_id: _statistics(update.state) for update in updates}
        own = {**fused.server.own, **server.own, **{client: state for client, state in now.items() if state}}
        return replace(fused, server=replace(fused.server, own=own))

    return fuse


def _statistics(state: State) -> dict[str, Tensor]:
    return {key: state[key].clone() for key in state if is_statistic(key)}  # not a view of a file that will go
