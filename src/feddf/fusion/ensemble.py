"""Asking an ensemble: each teacher answers once for all inputs, and only one is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from feddf import evaluate
from feddf.outcomes import in_order
from feddf.types import Engine, Failure, Inputs, Prototype, Refusal, State, Update


def avg_logits(teachers: Iterable[Tensor]) -> Tensor:
    """Return σ(1/|S| Σ_k f(x̂_k, d)), the target of AvgLogits (section 3 of the paper).

    The mean is uniform over the teachers, as in the paper: n_k weighs the averaged weights only. The sum
    runs in float64 over a stream, so memory does not grow with the number of teachers.

    >>> avg_logits([torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]])])
    tensor([[0.5000, 0.5000]])
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    for logits in teachers:
        total, count = total + logits.to(torch.float64), count + 1
    if not count:
        raise ValueError("an ensemble needs at least one teacher")
    return (total / count).softmax(dim=-1).to(torch.float32)


@dataclass(frozen=True)
class Question:
    """A teacher that is to answer."""

    id: str
    prototype: str
    state: State


@dataclass(frozen=True)
class Answer:
    """A teacher's logits for every input that it was asked about."""

    client_id: str
    logits: Tensor


def answer(question: Question, *, prototypes: Mapping[str, Prototype], inputs: Inputs) -> Answer:
    """Let one teacher, in eval mode, answer for all inputs."""
    teacher = prototypes[question.prototype].load(question.state)
    return Answer(question.id, evaluate.logits(teacher, inputs))


def ask(engine: Engine, function: Callable[[Question], Answer], updates: Sequence[Update]) -> Iterator[Tensor]:
    """Yield each teacher's logits, in the order of the updates.

    Finite weights can still give logits that are not. Once all have been asked, such teachers are refused
    together, so that the round is fused again without them, in the average as well.
    """
    questions = [Question(update.client_id, update.prototype, update.state) for update in updates]
    unfit: list[Failure] = []
    for outcome in in_order(engine(function, questions), [question.id for question in questions]):
        if isinstance(outcome, Failure):
            unfit.append(Failure(outcome.client_id, f"its model could not be asked: {outcome.reason}"))
        elif not bool(outcome.logits.isfinite().all()):
            unfit.append(Failure(outcome.client_id, "its model's logits are not finite"))
        else:
            yield outcome.logits
    if unfit:
        raise Refusal(unfit)
