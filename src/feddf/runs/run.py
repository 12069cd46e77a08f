"""Run an experiment: iterate over rounds, record each one, keep its checkpoint; at the end describe its models."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from feddf.config import Record, Settings
from feddf.config.keys import flat
from feddf.data.partition import class_counts
from feddf.engines.open import Profile, Watch, open_engines, report_progress, unwatched
from feddf.rounds import run_rounds
from feddf.runs.build import Parts
from feddf.runs.loading import with_tokenizer
from feddf.runs.loggers import open_loggers
from feddf.runs.record import Recorder
from feddf.runs.spool import ClientStates, DiskSpool
from feddf.runs.store import RunFolder
from feddf.runtime.atomic import write_atomically
from feddf.saved.model import ModelSpec, of_inputs
from feddf.saved.model_folder import CARD, CONFIG
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
    experiment, task, method, federation = parts.experiment, parts.task, parts.method, parts.federation

    def staged(engine: Engine, stage: str) -> Engine:
        return report_progress(profile.engine(engine, stage) if profile else engine, watch, stage)

    with folder.locked(), open_engines(experiment.run, experiment.clients.timeout) as engines:
        server = folder.latest()[0] or parts.server
        folder.forget_after(server.round)
        counts = class_counts(task.train.labels, task.shards, task.train.n_classes).tolist()
        held = {"classes": list(task.data.classes), "counts": counts}
        write_atomically(folder.path / "partition.json", json.dumps(held).encode())
        on_test = staged(engines.server, "evaluate")
        recorder = Recorder(on_test, parts.prototypes, task.data.test, task.validation, experiment.run)
        parts.engine.become(staged(engines.server, "fuse"))
        engine = staged(engines.clients, "train")
        if parts.attack:
            engine = parts.attack.engine(engine)
        kept = ClientStates(folder.path / "clients", experiment.clients.lost_state)
        keeps = any(part.keeps for part in method.parts)
        kept.forget_others([client.id for client in federation.clients] if keeps else [])
        engine = kept.engine(engine) if keeps else engine
        # attackers look at all updates of a round: one that was interrupted begins anew
        spool = None if parts.attack else DiskSpool(folder.spool)
        rounds = run_rounds(
            server, federation, engine=engine, train=parts.train, fuse=method.fuse, parts=method.parts, spool=spool
        )

        def extend(record: Record, server: ServerState) -> Record:
            record = {**record, "kept_by_clients": kept.size()} if keeps else record
            return {**record, "attack": dict(parts.attack.note(record, server))} if parts.attack else record

        yield from record_rounds(rounds, server, folder, experiment, recorder, extend, complain)
        describe(parts, folder.path, folder.records())


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


# What makes the models in a run's folder usable without the experiment

_CARD = """---
library_name: feddf
tags:
- feddf
- federated-learning
---
# {name}

{description}Models of `{method}` after {rounds} rounds with {clients} clients on `{data}` ({n_classes} classes); \
the whole configuration is in `config.toml`.

| prototype | architecture | test accuracy % |
|---|---|---:|
{rows}

```python
import feddf
model = feddf.load_model("FOLDER"{chosen})
```
"""


def describe(parts: Parts, folder: Path, records: Sequence[Record]) -> None:
    """Write how the models in ``models/`` are built and fed, and the card."""
    specs = _specs(parts)
    values = {"feddf": {"prototypes": {name: spec.describe() for name, spec in specs.items()}}}
    write_atomically(folder / CONFIG, json.dumps(values, indent=2, ensure_ascii=False).encode())
    experiment, last = parts.experiment, records[-1] if records else None
    fused = {name: model["fused"] for name, model in last["models"].items()} if last else {}
    scores = {name: f"{100 * score:.1f}" for name, score in fused.items() if score is not None}
    card = _CARD.format(
        name=experiment.name,
        description=f"{experiment.description}\n\n" if experiment.description else "",
        method=experiment.fusion.method,
        rounds=last["round"] if last else 0,
        clients=experiment.clients.total,
        data=experiment.data.name,
        n_classes=parts.task.data.train.n_classes,
        rows="\n".join(f"| {name} | `{spec.model}` | {scores.get(name, '')} |" for name, spec in specs.items()),
        chosen=f', prototype="{next(iter(specs))}"' if len(specs) > 1 else "",
    )
    write_atomically(folder / CARD, card.encode())


def _specs(parts: Parts) -> dict[str, ModelSpec]:
    """Return the description of every prototype; classes without names are numbers."""
    data = parts.task.data
    numbers = tuple(str(number) for number in range(data.train.n_classes))
    classes = data.classes if len(data.classes) == len(numbers) else numbers
    preprocess = of_inputs(data.train.inputs, with_tokenizer(parts.experiment).tokenizer)
    form = data.shape, classes, preprocess
    return {
        spec.label: ModelSpec(spec.model, *form, spec.options, parts.prototypes[spec.label].fit is not None)
        for spec in parts.experiment.prototypes
    }
