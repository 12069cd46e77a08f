"""Run an experiment: iterate over rounds, record each one, and keep its checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from feddf.config import Record
from feddf.config.keys import flat
from feddf.data.partition import class_counts
from feddf.engines.open import open_engines
from feddf.engines.wrappers import Profile, Watch, unwatched, watched
from feddf.rounds import run_rounds
from feddf.runs.build import Parts
from feddf.runs.describe import describe
from feddf.runs.record import Recorder
from feddf.runs.spool import DiskSpool
from feddf.runs.store import RunFolder
from feddf.runs.trackers import tracking
from feddf.types import Client, Engine, Round, ServerState


def run_experiment(
    parts: Parts,
    folder: RunFolder,
    watch: Watch = unwatched,
    profile: Profile | None = None,
    complain: Callable[[str], None] = warnings.warn,
) -> Iterator[Record]:
    """Run the rounds that the folder does not hold yet; yield each round's record once it is safe on disk.

    The log line is written before the checkpoint. A crash between the two leaves a line without a
    checkpoint, which the next start removes: no round is lost, and none counted twice.
    """
    experiment, task = parts.experiment, parts.task
    with folder.locked(), open_engines(experiment.run, experiment.clients.deadline) as engines:
        saved, _ = folder.latest()
        server = saved or parts.server
        folder.forget_after(server.round)
        counts = class_counts(task.train.labels, task.shards, task.train.n_classes)
        folder.describe_partition(counts.tolist(), task.data.classes)

        def staged(engine: Engine, stage: str) -> Engine:
            return watched(profile.engine(engine, stage) if profile else engine, watch, stage)

        recorder = Recorder(
            staged(engines.server, "evaluate"), parts.prototypes, task.data.test, task.validation, experiment.run
        )
        rounds = run_rounds(
            server,
            parts.federation,
            engine=staged(engines.clients, "train"),
            train=parts.train,
            fuse=parts.method(staged(engines.server, "fuse")).fuse,
            spool=DiskSpool(folder.spool),
        )
        planned = islice(rounds, experiment.rounds - server.round)
        config = flat(experiment.model_dump(mode="json", exclude_none=True))
        with tracking(experiment.run.track, folder.path, config, server.round, complain) as track:
            for record in recorded(
                planned, server, folder, recorder, parts.federation.clients, experiment.run.keep_checkpoints
            ):
                track(record)
                yield record
        describe(parts, folder.path, folder.records())


def recorded(
    rounds: Iterable[Round],
    server: ServerState,
    folder: RunFolder,
    recorder: Recorder,
    clients: Sequence[Client],
    keep: int,
    extend: Callable[[Record], Record] = lambda record: record,
) -> Iterator[Record]:
    """Record each round, write it down and yield its record; at the end write the models.

    ``server`` is the state before the first round. ``clients`` may grow between rounds; ``extend`` may add to a record
    before it is written.
    """
    spool = DiskSpool(folder.spool)
    for closed in rounds:
        record = extend(recorder.record(server, closed, clients))
        folder.append(record)
        folder.save(closed.server, keep)
        spool.clear()
        server = closed.server
        yield record
    spool.clear()
    folder.finish(server.models)
