"""Trust: how much the server believes each client as a teacher, kept over rounds in its memory.

A rule by name is a function ``(resources, engine, execution)`` that returns ``(updates, trust before) -> trust now``;
:data:`feddf.config.names.TRUSTS` lists them. Trust is at most 1; a client that is new has 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from feddf.evaluate import Evaluation, teacher_of
from feddf.fusion.ensemble import refuse_unusable
from feddf.robust.targets import mixture_weights, outlier_scores
from feddf.runtime.execution import Execution
from feddf.types import Engine, Examples, Fused, Fusion, Inputs, Resources, ServerState, Update

TrustRule = Callable[[Sequence[Update], Mapping[str, float]], Mapping[str, float]]
"""(updates, trust of these clients before) -> trust of these clients now."""

TRUST = "trust"
"""What it is called in the server's memory and in the record."""

ENOUGH = 1024
"""Examples on which clients are tried: more cost time and say little more."""

PRIOR = 0.1
"""The weight of the prior in :func:`mixture`, as a share of all examples."""

LEARNING_RATE = 2.0
"""ExpGuard's η, for distances between 0 and 1."""

LEAST = 1e-6
"""No trust of ExpGuard's falls below this: in the end it would be zero, and a cohort of such clients no ensemble."""


def mixture(resources: Resources, engine: Engine, execution: Execution = Execution()) -> TrustRule:
    """Trust by the weights of the mixture that explains the server's validation examples best.

    See :func:`feddf.robust.targets.mixture_weights`. A client whose weight is what the prior alone gives it,
    as of one that explains nothing, has none; from a third of an equal share on it has all: which of the honest
    explain best is mostly chance. The trust before does not count: labeled examples say enough.
    """
    examples = some_examples(resources.labeled)
    evaluation = Evaluation(engine, examples.inputs, execution)

    def trust(updates: Sequence[Update], before: Mapping[str, float]) -> Mapping[str, float]:
        weights = mixture_weights(_answers(evaluation, updates, resources), examples.labels, PRIOR) * len(updates)
        nothing = PRIOR / (1 + PRIOR)
        return _by_client(updates, ((weights - nothing) / (1 / 3 - nothing)).clamp(0, 1))

    return trust


def expguard(resources: Resources, engine: Engine, execution: Execution = Execution()) -> TrustRule:
    """ExpGuard (Roux, Zimmer, Pokutta, ICLR 2025): w_k ← w_k exp(−η o_k), without labels.

    o_k is a teacher's mean distance from the geometric median of all answers on the pool, as a share of the largest
    such distance. Scaled such that the most trusted client has 1. Deviations: their robust aggregate is another, and
    their weights have no lower bound.
    """
    if resources.pool is None:
        raise ValueError("this trust is found on unlabeled inputs, and there are none")
    evaluation = Evaluation(engine, some_inputs(resources.pool, ENOUGH // 2), execution)

    def trust(updates: Sequence[Update], before: Mapping[str, float]) -> Mapping[str, float]:
        had = torch.tensor([before[update.client_id] for update in updates], dtype=torch.float64).clamp_min(LEAST)
        scores = outlier_scores(_answers(evaluation, updates, resources), had / had.max())
        now = had * torch.exp(-LEARNING_RATE * scores / scores.max().clamp_min(1e-12))
        return {name: max(LEAST, value) for name, value in _by_client(updates, now).items()}

    return trust


def weigh_by_trust(rule: TrustRule, inner: Fusion) -> Fusion:
    """Return ``inner`` with every update marked by the trust in its client, which is remembered for the next round."""

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        remembered = server.memory.get(TRUST, {}).get("clients", {})
        before = {update.client_id: float(remembered.get(update.client_id, 1.0)) for update in updates}
        now = rule(updates, before) if updates else {}
        fused = inner(server, [replace(update, trust=now[update.client_id]) for update in updates], seed)
        kept = {**remembered, **{name: torch.tensor(value, dtype=torch.float64) for name, value in now.items()}}
        memory = {**fused.server.memory, TRUST: {"clients": kept}}
        notes = {**fused.notes, TRUST: {name: round(value, 4) for name, value in sorted(now.items())}}
        return replace(fused, server=replace(fused.server, memory=memory), notes=notes)

    return fuse


def some_inputs(inputs: Inputs, most: int) -> Inputs:
    """Return at most so many inputs, spread evenly over all."""
    return inputs if len(inputs) <= most else inputs.take(_spread(len(inputs), most))


def some_examples(examples: Examples, most: int = ENOUGH) -> Examples:
    """Return at most so many examples, spread evenly over all."""
    return examples if len(examples) <= most else examples.take(_spread(len(examples), most))


def _spread(n: int, most: int) -> Tensor:
    return torch.arange(most) * n // most


def _answers(evaluation: Evaluation, updates: Sequence[Update], resources: Resources) -> Tensor:
    """Return the clients' probabilities: clients × inputs × classes; one whose logits are not finite is refused."""
    answers = refuse_unusable(evaluation([teacher_of(update, resources.prototypes) for update in updates]))
    return torch.stack([resources.outputs.probabilities(answer.logits.to(torch.float64)) for answer in answers])


def _by_client(updates: Sequence[Update], weights: Tensor) -> dict[str, float]:
    scaled = weights / weights.max().clamp_min(1e-300)
    return {update.client_id: float(value) for update, value in zip(updates, scaled, strict=True)}
