"""Ensembles that a few hostile teachers cannot decide: trust in clients, kept over rounds, and robust targets.

A trust by name is a function ``(resources, engine, execution)`` that returns ``(updates, trust before) -> trust now``;
:data:`feddf.config.names.TRUSTS` lists them. Trust is at most 1; a client that is new has 1. A target here collects all
votes before it answers, since a median cannot be streamed: n teachers × inputs × classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from feddf.evaluate import Evaluation, spread, teacher_of
from feddf.fusion.ensemble import refuse_unusable
from feddf.outputs import Outputs, classes
from feddf.robust.rules import assumed
from feddf.runtime.device import accumulation_dtype
from feddf.runtime.execution import Execution
from feddf.scores import CHANNELS
from feddf.types import Engine, Examples, Fused, Fusion, Inputs, Resources, ServerState, Update, WeightedLogits

TrustRule = Callable[[Sequence[Update], Mapping[str, float]], Mapping[str, float]]
"""(updates, trust of these clients before) -> trust of these clients now."""

Given = TypeVar("Given", Inputs, Examples)

TRUST = "trust"  # what it is called in the server's memory and in the record
ENOUGH = 1024  # examples on which clients are tried: more cost time and say little more
PRIOR = 0.1  # the weight of the prior in :func:`mixture`, as a share of all examples
LEAST = 1e-6  # no trust of ExpGuard's falls below it: it would end at zero, and a cohort of such clients is no ensemble


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


def mixture(resources: Resources, engine: Engine, execution: Execution = Execution()) -> TrustRule:
    """Trust by the weights of the mixture that explains the server's validation examples best.

    See :func:`mixture_weights`. A client that explains nothing, whose weight is only what the prior gives it, is not
    trusted; from a third of an equal share on trust is full, since differences among honest clients are mostly chance.
    Earlier trust does not count: labeled examples are evidence enough.
    """
    examples = some(resources.labeled)
    if examples.outputs.likelihood is None:
        raise ValueError(f"this trust needs likelihoods, and '{examples.outputs.kind}' have none; use 'expguard'")
    evaluation = Evaluation(engine, examples.inputs, execution)

    def trust(updates: Sequence[Update], before: Mapping[str, float]) -> Mapping[str, float]:
        answers = _answers(evaluation, updates, resources)
        weights = mixture_weights(answers, examples.labels, PRIOR, outputs=examples.outputs) * len(updates)
        nothing = PRIOR / (1 + PRIOR)
        return _by_client(updates, ((weights - nothing) / (1 / 3 - nothing)).clamp(0, 1))

    return trust


def mixture_weights(
    probabilities: Tensor, labels: Tensor, prior: float = 0.1, steps: int = 200, outputs: Outputs = classes()
) -> Tensor:
    """Return how much each teacher counts in the mixture Σ_k w_k p_k(y | x) that fits labeled examples best.

    The weights maximize Σ_i log Σ_k w_k p_k(y_i | x_i) + (βN/K) Σ_k log w_k by expectation and maximization: a teacher
    counts by the examples that it explains better than others do. β is ``prior``: with it none is at zero. The
    function is concave, so there is one maximum, and hostile teachers can gain weight only by explaining the examples.

    >>> right, wrong = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.1, 0.9]])
    >>> mixture_weights(torch.stack([right, wrong]), torch.tensor([0]), steps=2000).round(decimals=2).tolist()
    [0.95, 0.05]
    """
    if outputs.likelihood is None:
        raise ValueError(f"the mixture's weights need likelihoods, and outputs of the kind '{outputs.kind}' have none")
    likely = torch.stack([outputs.likelihood(one, labels).to(torch.float64) for one in probabilities]).clamp_min(1e-12)
    count, n = likely.shape
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    for _ in range(steps):
        shares = weights[:, None] * likely
        explained = (shares / shares.sum(dim=0)).sum(dim=1)
        weights = (explained + prior * n / count) / (n + prior * n)
    return weights


def expguard(resources: Resources, engine: Engine, execution: Execution = Execution()) -> TrustRule:
    """ExpGuard (Roux, Zimmer, Pokutta, ICLR 2025): w_k ← w_k exp(−η o_k), without labels.

    o_k is a teacher's mean distance from the geometric median of all answers on the pool, as a share of the largest
    such distance, and η = 2. Scaled such that the most trusted client has 1. Deviations: their robust aggregate is
    another, and their weights have no lower bound.
    """
    if resources.pool is None:
        raise ValueError("this trust is found on unlabeled inputs, and there are none")
    evaluation = Evaluation(engine, some(resources.pool, ENOUGH // 2), execution)

    def trust(updates: Sequence[Update], before: Mapping[str, float]) -> Mapping[str, float]:
        had = torch.tensor([before[update.client_id] for update in updates], dtype=torch.float64).clamp_min(LEAST)
        answers = _channels_last(_answers(evaluation, updates, resources))
        weights = (had / had.max()).view(-1, *[1] * (answers.ndim - 2)).expand(answers.shape[:-1])
        off = (answers - _geometric_median(answers, weights)).abs()
        distances = off.sum(dim=-1).flatten(1).mean(dim=-1) / 2  # total variation, between 0 and 1
        now = had * torch.exp(-2.0 * distances / distances.max().clamp_min(1e-12))
        return {name: max(LEAST, value) for name, value in _by_client(updates, now).items()}

    return trust


def some(given: Given, most: int = ENOUGH) -> Given:
    """Return at most so many inputs or examples, spread evenly over all."""
    return given if len(given) <= most else given.take(spread(len(given), most))


def client_logits(evaluation: Evaluation, updates: Sequence[Update], resources: Resources) -> Iterator[Tensor]:
    """Yield the logits of each client's model; clients whose logits are not finite are refused."""
    asked = [teacher_of(update, resources.prototypes) for update in updates]
    return (answer.logits for answer in refuse_unusable(evaluation(asked)))


