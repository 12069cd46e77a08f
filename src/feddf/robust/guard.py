"""Guards around a round: models are tried before they are believed, and a fused model that is worse is not kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from feddf.evaluate import Evaluation, Predictions, accuracy_of, models_of, teacher_of
from feddf.fusion.ensemble import refuse_unusable
from feddf.outputs import CHANNELS, Outputs
from feddf.robust.rules import MOST_EXAMPLES_OF_MEDIAN
from feddf.robust.targets import geometric_median
from feddf.robust.trust import TRUST, some_examples, some_inputs
from feddf.runtime.execution import Execution
from feddf.types import Engine, Failure, Fused, Fusion, Inputs, Resources, ServerState, State, Update, WeightedLogits

PROBES = 64
"""Inputs on which a model is tried before it is averaged."""


def check_models(
    inner: Fusion,
    resources: Resources,
    engine: Engine,
    execution: Execution = Execution(),
    *,
    updates_too: bool = True,
) -> Fusion:
    """Return ``inner`` for updates whose models work: finite weights can still give logits that are not finite.

    Such a client is refused under every method; one that asks all updates anyway needs no trial of them
    (``updates_too``). The fused models are tried as well: if one of them overflows although no update does, the round
    keeps the previous weights of that prototype, and says so.
    """
    inputs = probes(resources)
    if inputs is None:
        return inner
    evaluation = Evaluation(engine, inputs, execution)

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        for _ in refuse_unusable(
            evaluation([teacher_of(update, resources.prototypes) for update in updates if updates_too])
        ):
            pass
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
    """Return ``inner`` for clients whose n_k nobody can check: none counts for more than ``factor`` times the median.

    Where that happens the note ``bounded_counts`` says to whom.
    """

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        most = max(1, int(factor * median_low([update.n_examples for update in updates]))) if updates else 0
        cut = {update.client_id: update.n_examples for update in updates if update.n_examples > most}
        bounded = [replace(one, n_examples=most) if one.client_id in cut else one for one in updates]
        fused = inner(server, bounded, seed)
        return replace(fused, notes={**fused.notes, "bounded_counts": {"most": most, "claimed": cut}}) if cut else fused

    return fuse


def probes(resources: Resources) -> Inputs | None:
    """Return a few inputs to try models on: of the validation data, or else of the pool; none where there are none."""
    if resources.validation is not None and len(resources.validation):
        return some_inputs(resources.validation.inputs, PROBES)
    return some_inputs(resources.pool, PROBES) if resources.pool is not None else None


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
    score = _accuracies(resources, engine, execution) or _agreements(resources, engine, execution)
    if score is None:
        return inner
    fallback: list[Fusion] = []

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        fused = inner(server, updates, seed)
        before, after = score(server.models, updates), score(fused.server.models, updates)
        worse = [name for name in before if after[name] < before[name] - margin]
        if not worse:
            return fused
        note: dict[str, Any] = {"before": _rounded(before), "fused": _rounded(after)}
        if again is not None:
            if not fallback:
                fallback.append(again())
            fused = fallback[0](server, updates, seed)
            after = score(fused.server.models, updates)
            note["fused_again"] = _rounded(after)
            worse = [name for name in before if after[name] < before[name] - margin]
        note["kept_previous"] = worse
        models = {**fused.server.models, **{name: server.models[name] for name in worse}}
        kept = replace(fused.server, models=models)
        if len(worse) == len(before):  # nothing of the round is kept but the trust
            kept = replace(kept, memory={**server.memory, TRUST: kept.memory.get(TRUST, {})})
        return replace(fused, server=kept, notes={**fused.notes, "guard": note})

    return fuse


def _accuracies(resources: Resources, engine: Engine, execution: Execution) -> Scores | None:
    if resources.validation is None or not len(resources.validation):
        return None
    examples = some_examples(resources.validation)
    evaluation = Evaluation(engine, examples.inputs, execution)

    def score(models: Mapping[str, State], updates: Sequence[Update]) -> Mapping[str, float]:
        found = evaluation.accuracies(models_of(models, resources.prototypes), examples)
        return {name: -1.0 if isinstance(value, Failure) else value for name, value in found.items()}

    return score


def _agreements(resources: Resources, engine: Engine, execution: Execution) -> Scores | None:
    if resources.pool is None:
        return None
    evaluation = Evaluation(engine, some_inputs(resources.pool, 512), execution)

    def score(models: Mapping[str, State], updates: Sequence[Update]) -> Mapping[str, float]:
        answers = refuse_unusable(evaluation([teacher_of(update, resources.prototypes) for update in updates]))
        labels = geometric_median(WeightedLogits(answer.logits) for answer in answers).argmax(dim=CHANNELS)
        found = evaluation(models_of(models, resources.prototypes))
        outputs = resources.outputs
        return {one.client_id: -1.0 if isinstance(one, Failure) else _agreement(one, labels, outputs) for one in found}

    return score


def _agreement(answer: Predictions, labels: Tensor, outputs: Outputs) -> float:
    return accuracy_of(torch.nan_to_num(answer.logits), labels, outputs)


def _rounded(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in scores.items()}
