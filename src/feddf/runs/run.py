"""Run an experiment: try each round's models, record it, keep its checkpoint; at the end describe the models."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from statistics import median_low
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from feddf.config import Record, RunConfig, Settings
from feddf.config.keys import flat
from feddf.config.records import ModelRecord
from feddf.engines.open import Profile, Watch, open_engines, report_progress, unwatched
from feddf.evaluate import Evaluation, Predictions, Teacher, accuracy_of, models_of, teacher_of
from feddf.fusion.ensemble import Ensemble
from feddf.fusion.knowledge import told
from feddf.models.binary import wire
from feddf.report.read import TESTED, read_run, side_by_side
from feddf.robust.rules import MOST_EXAMPLES_OF_MEDIAN
from feddf.rounds import Spool, run_rounds
from feddf.runs.build import Parts
from feddf.runs.card import CURVES, card
from feddf.runs.loading import with_tokenizer
from feddf.runs.loggers import open_loggers
from feddf.runs.spool import LOST, ClientStates, DiskSpool
from feddf.runs.store import RunFolder
from feddf.runtime.atomic import write_atomically
from feddf.runtime.execution import of_answers
from feddf.saved.model import ModelSpec, of_inputs
from feddf.saved.model_folder import CARD, CONFIG
from feddf.states import drift, n_bytes
from feddf.types import Engine, Examples, Failure, Prototype, Round, ServerState, State


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
        server = folder.latest(parts.server.models)[0] or parts.server
        folder.forget_after(server.round)
        if not parts.privacy:  # with privacy, who holds what is not told
            held = {"classes": task.data.group_names, "counts": task.counts().tolist()}
            write_atomically(folder.path / "partition.json", json.dumps(held).encode())
        tried = staged(engines.server, "evaluate")
        hidden = {"log_ensemble": False} if experiment.privacy.level == "client" else {}  # it shows single clients
        run = experiment.run.model_copy(update=hidden)
        recorder = Recorder(tried, parts.prototypes, task.data.test, task.validation, run)
        parts.engine.become(staged(engines.server, "fuse"))
        engine = staged(engines.clients, "train")
        if parts.attack:
            engine = parts.attack.engine(engine)
        kept = ClientStates(folder.path / "clients", experiment.clients.lost_state)
        keeps = any(part.keeps for part in method.parts)
        kept.forget_others([client.id for client in federation.clients] if keeps else [])
        engine = kept.engine(engine) if keeps else engine
        # attackers look at all updates of a round: one that was interrupted begins anew
        disk = DiskSpool(folder.spool)
        spool: Spool | None = None if parts.attack else disk
        if parts.privacy and spool:
            engine, spool = parts.privacy.open(folder.path, folder.records(), engine, spool)
        rounds = run_rounds(
            server, federation, engine=engine, train=parts.train, fuse=method.fuse, parts=method.parts, spool=spool
        )

        def extend(record: Record, server: ServerState) -> Record:
            record = {**record, "kept_by_clients": kept.size()} if keeps else record
            record = parts.privacy.noted(record) if parts.privacy else record
            return {**record, "attack": dict(parts.attack.note(record, server))} if parts.attack else record

        yield from record_rounds(rounds, server, folder, disk, experiment, recorder, extend, complain)
        describe(parts, folder, recorder)


def record_rounds(
    rounds: Iterable[Round],
    server: ServerState,
    folder: RunFolder,
    spool: DiskSpool,
    settings: Settings,
    recorder: Recorder,
    extend: Callable[[Record, ServerState], Record],
    complain: Callable[[str], None],
) -> Iterator[Record]:
    """Record each round that is left, write it down, track it and yield its record; at the end write the models.

    ``server`` is the state before the first of them, ``spool`` holds a round's updates, ``extend`` may add to a record.
    """
    run = settings.run
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


MOST_CLASSES = 100
"""Classes up to which it is written down which of them are taken for which."""
NO_ENSEMBLE: dict[str, float | None] = {"ensemble": None, "avg_logits": None}


class Recorder:
    """Makes the record of each round, by trying models on the test and validation data. Made once for all rounds."""

    def __init__(
        self,
        engine: Engine,
        prototypes: Mapping[str, Prototype],
        test: Examples,
        validation: Examples,
        run: RunConfig,
    ) -> None:
        self._prototypes, self._test, self._validation, self._run = prototypes, test, validation, run
        execution = of_answers(run)
        self._on_test = Evaluation(engine, test.inputs, execution)
        self._on_validation = Evaluation(engine, validation.inputs, execution)
        self._tries_clients = run.log_clients or (run.log_ensemble and len(test) > 0)

    def record(self, closed: Round) -> Record:
        """Return the record of a round.

        Test accuracies before (line 11) and after fusion (line 15), of the ensemble that taught, of plain AvgLogits of
        the clients and of each client, as the run logs them, or why the ensemble was not measured; the fused models'
        validation accuracy, by which hyper-parameters are tuned; bytes down and up.
        """
        began, updates, metric = perf_counter(), closed.updates, self._test.outputs.metric
        measures: dict[str, dict[str, float]] = {}
        teachers, models, ensembles = self._tested(closed, measures)
        if len(self._validation):
            for one in self._on_validation(models_of(closed.server.models, self._prototypes)):
                models[one.client_id]["validation"] = _score(_known(one, "validation").logits, self._validation)
        notes = dict(closed.fused.notes)
        seconds = {**closed.seconds, **notes.pop("seconds", {}), "evaluate": perf_counter() - began}
        why, measured = closed.fused.no_ensemble, self._run.log_ensemble and len(self._test)
        unmeasured = measured and ensembles["ensemble"] is None and (closed.fused.ensemble is not None or why)
        names = [update.client_id for update in updates]
        lost = [update.client_id for update in updates if LOST in update.metrics]
        starts = closed.fused.start if self._tries_clients else {}
        drifts = {one.client_id: drift(one.state, starts.get(one.prototype, {})) for one in updates}
        found: dict[str, Any] = {
            "round": closed.server.round,
            "clients": names,
            **(ensembles if self._run.log_ensemble else NO_ENSEMBLE),
            **({"no_ensemble": why or "no teacher's answers are finite"} if unmeasured else {}),
            "models": models,
            **({"score": metric} if metric != "accuracy" else {}),
            **({"measures": measures} if self._test.outputs.measures else {}),
            "metrics_of_clients": mean_metrics([(update.n_examples, update.metrics) for update in updates]),
            **({"accuracy_of_clients": {n: teachers.get(n) for n in names}} if self._tries_clients else {}),
            **({"drift_of_clients": drifts} if self._tries_clients else {}),
            "bytes_down": {name: closed.bytes_down[name] for name in names},
            "bytes_up": {one.client_id: sum(map(n_bytes, [wire(one.state), *one.payload.values()])) for one in updates},
            "dropped": [{"client": failure.client_id, "reason": failure.reason} for failure in closed.failures],
            "attempts": closed.attempts,
            "seconds": {stage: round(value, 4) for stage, value in seconds.items()},
            **({"lost_states": lost} if lost else {}),
            **notes,
        }
        return cast(Record, found)

    def confusion(self, models: Mapping[str, State]) -> dict[str, list[list[int]]]:
        """Return how often each model gives which answer (columns) to the test inputs of each class (rows)."""
        labels, n = self._test.labels, self._test.outputs.channels or 0
        if not len(self._test) or not self._test.outputs.counts_classes or n > MOST_CLASSES:
            return {}
        found = {}
        for one in self._on_test(models_of(models, self._prototypes)):
            answers = _known(one, "evaluation").logits.argmax(dim=1)
            found[one.client_id] = torch.bincount(n * labels + answers, minlength=n * n).reshape(n, n).tolist()
        return {name: found[name] for name in sorted(found)}  # not in the order of the workers

    def _tested(
        self, closed: Round, measures: dict[str, dict[str, float]]
    ) -> tuple[dict[str, float], dict[str, ModelRecord], dict[str, float | None]]:
        """Return the test accuracies of clients, of each prototype before and after fusion, and of ensembles.

        Those are the one that taught (``ensemble``, sampled models included), and plain AvgLogits of all clients.
        Further ``measures`` are noted by the way.
        """
        before, after = closed.fused.start, closed.server.models
        if not len(self._test):
            return {}, {name: {"averaged": None, "fused": None} for name in sorted(after)}, NO_ENSEMBLE
        asked: list[Teacher] = []
        ensemble: Ensemble | None = closed.fused.ensemble if self._run.log_ensemble else None
        if self._tries_clients:  # most of the work, where there are many
            asked = [teacher_of(update, self._prototypes) for update in closed.updates if update.state]
            names = {teacher.id for teacher in asked}
            asked += [one for one in ensemble.teachers if one.id not in names] if ensemble else []  # sampled models
        changed = {name: state for name, state in after.items() if state is not before[name]}
        fused = [*models_of(before, self._prototypes, "averaged"), *models_of(changed, self._prototypes, "fused")]
        outcomes = self._on_test([*asked, *fused])  # at once: no worker waits for another
        clients = {update.client_id: told(update) for update in closed.updates}
        accuracies, ensembles = self._ensembles(islice(outcomes, len(asked)), clients, ensemble, measures)
        scores: dict[str, float] = {}
        for one in outcomes:
            found = _known(one, "evaluation").logits
            scores[one.client_id] = _score(found, self._test)
            prototype = one.client_id.partition(" ")[2]  # fused ones come after averaged ones
            measures[prototype] = self._test.outputs.measure(found, self._test.labels)
        models: dict[str, ModelRecord] = {}
        for name in sorted(after):
            averaged = scores[f"averaged {name}"]
            models[name] = {"averaged": averaged, "fused": scores.get(f"fused {name}", averaged)}
        return accuracies, models, ensembles

    def _ensembles(
        self,
        outcomes: Iterable[Predictions | Failure],
        clients: Mapping[str, Tensor | None],
        ensemble: Ensemble | None,
        measures: dict[str, dict[str, float]],
    ) -> tuple[dict[str, float], dict[str, float | None]]:
        """Return the clients' accuracies and those of ensembles; one teacher's answers are in memory at a time."""
        members = {teacher.id for teacher in ensemble.teachers} if ensemble else set()
        accuracies: dict[str, float] = {}
        finite: set[str] = set()
        total = torch.zeros((), dtype=torch.float64)

        def answers() -> Iterator[Predictions]:
            nonlocal total
            for outcome in outcomes:
                if isinstance(outcome, Failure):
                    continue  # only its share in the measured ensembles is lost
                name, logits = outcome.client_id, outcome.logits
                if name in clients:
                    known = clients[name]
                    answers = logits if known is None else self._test.outputs.restrict(logits, known)
                    accuracies[name] = _score(answers, self._test)
                if not bool(torch.isfinite(logits).all()):
                    continue
                finite.add(name)
                if name in clients:
                    total = total + logits.to(torch.float64)
                if name in members:
                    yield outcome

        found, stream = None, answers()
        if ensemble is not None:
            try:
                raw = ensemble.outputs.raw(ensemble(stream).double())
                found = _score(raw, self._test)
                measures["ensemble"] = self._test.outputs.measure(raw, self._test.labels)
            except ValueError:
                if finite & members:  # else it has nothing to combine
                    raise
        for _ in stream:  # the clients that did not teach
            pass
        heard = len(finite & clients.keys())
        return accuracies, {"ensemble": found, "avg_logits": _score(total / heard, self._test) if heard else None}


def _known(outcome: Predictions | Failure, work: str) -> Predictions:
    """Return what a model of the server answers; there is no record without it."""
    if isinstance(outcome, Failure):
        raise RuntimeError(f"the {work} of {outcome.client_id} failed: {outcome.reason}")
    return outcome


def _score(predictions: Tensor, examples: Examples) -> float:
    return accuracy_of(predictions, examples.labels, examples.outputs)


def mean_metrics(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return Σ n_k m_k / Σ n_k of every metric, over the clients that have it, where it is finite.

    Both are what clients say: an n_k counts as at most :data:`MOST_EXAMPLES_OF_MEDIAN` times the median of all, and
    what is called an accuracy lies between 0 and 1.
    """
    counted = [(count, metrics) for count, metrics in found if count > 0]
    most = MOST_EXAMPLES_OF_MEDIAN * median_low([count for count, _ in counted]) if counted else 0.0
    means: dict[str, float] = {}
    for name in sorted({name for _, metrics in counted for name in metrics} - {LOST}):
        mine = [(min(count, most), metrics[name]) for count, metrics in counted if name in metrics]
        if {"acc", "accuracy"} & set(re.split(r"[_.-]", name.lower())):
            mine = [(weight, min(1.0, max(0.0, value))) for weight, value in mine]
        total = sum(weight for weight, _ in mine)
        means[name] = sum(weight / total * value for weight, value in mine)
    return {name: mean for name, mean in means.items() if isfinite(mean)}