def _answers(evaluation: Evaluation, updates: Sequence[Update], resources: Resources) -> Tensor:
    """Return the clients' probabilities: clients × inputs × classes × positions."""
    found = client_logits(evaluation, updates, resources)
    return torch.stack([resources.outputs.probabilities(logits.to(torch.float64)) for logits in found])


def _by_client(updates: Sequence[Update], weights: Tensor) -> dict[str, float]:
    scaled = weights / weights.max().clamp_min(1e-300)
    return {update.client_id: float(value) for update, value in zip(updates, scaled, strict=True)}


def geometric_median(votes: Iterable[WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()) -> Tensor:
    """Return the geometric median of the teachers' probabilities for each input (Weiszfeld's iteration), weighted.

    A teacher's weights for classes are averaged over its own answer, those for other channels over the channels.
    """
    probabilities, weights = _stacked(votes, temperature, outputs)
    wide = (
        torch.as_tensor(weight, dtype=one.dtype, device=one.device).expand(one.shape)
        for weight, one in zip(weights, probabilities, strict=True)
    )
    if outputs.one_is_right:
        rows = [(weight * one).sum(dim=CHANNELS) for weight, one in zip(wide, probabilities, strict=True)]
    else:
        rows = [weight.mean(dim=CHANNELS) for weight in wide]
    return _geometric_median(_channels_last(probabilities), torch.stack(rows)).movedim(-1, CHANNELS).float()


def consensus(logits: Iterable[Tensor], outputs: Outputs = classes()) -> Tensor:
    """Return the labels that the geometric median of all answers predicts: for classes, its largest one."""
    return outputs.decide(geometric_median(map(WeightedLogits, logits), 1.0, outputs))


def _channels_last(answers: Tensor) -> Tensor:
    """Return teachers × inputs × channels × positions with the channels at the end."""
    return answers.movedim(CHANNELS + 1, -1)


def cronus(votes: Iterable[WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()) -> Tensor:
    """Return averaged probabilities without those that stand out (Cronus: Chang et al. 2019; Diakonikolas et al. 2017).

    For every input, f times: the teacher whose answer is farthest from the mean along the direction in which the
    answers differ most is left out. Teachers' weights are not used: the filter counts answers.
    """
    probabilities = _channels_last(_stacked(votes, temperature, outputs)[0])
    left = torch.ones_like(probabilities[..., 0])
    for _ in range(assumed(len(probabilities))):
        off = probabilities - _mean_of(probabilities, left)
        covariance = torch.einsum("k...,k...c,k...d->...cd", left, off, off)
        direction = torch.linalg.eigh(covariance).eigenvectors[..., -1]
        distance = (off * direction).sum(dim=-1).abs().masked_fill(left == 0, -1)
        left.scatter_(0, distance.argmax(dim=0, keepdim=True), 0.0)
    return _mean_of(probabilities, left).movedim(-1, CHANNELS).float()


def _stacked(
    votes: Iterable[WeightedLogits], temperature: float, outputs: Outputs
) -> tuple[Tensor, list[Tensor | float]]:
    """Return all teachers' probabilities (teachers × inputs × classes × positions), and their weights."""
    given = list(votes)
    if not given:
        raise ValueError("an ensemble needs at least one teacher")
    logits = (vote.logits.to(accumulation_dtype(vote.logits.device)) for vote in given)
    return torch.stack([outputs.probabilities(one / temperature) for one in logits]), [vote.weight for vote in given]


def _mean_of(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights[..., None]).sum(dim=0) / weights.sum(dim=0)[..., None].clamp_min(1e-30)


def _geometric_median(values: Tensor, weights: Tensor, steps: int = 30) -> Tensor:
    center = _mean_of(values, weights)
    for _ in range(steps):
        inverse = weights / (values - center).norm(dim=-1).clamp_min(1e-6)
        center = _mean_of(values, inverse)
    return center
