"""Averaging of weights: the start of every fusion, and all of FedAvg."""

from __future__ import annotations

from collections.abc import Sequence

from feddf.config.experiment import Settings
from feddf.config.names import AVERAGES
from feddf.fusion.batchnorm import with_statistics
from feddf.runtime.execution import of_answers
from feddf.states import weighted_mean
from feddf.types import Engine, Fused, Fusion, Resources, Rule, ServerState, State, Update


def fedavg(resources: Resources, settings: Settings, engine: Engine) -> Fusion:
    """FedAvg (McMahan et al. 2017), per prototype: the next model is the weighted average of its clients' models."""
    rule = averaging_rule(resources, settings)

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        averaged = start_from(rule, server, updates)
        return Fused(server.next(averaged), averaged)

    return fuse


def average(previous: State, updates: Sequence[Update]) -> State:
    """Return Σ n_k x̂_k / Σ n_k over the updates of one prototype (line 11 of Algorithm 3).

    BatchNorm's running statistics are averaged like weights (``docs/decisions/batchnorm.md``).
    Without any trained update the prototype keeps its previous weights.
    """
    trained = [update for update in updates if update.n_examples > 0]
    if not trained:
        return previous
    return weighted_mean([update.state for update in trained], [update.n_examples for update in trained])


def uniform_average(previous: State, updates: Sequence[Update]) -> State:
    """Return the plain mean of the trained updates: what the released code does instead of weighting by n_k."""
    trained = [update for update in updates if update.n_examples > 0]
    return weighted_mean([update.state for update in trained], [1] * len(trained)) if trained else previous


def averaging_rule(resources: Resources, settings: Settings) -> Rule:
    """Return the rule that the settings name, with BatchNorm's statistics treated as they say."""
    rule: Rule = AVERAGES[settings.fusion.average]
    return with_statistics(settings.fusion.batchnorm, rule, resources, of_answers(settings.run))


def start_from(rule: Rule, server: ServerState, updates: Sequence[Update]) -> dict[str, State]:
    """Apply a rule within each prototype's group of clients (lines 9 to 11 of Algorithm 3)."""
    return {
        prototype: rule(previous, [update for update in updates if update.prototype == prototype])
        for prototype, previous in sorted(server.models.items())
    }
