"""What becomes of BatchNorm's running statistics in the average, as rules and fusions around others.

The default, ``average``, treats them like weights and needs nothing from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from feddf.recalibrate import recalibrate
from feddf.states import copy, is_statistic
from feddf.threads import threads
from feddf.types import Fused, Fusion, Inputs, Prototype, Rule, ServerState, State, Update, own_of


def last_statistics(rule: Rule) -> Rule:
    """Take the statistics of the last client, by id: what the released code's average amounts to."""

    def apply(previous: State, updates: Sequence[Update]) -> State:
        averaged = rule(previous, updates)
        trained = [update for update in updates if update.n_examples > 0]
        return {**averaged, **_statistics(trained[-1].state)} if trained else averaged

    return apply


def recalibrated(rule: Rule, prototypes: Mapping[str, Prototype], pool: Inputs) -> Rule:
    """Estimate the averaged model's statistics again on the unlabeled pool."""

    def apply(previous: State, updates: Sequence[Update]) -> State:
        averaged = rule(previous, updates)
        if averaged is previous or not any(map(is_statistic, averaged)):
            return averaged
        model = prototypes[updates[0].prototype].load(averaged)
        with threads(1):  # this runs in the server's own process, and bytes must not depend on its cores
            recalibrate(model, pool)
        return copy(model.state_dict())

    return apply


def local_statistics(inner: Fusion) -> Fusion:
    """Let every client go on with its own statistics (SiloBN, Andreux et al. 2020); the server's are the average.

    They are remembered for each client that ever took part, under its id.
    """

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        fused = inner(server, updates, seed)
        before = {name: state for name, state in server.memory.items() if name.startswith(own_of(""))}
        now = {own_of(update.client_id): _statistics(update.state) for update in updates}
        memory = {**fused.server.memory, **before, **{name: state for name, state in now.items() if state}}
        return replace(fused, server=replace(fused.server, memory=memory))

    return fuse


def _statistics(state: State) -> dict[str, Tensor]:
    return {key: state[key].clone() for key in state if is_statistic(key)}  # not a view of a file that will go
