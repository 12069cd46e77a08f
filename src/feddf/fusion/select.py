"""Drop-worst: leave clients that learned nothing out of the average and of the ensemble (section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from statistics import fmean, pstdev

from torch import Tensor

from feddf.evaluate import accuracy_of
from feddf.fusion.ensemble import Answer, Question, question
from feddf.types import Engine, Examples, Failure, Fused, Fusion, Refusal, ServerState, Update

Judge = Callable[[Mapping[str, float], int, int], set[str]]
"""(accuracy by client, number of classes, number of validation examples) -> the clients to drop."""


def random_guessers(accuracies: Mapping[str, float], n_classes: int, n_examples: int) -> set[str]:
    """The paper's rule: those whose validation accuracy is that of guessing, within two standard errors of it."""
    guess = 1 / n_classes
    threshold = guess + 2 * sqrt(guess * (1 - guess) / n_examples)
    return {client for client, accuracy in accuracies.items() if accuracy <= threshold}


def released_rule(accuracies: Mapping[str, float], n_classes: int, n_examples: int) -> set[str]:
    """The released code's rule: below 1.2 × guessing, or else, if none is, below the mean minus 1.5 deviations."""
    below = {client for client, accuracy in accuracies.items() if accuracy < 1.2 / n_classes}
    if below:
        return below
    floor = fmean(accuracies.values()) - 1.5 * pstdev(accuracies.values())
    return {client for client, accuracy in accuracies.items() if accuracy < floor}


JUDGES: dict[str, Judge] = {"paper": random_guessers, "released": released_rule}


def examined(
    updates: Sequence[Update], *, engine: Engine, examine: Callable[[Question], Answer], labels: Tensor
) -> dict[str, float]:
    """Return each client's accuracy; ``examine`` asks its model about the inputs that have these labels."""
    outcomes = list(engine(examine, [question(update) for update in updates]))
    if failed := [outcome for outcome in outcomes if isinstance(outcome, Failure)]:
        raise Refusal([Failure(one.client_id, f"its model could not be asked: {one.reason}") for one in failed])
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    return {one.client_id: accuracy_of(one.logits, labels) for one in answers}


def drop_worst(
    judge: Judge, inner: Fusion, *, engine: Engine, examine: Callable[[Question], Answer], validation: Examples
) -> Fusion:
    """Return ``inner`` for the clients that ``judge`` leaves; if it would leave none, the best one is kept.

    ``examine`` asks a client's model about the inputs of ``validation``, the server's labelled examples.
    """

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        accuracies = examined(updates, engine=engine, examine=examine, labels=validation.labels)
        dropped = judge(accuracies, validation.n_classes, len(validation))
        saved = None
        if dropped >= accuracies.keys():
            saved = max(sorted(accuracies), key=lambda client: accuracies[client])
            dropped -= {saved}
        fused = inner(server, [update for update in updates if update.client_id not in dropped], seed)
        note = {"clients": {client: accuracies[client] for client in sorted(dropped)}, "kept_as_the_best": saved}
        return replace(fused, notes={**fused.notes, "dropped_worst": note})

    return fuse
