"""What a round was worth: the record that goes into the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from feddf.binary import wire
from feddf.evaluate import accuracy_of
from feddf.fusion.ensemble import Answer, Question, answer, avg_logits
from feddf.outcomes import gather, in_order
from feddf.states import n_bytes
from feddf.types import Client, Engine, Examples, Failure, Prototype, Round, ServerState, State

Record = dict[str, Any]


@dataclass(frozen=True)
class Court:
    """Those who judge, and by what: the engine that asks models, and the labelled data of the server."""

    engine: Engine
    test: Examples
    validation: Examples
    ask_test: Callable[[Question], Answer]
    ask_validation: Callable[[Question], Answer]
    log_clients: bool = False
    log_ensemble: bool = True


def court(
    engine: Engine,
    prototypes: Mapping[str, Prototype],
    test: Examples,
    validation: Examples,
    *,
    log_clients: bool,
    log_ensemble: bool,
) -> Court:
    """Return a court; what models are asked by is made once for all rounds, because workers keep it."""
    ask_test, ask_validation = (
        partial(answer, prototypes=prototypes, inputs=examples.inputs) for examples in (test, validation)
    )
    return Court(engine, test, validation, ask_test, ask_validation, log_clients, log_ensemble)


def judge(sent: ServerState, closed: Round, clients: Sequence[Client], court: Court) -> Record:
    """Return the record of a round that began with ``sent``.

    Test accuracies before (line 11) and after fusion (line 15), of the ensemble and of each client, as the court logs
    them; the fused models' validation accuracy, by which hyper-parameters are tuned; bytes down and up for each client.
    """
    clock = perf_counter()
    before, after = closed.fused.start, closed.server.models
    heard = closed.updates if court.log_clients or court.log_ensemble else []  # most of the work, if they are many
    questions = [Question(f"teacher {u.client_id}", u.prototype, u.state) for u in heard]
    questions += [Question(f"before {name}", name, state) for name, state in before.items()]
    questions += [Question(f"after {name}", name, after[name]) for name in after if after[name] is not before[name]]
    accuracies, ensemble = _mark(court.engine, court.ask_test, questions, court.test)
    validated = _validated(after, court)
    models = {
        name: {
            "averaged": accuracies.get(f"before {name}"),
            "fused": accuracies.get(f"after {name}", accuracies.get(f"before {name}")),
            **({"validation": validated[name]} if validated else {}),
        }
        for name in sorted(after)
    }
    notes = dict(closed.fused.notes)
    seconds = {**closed.seconds, **notes.pop("seconds", {}), "evaluate": perf_counter() - clock}
    members = {client.id: client for client in clients}
    names = [update.client_id for update in closed.updates]
    return {
        "round": closed.server.round,
        "clients": names,
        "ensemble": ensemble if court.log_ensemble else None,
        "models": models,
        "metrics_of_clients": mean_metrics([(update.n_examples, update.metrics) for update in closed.updates]),
        **({"accuracy_of_clients": {n: accuracies.get(f"teacher {n}") for n in names}} if court.log_clients else {}),
        "bytes_down": {name: n_bytes(sent.sent_to(members[name])) for name in names},
        "bytes_up": {update.client_id: n_bytes(wire(update.state)) for update in closed.updates},
        "dropped": [{"client": failure.client_id, "reason": failure.reason} for failure in closed.failures],
        "attempts": closed.attempts,
        "seconds": {stage: round(value, 4) for stage, value in seconds.items()},
        **notes,
    }


def mean_metrics(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return Σ n_k m_k / Σ n_k of every metric that all clients have, where it is finite."""
    total = sum(count for count, _ in found)
    if not total:
        return {}
    shared = set.intersection(*(set(metrics) for _, metrics in found))
    means = {name: sum(count / total * metrics[name] for count, metrics in found) for name in sorted(shared)}
    return {name: mean for name, mean in means.items() if isfinite(mean)}


def _validated(models: Mapping[str, State], court: Court) -> dict[str, float]:
    """Return each fused model's accuracy on the validation data, where there are any."""
    if not len(court.validation):
        return {}
    questions = [Question(name, name, state) for name, state in models.items()]
    answers = gather(court.engine(court.ask_validation, questions), "the validation of")
    return {one.client_id: accuracy_of(one.logits, court.validation.labels) for one in answers}


def _mark(
    engine: Engine, examine: Callable[[Question], Answer], questions: Sequence[Question], test: Examples
) -> tuple[dict[str, float], float | None]:
    """Return each model's accuracy by its question's name, and that of the teachers together."""
    accuracies: dict[str, float] = {}
    if not len(test):
        return accuracies, None

    def teachers() -> Iterator[Tensor]:
        for outcome in in_order(engine(examine, questions), [question.id for question in questions]):
            if isinstance(outcome, Failure):
                if outcome.client_id.startswith("teacher "):
                    continue  # only its share in the measured ensemble is lost
                raise RuntimeError(f"the evaluation of {outcome.client_id} failed: {outcome.reason}")
            accuracies[outcome.client_id] = accuracy_of(outcome.logits, test.labels)
            if outcome.client_id.startswith("teacher ") and bool(torch.isfinite(outcome.logits).all()):
                yield outcome.logits

    try:
        ensemble = accuracy_of(avg_logits(teachers()), test.labels)
    except ValueError:  # no teacher has finite logits
        return accuracies, None
    return accuracies, ensemble
