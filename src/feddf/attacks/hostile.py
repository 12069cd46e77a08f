"""Who is hostile, what such a client trains on, and when its update is replaced by a forged one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from feddf.config.sections import AttackConfig
from feddf.runtime.device import threads
from feddf.seeds import derive, numpy_generator
from feddf.types import Client, Engine, Examples, Failure, Inputs, Job, LocalTrain, Prototype, Reply, State


@dataclass(frozen=True)
class Scene:
    """What attackers know besides this round's updates: the architectures, their own examples, the server's pool."""

    prototypes: Mapping[str, Prototype]
    train: Examples
    pool: Inputs | None


@dataclass(frozen=True)
class Forgery:
    """What goes into one forged update: the attacker's own, its job, and what the honest clients of the round sent."""

    own: Reply
    job: Job
    honest: Sequence[Reply]
    hostile: int
    """How many attackers take part in the round."""

    @property
    def alike(self) -> Sequence[Reply]:
        """The honest updates of the same architecture; its own where there are none."""
        return [update for update in self.honest if update.prototype == self.own.prototype] or [self.own]


Forge = Callable[[Forgery], State]


@dataclass(frozen=True)
class Attack:
    """``poison`` changes the examples that attackers train on, ``forge`` what they send; either may be left out."""

    poison: Callable[[Examples], Examples] | None = None
    forge: Forge | None = None


def attackers(clients: Sequence[Client], config: AttackConfig, seed: int) -> frozenset[str]:
    """Return the hostile clients: a share of all, chosen by the seed."""
    names = sorted(client.id for client in clients)
    order = numpy_generator(derive(seed, "attackers")).permutation(len(names))
    return frozenset(names[int(i)] for i in order[: round(config.share * len(names))])


def active(config: AttackConfig, number: int) -> bool:
    """Say whether a round is attacked."""
    return config.kind != "none" and config.since <= number <= (config.until or number)


@dataclass(frozen=True)
class PoisonedTraining:
    """Local training in which attackers use examples of their own making."""

    honestly: LocalTrain
    hostilely: LocalTrain
    members: frozenset[str]
    config: AttackConfig

    def __call__(self, job: Job) -> Reply:
        """Train the client."""
        poisoned = job.id in self.members and active(self.config, job.round)
        return (self.hostilely if poisoned else self.honestly)(job)


def forging(engine: Engine, forge: Forge, members: frozenset[str], config: AttackConfig) -> Engine:
    """Return the engine of the clients with the attackers' updates replaced, once all honest ones are known.

    This is the strongest attacker: it knows what everybody else sends, and speaks last.
    """

    def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any | Failure]:
        asked = {job.id: job for job in jobs}
        outcomes = list(engine(function, jobs))
        updates = sorted((one for one in outcomes if isinstance(one, Reply)), key=lambda one: one.client_id)
        honest = [update for update in updates if update.client_id not in members]
        hostile = len(updates) - len(honest)
        for outcome in outcomes:
            if isinstance(outcome, Reply) and outcome.client_id in members and active(config, outcome.round):
                with threads(1):
                    state = forge(Forgery(outcome, asked[outcome.client_id], honest, hostile))
                outcome = replace(outcome, state=state)
            yield outcome

    return run
