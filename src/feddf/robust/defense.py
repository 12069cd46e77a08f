"""Guards around a round, and what ``fusion.defense = "robust"`` is made of (docs/decisions/defense.md says why).

* Trust: the weights of the mixture of clients that explains the validation data best; without labels, ExpGuard's.
* Start: the plain average, or one that is fitted to the validation data where that is better; without labels, the
  clipped one.
* Ensemble: averaged probabilities, weighted by trust.
* Guard: a fused model that is clearly worse than the previous one is not kept.

Under every method, models are tried before they are used: finite weights can give logits that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import sqrt
from statistics import median_low
from typing import Any

import torch

from feddf.evaluate import Evaluation, accuracy, accuracy_of, models_of
from feddf.fusion.weights import CLASS_COUNTS, number_of_classes, told
from feddf.robust.fitted import fitted_average
from feddf.robust.rules import MOST_EXAMPLES_OF_MEDIAN, assumed, change_norms, clipped_average
from feddf.robust.trust import TRUST, client_logits, consensus, some
from feddf.runtime.device import threads
from feddf.runtime.execution import Execution
from feddf.types import Engine, Failure, Fused, Fusion, Resources, Rule, ServerState, State, Update

MARGIN = 0.05  # how much worse than the previous model a fused one may be before it is not kept


def robust_start(plain: Rule, resources: Resources, execution: Execution = Execution()) -> Rule:
    """Return the rule that tries the plain average, fitted ones and the previous weights on the validation data.

    The first is taken that is within a standard error of the best: the best of many on few examples is mostly chance,
    and the first are those that lose least where no client attacks. Weights that are farther from the previous ones
    than the median update are not considered: a last layer times 1,000 gives the same accuracy, and the
    next round's training diverges. Without labeled data it is the clipped average of the clients trusted most.
    """
    if not resources.validation:
        return without_least_trusted(clipped_average)
    examples = some(resources.validation)
    fitted = fitted_average(resources, examples, execution)
    rules = (plain, without_least_trusted(fitted), fitted)

    def rule(previous: State, updates: Sequence[Update]) -> State:
        if not any(update.n_examples > 0 for update in updates):
            return previous
        prototype = resources.prototypes[updates[0].prototype]
        with threads(1), execution.begun() as device:  # bytes must not depend on the server's cores
            found = [*(candidate(previous, updates) for candidate in rules), previous]
            usual = change_norms(previous, [update.state for update in updates]).median()
            norms, most = change_norms(previous, found), usual * (1 + 1e-5)  # for being stored in float32
            candidates = [state for state, norm in zip(found, norms, strict=True) if norm <= most]
            scores = [accuracy(prototype.load(state, device), examples) for state in candidates]
        best = max(scores)
        share = min(1.0, max(0.0, best))
        close = best - sqrt(share * (1 - share) / len(examples))
        return next(state for state, score in zip(candidates, scores, strict=True) if score >= close)

    return rule


def without_least_trusted(inner: Rule) -> Rule:
    """Return a rule for the updates without those of at most f clients that are trusted least, and less than half."""

    def rule(previous: State, updates: Sequence[Update]) -> State:
        order = sorted(updates, key=lambda update: update.trust)
        left_out = {update.client_id for update in order[: assumed(len(order))] if update.trust < 0.5}
        return inner(previous, [update for update in updates if update.client_id not in left_out])

    return rule


# Guards around a fusion


def check_models(
    inner: Fusion, resources: Resources, engine: Engine, execution: Execution = Execution(), *, updates_too: bool = True
) -> Fusion:
    """Return ``inner`` for updates whose models work: finite weights can still give logits that are not finite.

    Such a client is refused under every method; one that asks all updates anyway needs no trial of them
    (``updates_too``). The fused models are tried as well: if one of them overflows although no update does, the round
    keeps the previous weights of that prototype, and says so. Without validation data they are tried on the pool.
    """
    inputs = resources.validation.inputs if resources.validation else resources.pool
    if inputs is None:
        return inner
    evaluation = Evaluation(engine, some(inputs, 64), execution)

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        for _ in client_logits(evaluation, updates if updates_too else (), resources):
            pass  # once all are in, it raises if any is unfit
        fused = inner(server, updates, seed)
        found = evaluation(models_of(fused.server.models, resources.prototypes))
        broken = [one.client_id for one in found if isinstance(one, Failure) or not bool(one.logits.isfinite().all())]
        if not broken:
            return fused
        models = {**fused.server.models, **{name: server.models[name] for name in broken}}
        notes = {**fused.notes, "guard": {"not finite": broken, "kept_previous": broken}}
        return replace(fused, server=replace(fused.server, models=models), notes=notes)

    return fuse


def bounded_counts(inner: Fusion, factor: float = MOST_EXAMPLES_OF_MEDIAN) -> Fusion:
    """Return ``inner`` for clients whose counts cannot be checked: none is more than ``factor`` times the median.

    That goes for n_k, and for n_kc of each class among the clients that claim any. Where it happens to an n_k the note
    ``bounded_counts`` says to whom.
    """

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        most = max(1, int(factor * median_low([update.n_examples for update in updates]))) if updates else 0
        cut = {update.client_id: update.n_examples for update in updates if update.n_examples > most}
        bounded = [replace(one, n_examples=most) if one.client_id in cut else one for one in updates]
        fused = inner(server, bounded_classes(bounded, factor), seed)
        return replace(fused, notes={**fused.notes, "bounded_counts": {"most": most, "claimed": cut}}) if cut else fused

    return fuse


def bounded_classes(updates: Sequence[Update], factor: float) -> list[Update]:
    """Return updates in which no client's count of a class is more than ``factor`` times the median of those above 0.

    A bound on n_k alone would let a client dominate a rare class by claiming examples of that class only.
    """
    usual = number_of_classes(updates)
    rows = {one.client_id: row for one in updates if (row := told(one)) is not None and len(row) == usual}
    if not rows:
        return list(updates)
    columns = torch.stack(list(rows.values())).T
    most = torch.tensor([int(factor * median_low(column[column > 0].tolist() or [0])) for column in columns])
    bounded = {name: {CLASS_COUNTS: {"counts": torch.minimum(row, most)}} for name, row in rows.items()}
    return [replace(one, payload={**one.payload, **bounded.get(one.client_id, {})}) for one in updates]


Scores = Callable[[Mapping[str, State], Sequence[Update]], Mapping[str, float]]
"""(models by prototype, this round's updates) -> a score of each, higher is better."""


def guard(
    margin: float,
    inner: Fusion,
    resources: Resources,
    engine: Engine,
    again: Callable[[], Fusion] | None = None,
    execution: Execution = Execution(),
) -> Fusion:
    """Return ``inner`` with its fused models compared with the previous ones.

    A model whose score falls by more than ``margin`` is not kept: the round is fused ``again`` with robust rules, if
    there are any, and a prototype that is still worse keeps its previous weights. The score is the accuracy on the
    validation data; without any, the agreement with the geometric median of the updates' answers on the pool.
    """
    score = _score_by(resources, engine, execution)
    if score is None:
        return inner
    fallback = cache(again) if again else None

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        fused = inner(server, updates, seed)
        before, after = score(server.models, updates), score(fused.server.models, updates)
        worse = [name for name in before if after[name] < before[name] - margin]
        if not worse:
            return fused
        note: dict[str, Any] = {"before": _rounded(before), "fused": _rounded(after)}
        if fallback is not None:
            fused = fallback()(server, updates, seed)
            after = score(fused.server.models, updates)
            note["fused_again"] = _rounded(after)
            worse = [name for name in before if after[name] < before[name] - margin]
        note["kept_previous"] = worse
        kept = replace(fused.server, models={**fused.server.models, **{name: server.models[name] for name in worse}})
        if len(worse) == len(before):  # nothing of the round is kept but the trust
            kept = replace(kept, memory={**server.memory, TRUST: kept.memory.get(TRUST, {})})
        return replace(fused, server=kept, notes={**fused.notes, "guard": note})

    return fuse


def _score_by(resources: Resources, engine: Engine, execution: Execution) -> Scores | None:
    examples = some(resources.validation) if resources.validation else None
    inputs = examples.inputs if examples else some(resources.pool, 512) if resources.pool is not None else None
    if inputs is None:
        return None
    evaluation, outputs = Evaluation(engine, inputs, execution), (examples or resources).outputs

    def score(models: Mapping[str, State], updates: Sequence[Update]) -> Mapping[str, float]:
        labels = examples.labels if examples else consensus(client_logits(evaluation, updates, resources), outputs)
        return {
            one.client_id: -1.0 if isinstance(one, Failure) else accuracy_of(one.logits.nan_to_num(), labels, outputs)
            for one in evaluation(models_of(models, resources.prototypes))
        }

    return score


def _rounded(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in scores.items()}
