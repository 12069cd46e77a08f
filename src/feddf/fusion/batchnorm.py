"""BatchNorm's running statistics in the average, as rules and fusions around others.

The default, ``average``, treats them like weights and needs nothing from here: FedAvg imports no evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from feddf.evaluate import recalibrate
from feddf.fusion.average import trained
from feddf.runtime.device import threads
from feddf.runtime.execution import Execution
from feddf.states import copy, is_statistic
from feddf.types import Fused, Fusion, Resources, Rule, ServerState, State, Update


def with_statistics(policy: str, rule: Rule, resources: Resources, execution: Execution = Execution()) -> Rule:
    """Return the rule with the policy ``fusion.batchnorm`` for statistics; :func:`local_statistics` is 'local'."""
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
    """Let every client keep its own statistics (SiloBN, Andreux et al. 2020); the server's are the average.

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
