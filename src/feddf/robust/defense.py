"""What ``fusion.defense = "robust"`` is made of (docs/decisions/defense.md says why).

* Trust: the weights of the mixture of clients that explains the validation data best; without labels, ExpGuard's.
* Start: the best on the validation data of a few averages, robust and plain; without labels, the clipped one.
* Ensemble: averaged probabilities, weighted by trust.
* Guard: a fused model that is clearly worse than the previous one is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from feddf import evaluate
from feddf.robust import rules as robust
from feddf.robust.trust import some_examples
from feddf.runtime.device import threads
from feddf.runtime.execution import Execution
from feddf.types import Examples, Resources, Rule, State, Update

ROUNDING = 1 + 1e-5
"""What an average may be longer than its longest part for being stored in float32."""

MARGIN = 0.05
"""How much worse than the previous model a fused one may be before it is not kept."""


def robust_start(plain: Rule, resources: Resources, execution: Execution = Execution()) -> Rule:
    """Return the rule that tries several averages and keeps the one that is best on the validation data.

    Without labeled data it is the clipped average of the clients that are trusted most.
    """
    validation = resources.validation
    if validation is None or not len(validation):
        return trusted_average
    rules = (
        plain,
        without_least_trusted(plain),
        robust.clipped_average,
        trusted_average,
        by_trust,
        robust.mixed_trimmed,
        as_before,
    )
    return best_of(rules, resources, some_examples(validation), execution)


def best_of(
    rules: Sequence[Rule], resources: Resources, examples: Examples, execution: Execution = Execution()
) -> Rule:
    """Return the rule whose weights are those of the best of several rules on labeled examples.

    The first is taken that is within a standard error of the best: to choose the best of many by few examples is to
    choose by chance, and the first are those that lose least where nobody attacks.

    Weights that are farther from the previous ones than the median update is are no candidate: a last layer times 1,000
    gives the same accuracy, and the next round's training diverges.
    """

    def rule(previous: State, updates: Sequence[Update]) -> State:
        if not any(update.n_examples > 0 for update in updates):
            return previous
        prototype = resources.prototypes[updates[0].prototype]
        found = [candidate(previous, updates) for candidate in rules]
        usual = robust.change_norms(previous, [update.state for update in updates]).median()
        candidates = [
            state
            for state, norm in zip(found, robust.change_norms(previous, found), strict=True)
            if norm <= usual * ROUNDING
        ]
        with threads(1), execution.begun() as device:  # bytes must not depend on the server's cores
            scores = [evaluate.accuracy(prototype.load(state, device), examples) for state in candidates]
        best = max(scores)
        close = best - sqrt(best * (1 - best) / len(examples))
        return next(state for state, score in zip(candidates, scores, strict=True) if score >= close)

    return rule


def without_least_trusted(inner: Rule) -> Rule:
    """Return a rule for the updates without those of at most f clients that are trusted least, and less than half."""

    def rule(previous: State, updates: Sequence[Update]) -> State:
        order = sorted(updates, key=lambda update: update.trust)
        left_out = {update.client_id for update in order[: robust.assumed(len(order))] if update.trust < 0.5}
        return inner(previous, [update for update in updates if update.client_id not in left_out])

    return rule


trusted_average = without_least_trusted(robust.clipped_average)


def as_before(previous: State, updates: Sequence[Update]) -> State:
    """Return the previous weights: better than any average of a round in which nothing good was sent."""
    return previous


def by_trust(previous: State, updates: Sequence[Update]) -> State:
    """Return the clipped average in which a client counts by n_k and by the trust in it."""
    scaled = [replace(update, n_examples=round(1000 * update.trust * update.n_examples)) for update in updates]
    return robust.clipped_average(previous, scaled)
