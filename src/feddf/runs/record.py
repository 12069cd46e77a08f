"""What a round was worth: its models are tried on the server's labeled data, and a record goes into the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from feddf.config import Record, RunConfig
from feddf.config.records import ModelRecord
from feddf.evaluate import Evaluation, Predictions, Teacher, accuracy_of, models_of, teacher_of
from feddf.fusion.ensemble import Ensemble
from feddf.models.binary import wire
from feddf.runs.spool import LOST
from feddf.runtime.execution import of_answers
from feddf.states import n_bytes
from feddf.types import Engine, Examples, Failure, Prototype, Round

NO_ENSEMBLE: dict[str, float | None] = {"ensemble": None, "avg_logits": None}


class Recorder:
    """Makes the record of each round, by trying models on the test and validation data. Made once for all rounds."""

    def __init__(
        self, engine: Engine, prototypes: Mapping[str, Prototype], test: Examples, validation: Examples, run: RunConfig
    ) -> None:
        self._prototypes, self._test, self._validation, self._run = prototypes, test, validation, run
        execution = of_answers(run)
        self._on_test = Evaluation(engine, test.inputs, execution)
        self._on_validation = Evaluation(engine, validation.inputs, execution)

    def record(self, closed: Round) -> Record:
        """Return the record of a round.

        Test accuracies before (line 11) and after fusion (line 15), of the ensemble that taught, of plain AvgLogits of
        the clients and of each client, as the run logs them; the fused models' validation accuracy, by which
        hyper-parameters are tuned; bytes down and up.
        """
        began, updates = perf_counter(), closed.updates
        teachers, models, ensembles = self._tested(closed)
        if len(self._validation):
            for one in self._on_validation(models_of(closed.server.models, self._prototypes)):
                models[one.client_id]["validation"] = _score(_known(one, "validation").logits, self._validation)
        notes = dict(closed.fused.notes)
        seconds = {**closed.seconds, **notes.pop("seconds", {}), "evaluate": perf_counter() - began}
        names = [update.client_id for update in updates]
        lost = [update.client_id for update in updates if LOST in update.metrics]
        found: dict[str, Any] = {
            "round": closed.server.round,
            "clients": names,
            **(ensembles if self._run.log_ensemble else NO_ENSEMBLE),
            **self._reason(closed, ensembles),
            "models": models,
            "metrics_of_clients": mean_metrics([(update.n_examples, update.metrics) for update in updates]),
            **({"accuracy_of_clients": {n: teachers.get(n) for n in names}} if self._run.log_clients else {}),
            "bytes_down": {name: closed.bytes_down[name] for name in names},
            "bytes_up": {one.client_id: sum(map(n_bytes, [wire(one.state), *one.payload.values()])) for one in updates},
            "dropped": [{"client": failure.client_id, "reason": failure.reason} for failure in closed.failures],
            "attempts": closed.attempts,
            "seconds": {stage: round(value, 4) for stage, value in seconds.items()},
            **({"lost_states": lost} if lost else {}),
            **notes,
        }
        return cast(Record, found)

    def _reason(self, closed: Round, ensembles: Mapping[str, float | None]) -> dict[str, str]:
        """Return why the ensemble that taught was not measured, where it was to be."""
        fused = closed.fused
        taught = fused.ensemble is not None or fused.no_ensemble
        if not self._run.log_ensemble or ensembles["ensemble"] is not None or not taught or not len(self._test):
            return {}
        return {"no_ensemble": fused.no_ensemble or "no teacher's answers are finite"}

    def _tested(self, closed: Round) -> tuple[dict[str, float], dict[str, ModelRecord], dict[str, float | None]]:
        """Return the test accuracies of clients, of each prototype before and after fusion, and of ensembles.

        Those are the one that taught (``ensemble``), and plain AvgLogits of all clients.
        """
        before, after = closed.fused.start, closed.server.models
        if not len(self._test):
            return {}, {name: {"averaged": None, "fused": None} for name in sorted(after)}, NO_ENSEMBLE
        asked, ensemble = self._asked(closed)
        changed = {name: state for name, state in after.items() if state is not before[name]}
        fused = [*models_of(before, self._prototypes, "averaged"), *models_of(changed, self._prototypes, "fused")]
        outcomes = self._on_test([*asked, *fused])  # at once: no worker waits for another
        clients = {update.client_id for update in closed.updates}
        accuracies, ensembles = self._ensembles(islice(outcomes, len(asked)), clients, ensemble)
        scores = {one.client_id: _score(_known(one, "evaluation").logits, self._test) for one in outcomes}
        models: dict[str, ModelRecord] = {}
        for name in sorted(after):
            averaged = scores[f"averaged {name}"]
            models[name] = {"averaged": averaged, "fused": scores.get(f"fused {name}", averaged)}
        return accuracies, models, ensembles

    def _asked(self, closed: Round) -> tuple[list[Teacher], Ensemble | None]:
        """Return who is asked, if it is logged (most of the work, where there are many), and the ensemble that taught.

        That are the clients, and what else taught: sampled models.
        """
        if not (self._run.log_clients or self._run.log_ensemble):
            return [], None
        clients = [teacher_of(update, self._prototypes) for update in closed.updates if update.state]
        ensemble: Ensemble | None = closed.fused.ensemble if self._run.log_ensemble else None
        names = {teacher.id for teacher in clients}
        others = [teacher for teacher in ensemble.teachers if teacher.id not in names] if ensemble else []
        return [*clients, *others], ensemble

    def _ensembles(
        self, outcomes: Iterable[Predictions | Failure], clients: set[str], ensemble: Ensemble | None
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
                    accuracies[name] = _score(logits, self._test)
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
                found = _score(ensemble(stream), self._test)
            except ValueError:
                if finite & members:  # else it has nothing to combine
                    raise
        for _ in stream:  # the clients that did not teach
            pass
        heard = len(finite & clients)
        return accuracies, {"ensemble": found, "avg_logits": _score(total / heard, self._test) if heard else None}


def _known(outcome: Predictions | Failure, work: str) -> Predictions:
    """Return what a model of the server answers; there is no record without it."""
    if isinstance(outcome, Failure):
        raise RuntimeError(f"the {work} of {outcome.client_id} failed: {outcome.reason}")
    return outcome


def _score(predictions: Tensor, examples: Examples) -> float:
    return accuracy_of(predictions, examples.labels, examples.outputs)


def mean_metrics(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return Σ n_k m_k / Σ n_k of every metric that all clients have, where it is finite."""
    total = sum(count for count, _ in found)
    if not total:
        return {}
    shared = set.intersection(*(set(metrics) for _, metrics in found))
    means = {name: sum(count / total * metrics[name] for count, metrics in found) for name in sorted(shared)}
    return {name: mean for name, mean in means.items() if isfinite(mean)}
