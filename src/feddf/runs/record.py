"""What a round was worth: its models are tried on the server's labelled data, and a record goes into the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from time import perf_counter
from typing import Any, cast

import torch

from feddf.config import Record, RunConfig
from feddf.config.records import ModelRecord
from feddf.evaluate import Evaluation, Model, accuracy_of, model_of
from feddf.fusion.ensemble import avg_logits
from feddf.models.binary import wire
from feddf.runtime.execution import of_answers
from feddf.states import n_bytes
from feddf.types import Client, Engine, Examples, Failure, Prototype, Round, ServerState, State, Update, Vote


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
        self._test, self._validation, self._run = test, validation, run
        execution = of_answers(run)
        self._on_test = Evaluation(engine, prototypes, test.inputs, execution)
        self._on_validation = Evaluation(engine, prototypes, validation.inputs, execution)

    def record(self, sent: ServerState, closed: Round, clients: Sequence[Client]) -> Record:
        """Return the record of a round that began with ``sent``.

        Test accuracies before (line 11) and after fusion (line 15), of the ensemble and of each client, as the run
        logs them; the fused models' validation accuracy, by which hyper-parameters are tuned; bytes down and up.
        """
        began = perf_counter()
        teachers, models, ensemble = self._tested(closed)
        validated = self._validated(closed.server.models)
        for name, accuracy in validated.items():
            models[name]["validation"] = accuracy
        notes = dict(closed.fused.notes)
        seconds = {**closed.seconds, **notes.pop("seconds", {}), "evaluate": perf_counter() - began}
        members = {client.id: client for client in clients}
        names = [update.client_id for update in closed.updates]
        found: dict[str, Any] = {
            "round": closed.server.round,
            "clients": names,
            "ensemble": ensemble if self._run.log_ensemble else None,
            "models": models,
            "metrics_of_clients": mean_metrics([(update.n_examples, update.metrics) for update in closed.updates]),
            **({"accuracy_of_clients": {n: teachers.get(n) for n in names}} if self._run.log_clients else {}),
            "bytes_down": {name: n_bytes(sent.sent_to(members[name])) for name in names},
            "bytes_up": {update.client_id: n_bytes(wire(update.state)) for update in closed.updates},
            "dropped": [{"client": failure.client_id, "reason": failure.reason} for failure in closed.failures],
            "attempts": closed.attempts,
            "seconds": {stage: round(value, 4) for stage, value in seconds.items()},
            **notes,
        }
        return cast(Record, found)

    def _tested(self, closed: Round) -> tuple[dict[str, float], dict[str, ModelRecord], float | None]:
        """Return the test accuracies of clients, of each prototype before and after fusion, and of the ensemble."""
        before, after = closed.fused.start, closed.server.models
        teachers = self._teachers(closed.updates)
        if not len(self._test):
            return {}, {name: {"averaged": None, "fused": None} for name in sorted(after)}, None
        changed = [name for name in after if after[name] is not before[name]]
        averaged = [Model(f"averaged {name}", name, state) for name, state in before.items()]
        fused = [Model(f"fused {name}", name, after[name]) for name in changed]
        outcomes = self._on_test([*teachers, *averaged, *fused])  # at once: no worker waits for another
        accuracies: dict[str, float] = {}

        def votes() -> Iterator[Vote]:
            for _, outcome in zip(teachers, outcomes, strict=False):
                if isinstance(outcome, Failure):
                    continue  # only its share in the measured ensemble is lost
                accuracies[outcome.client_id] = accuracy_of(outcome.logits, self._test.labels)
                if bool(torch.isfinite(outcome.logits).all()):
                    yield Vote(outcome.logits)

        try:
            ensemble = accuracy_of(avg_logits(votes()), self._test.labels)
        except ValueError:  # no teacher has finite logits
            ensemble = None
        found: list[float] = []
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                raise RuntimeError(f"the evaluation of {outcome.client_id} failed: {outcome.reason}")
            found.append(accuracy_of(outcome.logits, self._test.labels))
        by_name = dict(zip(before, found, strict=False))
        new = {**by_name, **dict(zip(changed, found[len(averaged) :], strict=True))}
        return (
            accuracies,
            {name: {"averaged": by_name.get(name), "fused": new[name]} for name in sorted(after)},
            ensemble,
        )

    def _teachers(self, updates: Sequence[Update]) -> list[Model]:
        """Return the clients' models, if they are logged: most of the work, where there are many."""
        return [model_of(update) for update in updates] if self._run.log_clients or self._run.log_ensemble else []

    def _validated(self, models: Mapping[str, State]) -> dict[str, float]:
        """Return each fused model's accuracy on the validation data, where there are any."""
        if not len(self._validation):
            return {}
        asked = [Model(name, name, state) for name, state in models.items()]
        found = self._on_validation.accuracies(asked, self._validation.labels)
        for outcome in found.values():
            if isinstance(outcome, Failure):
                raise RuntimeError(f"the validation of {outcome.client_id} failed: {outcome.reason}")
        return cast(dict[str, float], found)


def mean_metrics(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return Σ n_k m_k / Σ n_k of every metric that all clients have, where it is finite."""
    total = sum(count for count, _ in found)
    if not total:
        return {}
    shared = set.intersection(*(set(metrics) for _, metrics in found))
    means = {name: sum(count / total * metrics[name] for count, metrics in found) for name in sorted(shared)}
    return {name: mean for name, mean in means.items() if isfinite(mean)}
