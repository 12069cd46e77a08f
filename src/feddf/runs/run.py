"""Play an experiment: iterate over rounds, judge each one, log it, and keep its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from feddf.rounds import rounds
from feddf.runs.build import Parts, open_engine
from feddf.runs.judge import Court, court, judge
from feddf.runs.profile import Profile
from feddf.runs.spool import forget, remembering
from feddf.runs.store import Record, RunFolder
from feddf.types import Client, Engine, Failure, J, R, Round, ServerState

Watch = Callable[[str, int, int], None]
"""(stage, done, total): called as the work within a round goes on."""


def unwatched(stage: str, done: int, total: int) -> None:
    """Watch nothing."""


def play(parts: Parts, folder: RunFolder, watch: Watch = unwatched, profile: Profile | None = None) -> Iterator[Record]:
    """Play the rounds that the folder does not hold yet; yield each round's record once it is safe on disk.

    The log line is written before the checkpoint. A crash between the two leaves a line without a
    checkpoint, which the next start removes: no round is lost, and none counted twice.
    """
    experiment = parts.experiment
    with folder.locked(), open_engine(experiment) as engines:
        saved, _ = folder.latest()
        server = saved or parts.server
        folder.forget_after(server.round)
        spool = folder.path / "spool"

        def timed(stage: str, engine: Engine) -> Engine:
            return profile.engine(engine, stage) if profile else engine

        train = watched(remembering(timed("train", engines.clients), spool), watch, "train")
        fuse = parts.fuse(watched(timed("fuse", engines.server), watch, "fuse"))
        evaluation = watched(timed("evaluate", engines.server), watch, "evaluate")
        task = parts.task
        jury = court(
            evaluation, parts.prototypes, task.data.test, task.validation,
            log_clients=experiment.log_clients, log_ensemble=experiment.log_ensemble,
        )  # fmt: skip
        games = rounds(server, parts.federation, engine=train, train=parts.train, fuse=fuse)
        planned = islice(games, experiment.rounds - server.round)
        yield from recorded(planned, server, folder, jury, parts.federation.clients, experiment.keep_checkpoints)


def recorded(
    games: Iterable[Round],
    server: ServerState,
    folder: RunFolder,
    jury: Court,
    clients: Sequence[Client],
    keep: int,
    add: Callable[[Record], Record] = lambda record: record,
) -> Iterator[Record]:
    """Judge each round, write it down and yield its record; at the end write the models.

    ``server`` is the state before the first round. ``clients`` may grow while rounds are played; ``add`` may add to a
    record before it is written.
    """
    spool = folder.path / "spool"
    for closed in games:
        record = add(judge(server, closed, clients, jury))
        folder.append(record)
        folder.save(closed.server, keep)
        forget(spool)
        server = closed.server
        yield record
    forget(spool)
    folder.finish(server.models)


def watched(engine: Engine, watch: Watch, stage: str) -> Engine:
    """Return the engine, telling ``watch`` of every job that it finishes."""

    def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        watch(stage, 0, len(jobs))
        for done, outcome in enumerate(engine(function, jobs), 1):
            watch(stage, done, len(jobs))
            yield outcome

    return run
