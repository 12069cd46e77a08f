"""Run an experiment: iterate over rounds, record each one, keep its checkpoint; at the end describe its models."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf import evaluate
from feddf.config import Record, Settings
from feddf.config.keys import flat
from feddf.data.partition import class_counts
from feddf.data.unlabeled import all_rows
from feddf.engines import in_process
from feddf.engines.open import Profile, Watch, open_engines, report_progress, unwatched
from feddf.fusion.ensemble import avg_logits
from feddf.rounds import run_round, run_rounds
from feddf.runs.build import Parts
from feddf.runs.loading import with_tokenizer
from feddf.runs.loggers import open_loggers
from feddf.runs.record import Recorder
from feddf.runs.spool import ClientStates, DiskSpool
from feddf.runs.store import RunFolder
from feddf.runtime.atomic import write_atomically
from feddf.saved.model import ModelSpec, of_inputs
from feddf.saved.model_folder import CARD, CONFIG
from feddf.types import Engine, Inputs, Round, ServerState, WeightedLogits


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


# Figure 1 (and its detail in appendix C.1)


def draw_regions(parts: Parts, path: Path, extent: float = 3.0, resolution: int = 160) -> list[tuple[str, float]]:
    """Draw the decision regions of the toy's local, averaged, fused and ensemble models; return their accuracies."""
    from feddf.report.plots import decision_regions  # matplotlib takes a second to load

    train, test, pool = parts.task.train, parts.task.data.test, parts.task.pool
    line = torch.linspace(-extent, extent, resolution)
    plane = Inputs(torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).reshape(-1, 2), test.inputs.encode)

    def predict(models: Sequence[nn.Module], inputs: Inputs) -> Tensor:
        return avg_logits(WeightedLogits(evaluate.logits(model, inputs)) for model in models)

    panels = []
    for title, models in _first_models(parts).items():
        image = predict(models, plane).reshape(resolution, resolution, 3).numpy()
        panels.append((title, evaluate.accuracy_of(predict(models, test.inputs), test.labels), image))
    shards = {client.id: indices for client, indices in zip(parts.federation.clients, parts.task.shards, strict=True)}
    shards["all data"] = torch.arange(len(train))
    points = [(title, train.inputs.raw[one].numpy(), train.labels[one].numpy()) for title, one in shards.items()]
    decision_regions(panels, points, all_rows(pool.raw).numpy() if pool else None, path, extent)
    return [(title, accuracy) for title, accuracy, _ in panels]


def _first_models(parts: Parts) -> dict[str, list[nn.Module]]:
    """Run the first round again (same seed, same bytes), and return its models, those of an ensemble together."""
    parts.engine.become(in_process)
    method, name = parts.method, parts.experiment.prototypes[0].label
    run = partial(run_round, engine=in_process, train=parts.train, fuse=method.fuse, parts=method.parts)
    closed, load = run(parts.server, parts.federation), parts.prototypes[name].load
    trained = {update.client_id: parts.prototypes[update.prototype].load(update.state) for update in closed.updates}
    return {
        **{client: [model] for client, model in trained.items()},
        "averaged (FedAvg)": [load(closed.fused.start[name])],
        f"fused ({parts.experiment.fusion.method})": [load(closed.server.models[name])],
        "ensemble": list(trained.values()),
    }
