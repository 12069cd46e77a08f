"""Drop-worst: leave clients that learned nothing out of the average and of the ensemble (section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from statistics import fmean, pstdev

from feddf.evaluate import Evaluation, model_of
from feddf.fusion.weights import Accuracies
from feddf.types import Engine, Failure, Fused, Fusion, Refusal, Resources, ServerState, Update

DropRule = Callable[[Mapping[str, float], int, int], set[str]]
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


def validation_accuracies(resources: Resources, engine: Engine) -> Accuracies:
    """Return what measures clients on the validation data; a client whose model cannot be asked is refused."""
    evaluation = Evaluation(engine, resources.prototypes, resources.labelled.inputs)

    def accuracies(updates: Sequence[Update]) -> dict[str, float]:
        found = evaluation.accuracies([model_of(update) for update in updates], resources.labelled.labels)
        if failed := [one for one in found.values() if isinstance(one, Failure)]:
            raise Refusal([Failure(one.client_id, f"its model could not be asked: {one.reason}") for one in failed])
        return {client: value for client, value in found.items() if not isinstance(value, Failure)}

    return accuracies


def drop_worst(rule: DropRule, inner: Fusion, resources: Resources, engine: Engine) -> Fusion:
    """Return ``inner`` for the clients that the rule leaves; if it would leave none, the best one is kept."""
    validation, measure = resources.labelled, validation_accuracies(resources, engine)

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        accuracies = measure(updates)
        dropped = rule(accuracies, validation.n_classes, len(validation))
        saved = None
        if dropped >= accuracies.keys():
            saved = max(sorted(accuracies), key=lambda client: accuracies[client])
            dropped -= {saved}
        fused = inner(server, [update for update in updates if update.client_id not in dropped], seed)
        note = {"clients": {client: accuracies[client] for client in sorted(dropped)}, "kept_as_the_best": saved}
        return replace(fused, notes={**fused.notes, "dropped_worst": note})

    return fuse
