"""Asking an ensemble: each teacher answers once for all inputs, and only one is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from feddf import evaluate
from feddf.outcomes import in_order
from feddf.recalibrate import recalibrate
from feddf.types import Engine, Failure, Inputs, Prototype, Refusal, State, Update, Vote

Average = Literal["logits", "probabilities", "losses"]


def avg_logits(teachers: Iterable[Tensor]) -> Tensor:
    """Return σ(1/|S| Σ_k f(x̂_k, d)), the target of AvgLogits (section 3 of the paper).

    The mean is uniform over the teachers, as in the paper: n_k weighs the averaged weights only.

    >>> avg_logits([torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]])])
    tensor([[0.5000, 0.5000]])
    """
    return combine(Vote(logits) for logits in teachers)


def combine(votes: Iterable[Vote], *, average: Average = "logits", temperature: float = 1.0) -> Tensor:
    """Return the class probabilities on which the teachers agree.

    ``logits``: σ(Σ_k w_k z_k / T Σ_k w_k), the paper's for w_k = 1 and T = 1.
    ``probabilities``: Σ_k w_k σ(z_k / T) / Σ_k w_k. Here one teacher with huge logits is one voice among others.
    ``losses``: the student minimises Σ_k w_k KL(σ(z_k / T) ‖ q) / Σ_k w_k. That is KL(p̄ ‖ q) for the averaged
    probabilities p̄, plus a term without q, so the gradient, and hence the target, is that of ``probabilities``.

    The sums run in float64 over a stream, so memory does not grow with the number of teachers.
    """
    total, weights = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    count = 0
    for vote in votes:
        opinion = vote.logits.to(torch.float64) / temperature
        if average != "logits":
            opinion = opinion.softmax(dim=-1)
        total, weights, count = total + vote.weight * opinion, weights + vote.weight, count + 1
    if not count:
        raise ValueError("an ensemble needs at least one teacher")
    mean = total / torch.where(weights > 0, weights, 1.0)  # a class for which nobody counts has a logit of zero
    if average == "logits":
        return mean.softmax(dim=-1).to(torch.float32)
    return (mean / mean.sum(dim=-1, keepdim=True)).to(torch.float32)  # weights per class leave the simplex


@dataclass(frozen=True)
class Question:
    """A teacher that is to answer. ``made`` ones were made by the server out of what clients sent.

    Their BatchNorm statistics belong to no data and are estimated again on the inputs, and nobody is refused for them.
    """

    id: str
    prototype: str
    state: State
    made: bool = False


@dataclass(frozen=True)
class Answer:
    """A teacher's logits for every input that it was asked about."""

    client_id: str
    logits: Tensor


def answer(question: Question, *, prototypes: Mapping[str, Prototype], inputs: Inputs) -> Answer:
    """Let one teacher, in eval mode, answer for all inputs."""
    teacher = prototypes[question.prototype].load(question.state)
    if question.made:
        recalibrate(teacher, inputs)
    return Answer(question.id, evaluate.logits(teacher, inputs))


def question(update: Update) -> Question:
    """Return the question to a client's model."""
    return Question(update.client_id, update.prototype, update.state)


def ask(engine: Engine, function: Callable[[Question], Answer], questions: Sequence[Question]) -> Iterator[Answer]:
    """Yield each teacher's answer, in the order of the questions.

    Finite weights can still give logits that are not. Once all have been asked, such clients are refused
    together, so that the round is fused again without them, in the average as well.
    """
    made = {question.id for question in questions if question.made}
    unfit: list[Failure] = []
    for outcome in in_order(engine(function, questions), [question.id for question in questions]):
        if isinstance(outcome, Failure):
            unfit.append(Failure(outcome.client_id, f"its model could not be asked: {outcome.reason}"))
        elif not bool(outcome.logits.isfinite().all()):
            unfit.append(Failure(outcome.client_id, "its model's logits are not finite"))
        else:
            yield outcome
    if refused := [failure for failure in unfit if failure.client_id not in made]:
        raise Refusal(refused)