def describe(parts: Parts, folder: RunFolder, recorder: Recorder) -> None:
    """Write how the models in ``models/`` are built and fed, how they answer by class, the curves, and the card.

    Classes without names are numbers.
    """
    outputs, data = parts.task.data.train.outputs, parts.task.data
    path, server = folder.path, folder.latest()[0] or parts.server
    numbers = tuple(str(number) for number in range(data.train.n_classes))
    classes = data.classes if len(data.classes) == len(numbers) else numbers
    tokenizer = "characters" if data.name.endswith("-characters") else with_tokenizer(parts.experiment).tokenizer
    known = data.shape, classes, of_inputs(data.train.inputs, tokenizer)
    fits = {name: prototype.fit is not None for name, prototype in parts.prototypes.items()}
    specs = {
        spec.label: ModelSpec(spec.model, *known, spec.options, fits[spec.label], outputs.form)
        for spec in parts.experiment.prototypes
    }
    values = {"feddf": {"prototypes": {name: spec.describe() for name, spec in specs.items()}}}
    write_atomically(path / CONFIG, json.dumps(values, indent=2, ensure_ascii=False).encode())
    confusion = recorder.confusion(server.models)
    write_atomically(path / TESTED, json.dumps({"classes": classes, "confusion": confusion}).encode())
    counts = parts.task.counts()
    names = classes if outputs.counts_classes else data.group_names or [str(group) for group in range(counts.shape[1])]
    models = {name: spec.model for name, spec in specs.items()}
    (run,) = side_by_side([read_run(path)])
    if run.records:
        from feddf.report.plots import learning_curves  # matplotlib takes a second to load

        learning_curves([run], path / CURVES)
    said = parts.privacy.said() if parts.privacy else ""
    write_atomically(path / CARD, card(run, models, names, counts, confusion, said, data.unit).encode())
