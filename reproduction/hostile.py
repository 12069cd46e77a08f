"""Who is hostile, what such clients train on, and when what they send is forged: the way from an attack to a run.

An attack is a function from an experiment's parts to an :class:`~feddf.runs.build.Attack`, named in ``attack.kind``;
:mod:`reproduction.attacks` has twenty, each a call of :func:`hostile` with what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from feddf.config import ConfigError, Record
from feddf.config.sections import AttackConfig
from feddf.fusion.answers import ANSWERS
from feddf.runs.build import Attack, Parts
from feddf.runtime.device import threads
from feddf.seeds import derive, numpy_generator
from feddf.types import Client, Engine, Examples, Failure, Job, LocalTrain, Reply, ServerState, State

FD = "fd"
"""The name of the part whose clients send one mean answer for each label."""


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


Forge = Callable[[Forgery], State | Reply | Failure]
"""Makes what an attacker sends: weights in place of its own, a whole reply where it lies about more, or nothing."""


def hostile(
    parts: Parts,
    forge: Forge,
    *,
    poison: Callable[[Examples], Examples] | None = None,
    measure: Callable[[ServerState], Mapping[str, Any]] | None = None,
    answers: bool = False,
) -> Attack:
    """Return the attack of a share of the clients, chosen by the seed.

    ``forge`` makes what they send, ``poison`` the examples that they train on, and ``measure`` says after each round
    how well the attack works. With ``answers``, ``forge`` can also make these, where clients send no weights.
    """
    config, train = parts.experiment.attack, parts.task.train
    if config.target >= train.n_classes:
        raise ConfigError.at("attack.target", config.target, f"there are {train.n_classes} classes")
    travel = all(part.weights_down and part.weights_up for part in parts.method.parts)
    if not travel and not (answers and any(part.name in (ANSWERS, FD) for part in parts.method.parts)):
        raise ConfigError.at("attack.kind", config.kind, "attackers forge weights, and this method's do not travel")
    members = attackers(parts.federation.clients, config, parts.experiment.seed)
    local: Any = parts.train  # a partial of local_update
    if poison is not None:
        local = PoisonedTraining(local, partial(local, train=poison(train)), members, config)

    def note(record: Record, server: ServerState) -> dict[str, Any]:
        present = [name for name in record["clients"] if name in members]
        return {"hostile": present, **(measure(server) if measure else {})}

    return Attack(local, partial(forge_updates, forge=forge, members=members, config=config), note)


def attackers(clients: Sequence[Client], config: AttackConfig, seed: int) -> frozenset[str]:
    """Return the hostile clients: a share of all, chosen by the seed."""
    names = sorted(client.id for client in clients)
    order = numpy_generator(derive(seed, "attackers")).permutation(len(names))
    return frozenset(names[int(i)] for i in order[: round(config.share * len(names))])


def is_attacked(config: AttackConfig, number: int) -> bool:
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
        poisoned = job.id in self.members and is_attacked(self.config, job.round)
        return (self.hostilely if poisoned else self.honestly)(job)


def forge_updates(engine: Engine, *, forge: Forge, members: frozenset[str], config: AttackConfig) -> Engine:
    """Return the engine of the clients with the attackers' updates replaced, once all honest ones are known.

    This is the strongest attacker: it knows what all others send, and sends last.
    """

    def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any | Failure]:
        asked = {job.id: job for job in jobs}
        outcomes = list(engine(function, jobs))
        updates = sorted((one for one in outcomes if isinstance(one, Reply)), key=lambda one: one.client_id)
        honest = [update for update in updates if update.client_id not in members]
        count = len(updates) - len(honest)
        for outcome in outcomes:
            if isinstance(outcome, Reply) and outcome.client_id in members and is_attacked(config, outcome.round):
                with threads(1):
                    forged = forge(Forgery(outcome, asked[outcome.client_id], honest, count))
                outcome = forged if isinstance(forged, Reply | Failure) else replace(outcome, state=forged)
            yield outcome

    return run
