"""Run an experiment: iterate over rounds, record each one, and keep its checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from feddf.config import Record, Settings
from feddf.config.keys import flat
from feddf.data.partition import class_counts
from feddf.engines.open import Profile, Watch, open_engines, report_progress, unwatched
from feddf.rounds import run_rounds
from feddf.runs.build import Parts
from feddf.runs.client_states import ClientStates
from feddf.runs.describe import describe
from feddf.runs.loggers import open_loggers
from feddf.runs.record import Recorder
from feddf.runs.spool import DiskSpool
from feddf.runs.store import RunFolder
from feddf.types import Engine, Round, ServerState


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

    Args:
        parts: the built experiment (:func:`feddf.build`).
        folder: where records, checkpoints and models are written; what it holds already is not repeated.
        watch: called with (stage, done, total) as the work within a round progresses.
        profile: collects the time of each job, if it is given.
        complain: called with each warning.
    """
    experiment, task = parts.experiment, parts.task
    with folder.locked(), open_engines(experiment.run, experiment.clients.timeout) as engines:
        saved, _ = folder.latest()
        server = saved or parts.server
        folder.forget_after(server.round)
        counts = class_counts(task.train.labels, task.shards, task.train.n_classes)
        folder.describe_partition(counts.tolist(), task.data.classes)

        def staged(engine: Engine, stage: str) -> Engine:
            return report_progress(profile.engine(engine, stage) if profile else engine, watch, stage)

        recorder = Recorder(
            staged(engines.server, "evaluate"), parts.prototypes, task.data.test, task.validation, experiment.run
        )
        parts.engine.become(staged(engines.server, "fuse"))
        kept = ClientStates(folder.path / "clients", experiment.clients.lost_state)
        keeps = any(part.keeps for part in parts.method.parts)
        kept.forget_others([client.id for client in parts.federation.clients] if keeps else [])
        clients = staged(engines.clients, "train")
        if parts.attack:
            clients = parts.attack.engine(clients)
        rounds = run_rounds(
            server,
            parts.federation,
            engine=kept.engine(clients) if keeps else clients,
            train=parts.train,
            fuse=parts.method.fuse,
            parts=parts.method.parts,
            # attackers look at all updates of a round: one that was interrupted begins anew
            spool=None if parts.attack else DiskSpool(folder.spool),
        )
        extend = partial(_extended, parts, kept if keeps else None)
        yield from record_rounds(rounds, server, folder, experiment, recorder, extend, complain)
        describe(parts, folder.path, folder.records())


def _extended(parts: Parts, kept: ClientStates | None, record: Record, server: ServerState) -> Record:
    """Return the record with what clients keep, and with who attacked."""
    if kept is not None:
        record = {**record, "kept_by_clients": kept.size()}
    return {**record, "attack": dict(parts.attack.note(record, server))} if parts.attack else record


def record_rounds(
    rounds: Iterable[Round],
    server: ServerState,
    folder: RunFolder,
    settings: Settings,
    recorder: Recorder,
    extend: Callable[[Record, ServerState], Record],
    complain: Callable[[str], None],
) -> Iterator[Record]:
    """Record each round that is left, write it down, track it and yield its record; at the end write the models.

    ``server`` is the state before the first of them. ``extend`` may add to a record before it is written.
    """
    spool, run = DiskSpool(folder.spool), settings.run
    config = flat(settings.model_dump(mode="json", exclude_none=True))
    with open_loggers(run.loggers, folder.path, config, server.round, complain) as track:
        for closed in islice(rounds, max(0, settings.rounds - server.round)):
            record = extend(recorder.record(closed), closed.server)
            folder.append(record)
            folder.save(closed.server, run.keep_checkpoints)
            spool.clear()
            server = closed.server
            track(record)
            yield record
        spool.clear()
        folder.finish(server.models)
