"""The outer loop of Algorithms 1 and 3, as a generator. It knows no algorithm, no file and no screen.

Evaluating, logging, checkpointing and stopping belong to the code that iterates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from typing import Protocol

from feddf.admit import admit
from feddf.config.errors import FeddfError
from feddf.config.sections import ClientsConfig, cohort_size
from feddf.runtime.device import threads
from feddf.seeds import derive, numpy_generator
from feddf.states import n_bytes
from feddf.types import (
    Client,
    Engine,
    Failure,
    Fused,
    Fusion,
    Job,
    LocalTrain,
    Part,
    Refusal,
    Round,
    ServerState,
    State,
    Update,
)


class QuorumError(FeddfError):
    """Too few clients answered, however often the round was tried."""

    exit_code = 3


@dataclass(frozen=True)
class Federation:
    """Who takes part, and by which rules: the share of clients in a round, the quorum, the attempts.

    The same clients are sampled for ``rounds_per_cohort`` rounds, because some methods need several for one model.
    """

    clients: Sequence[Client]
    config: ClientsConfig = ClientsConfig()
    seed: int = 0
    rounds_per_cohort: int = 1


class Spool(Protocol):
    """Keeps the updates of an unfinished round, so that an interrupted round loses no client that has finished."""

    def recall(self, job: Job) -> Update | None:
        """Return the update that answers exactly this job, if it is here."""

    def keep(self, job: Job, update: Update) -> Update | Failure:
        """Keep an admitted update, and return it in the form in which it is to be used."""


def run_rounds(
    server: ServerState,
    federation: Federation,
    *,
    engine: Engine,
    train: LocalTrain,
    fuse: Fusion,
    parts: Sequence[Part] = (),
    spool: Spool | None = None,
) -> Iterator[Round]:
    """Run communication rounds t = server.round + 1, ... without end, and yield each as it is closed.

    Args:
        server: the state to begin from.
        federation: the clients, and how they are sampled.
        engine: runs the clients' jobs in parallel.
        train: (job) -> reply, what a client does.
        fuse: (server, updates, seed) -> the next state.
        parts: what a method adds to what is sent and must come back beside the weights.
        spool: keeps the updates of a round on disk until it is closed.
    """
    while True:  # line 5
        closed = run_round(server, federation, engine=engine, train=train, fuse=fuse, parts=parts, spool=spool)
        yield closed
        server = closed.server


def run_round(
    server: ServerState,
    federation: Federation,
    *,
    engine: Engine,
    train: LocalTrain,
    fuse: Fusion,
    parts: Sequence[Part] = (),
    spool: Spool | None = None,
) -> Round:
    """Run one round. Below the quorum it is abandoned and tried again with other clients.

    Args:
        server: the state to begin from.
        federation: the clients, and how they are sampled.
        engine: runs the clients' jobs in parallel.
        train: (job) -> reply, what a client does.
        fuse: (server, updates, seed) -> the next state.
        parts: what a method adds to what is sent and must come back beside the weights.
        spool: keeps the updates of a round on disk until it is closed.
    """
    number, config = server.round + 1, federation.config
    failures: list[Failure] = []
    seconds = {"train": 0.0, "fuse": 0.0}
    for attempt in range(config.attempts):
        sampled = sample(federation, number, attempt)  # line 6
        needed = max(1, ceil(config.quorum * max(1, len(sampled) - config.over_selection)))
        clock = perf_counter()
        jobs = jobs_for(server, federation, sampled, parts)
        with threads(1):  # all cores are busy: a second thread in the gate would only wait for one
            updates, failed = collect(engine, train, jobs, spool, parts)  # lines 7 and 8
        trained = perf_counter()
        fused, updates, refused = fuse_usable(fuse, server, updates, needed, derive(federation.seed, "fuse", number))
        seconds["train"] += trained - clock
        seconds["fuse"] += perf_counter() - trained
        failures += [*failed, *refused]
        if fused is not None:
            if any(part.keeps for part in parts):
                counted = {**server.counted, **{update.client_id: number for update in updates}}
                fused = replace(fused, server=replace(fused.server, counted=counted))
            sent = [sent_job(job, parts) for job in jobs]
            down = {job.id: n_bytes(job.state) + sum(map(n_bytes, job.payload.values())) for job in sent}
            return Round(fused, updates, failures, attempt + 1, seconds, down)
    reasons = "; ".join(sorted({f"{failure.client_id}: {failure.reason}" for failure in failures})[:5])
    raise QuorumError(f"round {number} had too few usable updates in each of {config.attempts} attempts ({reasons})")


def sample(federation: Federation, round_number: int, attempt: int = 0) -> list[Client]:
    """Return a random C fraction of the clients and the spare ones, by id; each attempt takes the next ones drawn."""
    clients = sorted(federation.clients, key=lambda client: client.id)
    count = max(1, cohort_size(len(clients), federation.config.fraction))
    count = min(len(clients), count + federation.config.over_selection)
    draw = (round_number - 1) // federation.rounds_per_cohort + 1
    order = numpy_generator(derive(federation.seed, "sample", draw)).permutation(len(clients))
    chosen = [int(order[(attempt * count + i) % len(order)]) for i in range(count)]
    return [clients[i] for i in sorted(chosen)]


def collect(
    engine: Engine, train: LocalTrain, jobs: Sequence[Job], spool: Spool | None = None, parts: Sequence[Part] = ()
) -> tuple[list[Update], list[Failure]]:
    """Train the sampled clients (lines 7 and 8); every update passes the gate before it is kept, and when recalled.

    Returns the admitted updates ordered by client id, because a floating-point sum depends on its order, and a failure
    for every client that has none. The same reply twice counts once.
    """
    asked = {job.id: job for job in jobs}
    admitted: dict[str, Update] = {}
    failures: dict[str, Failure] = {}
    if spool is not None:
        recalled = {job.id: spool.recall(job) for job in jobs}
        checked = {name: admit(one, asked, parts) for name, one in recalled.items() if one is not None}
        admitted = {name: update for name, update in checked.items() if isinstance(update, Update)}
    left = sorted((job for job in jobs if job.id not in admitted), key=_size, reverse=True)  # large ones first
    for reply in engine(train, [sent_job(job, parts) for job in left]):
        outcome = _known(reply, asked) if isinstance(reply, Failure) else admit(reply, asked, parts)
        if isinstance(outcome, Update) and spool is not None and outcome.client_id not in admitted:
            outcome = spool.keep(asked[outcome.client_id], outcome)
        if isinstance(outcome, Failure):
            failures.setdefault(outcome.client_id, outcome)
        else:
            admitted.setdefault(outcome.client_id, outcome)
    silent = {name: Failure(name, "no answer") for name in asked.keys() - admitted.keys() - failures.keys()}
    failed = {name: failure for name, failure in {**failures, **silent}.items() if name not in admitted}
    return [admitted[name] for name in sorted(admitted)], [failed[name] for name in sorted(failed)]


def _size(job: Job) -> int:
    return 0 if job.client.indices is None else len(job.client.indices)


def _known(failure: Failure, asked: Mapping[str, Job]) -> Failure:
    known = isinstance(failure.client_id, str) and failure.client_id in asked
    return failure if known else Failure("unknown", f"a client that was not asked: {failure.reason}"[:300])


def jobs_for(
    server: ServerState, federation: Federation, clients: Sequence[Client], parts: Sequence[Part] = ()
) -> list[Job]:
    """Return what each client is asked to do in the round after ``server``, with the weights that the gate expects."""
    number = server.round + 1

    def job_of(client: Client) -> Job:
        seed = derive(federation.seed, "train", number, client.id)
        payload = {name: state for part in parts for name, state in part.send(server, client).items()}
        return Job(client, number, server.sent_to(client), seed, payload, server.counted.get(client.id, 0))

    return [job_of(client) for client in clients]


def sent_job(job: Job, parts: Sequence[Part]) -> Job:
    """Return a job as it is sent: without weights, where a part of the method says that they do not travel."""
    return job if all(part.weights_down for part in parts) else replace(job, state={})


def fuse_usable(
    fuse: Fusion, server: ServerState, updates: list[Update], needed: int, seed: int
) -> tuple[Fused | None, list[Update], list[Failure]]:
    """Fuse, again without the updates that the fusion refuses; ``None`` where too few are left."""
    refused: list[Failure] = []
    while len(updates) >= needed:
        try:
            fused = fuse(server, updates, seed)
            return replace(fused, server=_lasting(fused.server, server.round + 1)), updates, refused
        except Refusal as refusal:
            refused += refusal.failures
            names = {failure.client_id for failure in refusal.failures}
            if not names & {update.client_id for update in updates}:
                raise QuorumError(f"round {server.round + 1} cannot be fused: {refusal}") from refusal
            updates = [update for update in updates if update.client_id not in names]
    return None, updates, refused


def _lasting(server: ServerState, number: int) -> ServerState:
    """Return the state after a round; what a fusion took over from an update must outlast the round's spool."""
    memory = {whose: _in_memory(states) for whose, states in server.memory.items()}
    return replace(server, round=number, models=_in_memory(server.models), own=_in_memory(server.own), memory=memory)


def _in_memory(states: Mapping[str, State]) -> dict[str, State]:
    return {name: state if isinstance(state, dict) else dict(state) for name, state in states.items()}
