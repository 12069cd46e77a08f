"""The outer loop of Algorithms 1 and 3, as a generator. It knows no algorithm, no file and no screen.

Evaluating, logging, checkpointing and stopping belong to whoever iterates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter

from feddf.admit import admit
from feddf.seeds import derive, numpy_generator
from feddf.types import (
    Client,
    Engine,
    Failure,
    Fused,
    Fusion,
    Job,
    LocalTrain,
    Refusal,
    Round,
    ServerState,
    Update,
)


class QuorumError(Exception):
    """Too few clients answered, however often the round was tried."""


@dataclass(frozen=True)
class Federation:
    """Who takes part, and how a round is played: C, the quorum as a share of the sampled clients, the tries."""

    clients: Sequence[Client]
    fraction: float
    seed: int
    quorum: float = 0.5
    attempts: int = 3
    hold: int = 1
    """Rounds for which the sampled clients stay the same: FedMA needs several for one model."""


def rounds(
    server: ServerState, federation: Federation, *, engine: Engine, train: LocalTrain, fuse: Fusion
) -> Iterator[Round]:
    """Play communication rounds t = server.round + 1, ... for ever, and yield each as it ends."""
    while True:  # line 5
        closed = play(server, federation, engine=engine, train=train, fuse=fuse)
        yield closed
        server = closed.server


def play(server: ServerState, federation: Federation, *, engine: Engine, train: LocalTrain, fuse: Fusion) -> Round:
    """Play one round. Below the quorum it is abandoned and tried again with other clients."""
    failures: list[Failure] = []
    seconds = {"train": 0.0, "fuse": 0.0}
    for attempt in range(federation.attempts):
        chosen = sample(federation, server.round + 1, attempt)  # line 6
        needed = max(1, ceil(federation.quorum * len(chosen)))
        clock = perf_counter()
        updates, failed = collect(engine, train, jobs_for(server, federation, chosen))
        trained = perf_counter()
        fused, updates, refused = fuse_usable(
            fuse, server, updates, needed, derive(federation.seed, "fuse", server.round + 1)
        )
        seconds["train"] += trained - clock
        seconds["fuse"] += perf_counter() - trained
        failures += [*failed, *refused]
        if fused is not None:
            return Round(fused, updates, failures, attempt + 1, seconds)
    reasons = "; ".join(sorted({f"{failure.client_id}: {failure.reason}" for failure in failures})[:5])
    raise QuorumError(
        f"round {server.round + 1} had too few usable updates in each of {federation.attempts} attempts ({reasons})"
    )


def sample(federation: Federation, round_number: int, attempt: int = 0) -> list[Client]:
    """Return a random C fraction of the clients, ordered by id; each attempt takes the next ones in line."""
    clients = sorted(federation.clients, key=lambda client: client.id)
    count = max(1, sample_size(len(clients), federation.fraction))
    draw = (round_number - 1) // federation.hold + 1
    order = numpy_generator(derive(federation.seed, "sample", draw)).permutation(len(clients))
    chosen = [int(order[(attempt * count + i) % len(order)]) for i in range(count)]
    return [clients[i] for i in sorted(chosen)]


def sample_size(clients: int, fraction: float) -> int:
    """Return the number of clients sampled a round: C·K, rounded; 0 means that C is too small."""
    return round(fraction * clients)


def collect(engine: Engine, train: LocalTrain, jobs: Sequence[Job]) -> tuple[list[Update], list[Failure]]:
    """Train the sampled clients (lines 7 and 8) and let their updates through the gate.

    Returns the admitted updates ordered by client id, because a floating-point sum depends on its order,
    and a failure for every client that has none. The same reply twice counts once.
    """
    asked = {job.id: job for job in jobs}
    admitted: dict[str, Update] = {}
    failures: dict[str, Failure] = {}
    outcomes: Iterable[Update | Failure] = engine(train, jobs)
    for outcome in outcomes:
        failure = _known(outcome, asked) if isinstance(outcome, Failure) else admit(outcome, asked)
        if failure is not None:
            failures.setdefault(failure.client_id, failure)
        elif isinstance(outcome, Update):
            admitted.setdefault(outcome.client_id, outcome)
    silent = {name: Failure(name, "no answer") for name in asked.keys() - admitted.keys() - failures.keys()}
    failed = {name: failure for name, failure in {**failures, **silent}.items() if name not in admitted}
    return [admitted[name] for name in sorted(admitted)], [failed[name] for name in sorted(failed)]


def _known(failure: Failure, asked: Mapping[str, Job]) -> Failure:
    known = isinstance(failure.client_id, str) and failure.client_id in asked
    return failure if known else Failure("unknown", f"somebody who was not asked: {failure.reason}"[:300])


def jobs_for(server: ServerState, federation: Federation, clients: Sequence[Client]) -> list[Job]:
    """Return what each client is asked to do in the round after ``server``."""
    number = server.round + 1
    return [
        Job(client, number, server.sent_to(client), derive(federation.seed, "train", number, client.id))
        for client in clients
    ]


def fuse_usable(
    fuse: Fusion, server: ServerState, updates: list[Update], needed: int, seed: int
) -> tuple[Fused | None, list[Update], list[Failure]]:
    """Fuse, again without the updates that the fusion refuses; ``None`` where too few are left."""
    refused: list[Failure] = []
    while len(updates) >= needed:
        try:
            fused = fuse(server, updates, seed)
            return replace(fused, server=replace(fused.server, round=server.round + 1)), updates, refused
        except Refusal as refusal:
            refused += refusal.failures
            names = {failure.client_id for failure in refusal.failures}
            if not names & {update.client_id for update in updates}:
                raise  # it would be refused for ever
            updates = [update for update in updates if update.client_id not in names]
    return None, updates, refused
