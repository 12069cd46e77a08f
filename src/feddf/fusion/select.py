"""Drop-worst: leave clients that learned nothing out of the average and of the ensemble (section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import sqrt
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from feddf.evaluate import Accuracies, Evaluation, Teacher
from feddf.runtime.execution import Execution
from feddf.types import Engine, Examples, Failure, Fused, Fusion, Refusal, Resources, ServerState, Update


class Dropped(NamedTuple):
    """The clients left out altogether, and those that are averaged but do not teach."""

    clients: frozenset[str]
    teachers: frozenset[str] = frozenset()


DropRule = Callable[[Mapping[str, float], float, int], Dropped | AbstractSet[str]]
"""(score by client, number of classes, number of validation examples) -> the clients to drop. Where guessing scores 0
(R², F1), the number of classes is infinite."""


def random_guessers(accuracies: Mapping[str, float], n_classes: float, n_examples: int) -> Dropped:
    """The paper's rule: those whose validation accuracy is that of guessing, within two standard errors of it."""
    guess = 1 / n_classes
    threshold = guess + 2 * sqrt(guess * (1 - guess) / n_examples)
    return Dropped(frozenset(client for client, accuracy in accuracies.items() if accuracy <= threshold))


def released_rule(accuracies: Mapping[str, float], n_classes: float, n_examples: int) -> Dropped:
    """The released code's rule: those below 1.2 × guessing are left out.

    If there are none, those below the mean minus 1.5 deviations are averaged but do not teach; the best client does not
    count in the mean and the deviation.
    """
    below = frozenset(client for client, accuracy in accuracies.items() if accuracy < 1.2 / n_classes)
    others = sorted(accuracies.values())[:-1]
    if below or not others:
        return Dropped(below)
    floor = fmean(others) - 1.5 * pstdev(others)
    return Dropped(below, frozenset(client for client, accuracy in accuracies.items() if accuracy < floor))


def dropped(rule: DropRule, accuracies: Mapping[str, float], validation: Examples) -> tuple[Dropped, dict[str, Any]]:
    """Return who is dropped by a rule, and a note on it; where it would drop everyone, the best of all is kept."""
    found = rule(accuracies, validation.outputs.guesses, len(validation))
    clients, teachers = found if isinstance(found, Dropped) else Dropped(frozenset(found))
    best = None
    if clients >= accuracies.keys():
        best = max(sorted(accuracies), key=lambda client: accuracies[client])
        clients -= {best}
    left_out = {"clients": clients, "teachers": teachers}
    note = {kind: {client: accuracies[client] for client in sorted(ids)} for kind, ids in left_out.items()}
    return Dropped(clients, teachers), {"dropped_worst": {**note, "kept_as_the_best": best}}


def validation_accuracies(resources: Resources, engine: Engine, execution: Execution = Execution()) -> Accuracies:
    """Return what measures teachers on the validation data; a client whose model cannot be asked is refused."""
    examples = resources.labeled
    evaluation = Evaluation(engine, examples.inputs, execution)

    def accuracies(teachers: Sequence[Teacher]) -> dict[str, float]:
        found = evaluation.accuracies(teachers, examples)
        if failed := [one for one in found.values() if isinstance(one, Failure)]:
            raise Refusal([Failure(one.client_id, f"its model could not be asked: {one.reason}") for one in failed])
        return {client: value for client, value in found.items() if not isinstance(value, Failure)}

    return accuracies


def drop_worst(
    rule: DropRule, measure: Callable[[Sequence[Update]], Mapping[str, float]], validation: Examples, inner: Fusion
) -> Fusion:
    """Return ``inner`` for the clients that the rule leaves; if it would leave none, the best one is kept.

    Args:
        rule: which clients to drop, by their accuracies.
        measure: updates -> each client's accuracy on the ``validation`` examples.
        validation: the labeled examples by which clients are judged.
        inner: the fusion of the clients that are left.
    """

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        (clients, teachers), note = dropped(rule, measure(updates), validation)
        kept = [update for update in updates if update.client_id not in clients]
        marked = [replace(one, teaches=False) if one.client_id in teachers else one for one in kept]
        fused = inner(server, marked, seed)
        return replace(fused, notes={**fused.notes, **note})

    return fuse
