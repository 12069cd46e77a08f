"""The teachers as one ensemble: what a student should say to each input of the pool.

Teachers are frozen, so they are asked once a round for the whole pool and their answers remembered; or they are asked
again on each batch, as the pseudo code has it, which an augmented pool needs. :class:`Answers` hides the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from feddf.batches import resident
from feddf.config.errors import reason
from feddf.config.experiment import Settings
from feddf.config.names import TARGETS, TEACHER_WEIGHTS
from feddf.evaluate import Answer, Evaluation, Model, folded, model_of
from feddf.fusion.select import validation_accuracies
from feddf.fusion.swag import swag
from feddf.runtime.compile import Forward, forward_of
from feddf.runtime.device import is_out_of_memory, wide
from feddf.runtime.execution import of_answers
from feddf.types import Engine, Failure, Prototype, Refusal, Resources, State, Target, Update, Vote, Weight


def avg_logits(votes: Iterable[Vote], temperature: float = 1.0) -> Tensor:
    """Return σ(Σ_k w_k z_k / T Σ_k w_k), the paper's AvgLogits (section 3) for w_k = 1 and T = 1.

    >>> avg_logits([Vote(torch.tensor([[2.0, 0.0]])), Vote(torch.tensor([[0.0, 2.0]]))])
    tensor([[0.5000, 0.5000]])
    """
    return _mean((_widened(vote.logits) / temperature, vote.weight) for vote in votes).softmax(dim=-1).float()


def avg_probabilities(votes: Iterable[Vote], temperature: float = 1.0) -> Tensor:
    """Return Σ_k w_k σ(z_k / T) / Σ_k w_k. Here a teacher with huge logits counts no more than any other.

    A student that minimises the averaged loss Σ_k w_k KL(σ(z_k / T) ‖ q) / Σ_k w_k has the same target: that sum is
    KL(p̄ ‖ q) for the averaged probabilities p̄, plus a term without q.

    >>> avg_probabilities([Vote(torch.tensor([[900.0, 0.0]])), Vote(torch.tensor([[0.0, 0.0]]))])
    tensor([[0.7500, 0.2500]])
    """
    mean = _mean(((_widened(vote.logits) / temperature).softmax(dim=-1), vote.weight) for vote in votes)
    return (mean / mean.sum(dim=-1, keepdim=True)).float()  # weights per class leave the simplex


def _widened(logits: Tensor) -> Tensor:
    return logits.to(wide(logits.device))


def _mean(votes: Iterable[tuple[Tensor, Tensor | float]]) -> Tensor:
    """Return the weighted mean of a stream in float64, so that memory does not grow with the number of teachers."""
    total, weights = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    count = 0
    for values, weight in votes:
        if not count:
            total, weights = total.to(values), weights.to(values)
        total, weights, count = total + weight * values, weights + weight, count + 1
    if not count:
        raise ValueError("an ensemble needs at least one teacher")
    return total / torch.where(weights > 0, weights, 1.0)  # a class for which no teacher counts has a value of zero


class Answers(Protocol):
    """What a student should say: the class probabilities of a batch of the pool."""

    def __call__(self, chosen: Tensor, inputs: Tensor, /) -> Tensor:
        """Return the probabilities of the inputs at the indices ``chosen``, which are ``inputs`` once encoded."""
        ...


class Remembered:
    """Answers for the whole pool, computed once. They travel on the CPU and are looked up where the inputs are."""

    def __init__(self, probabilities: Tensor) -> None:
        self._probabilities = probabilities

    def __call__(self, chosen: Tensor, inputs: Tensor, /) -> Tensor:
        """Look the answers up."""
        return resident(self._probabilities, inputs.device)[chosen]


class AskedAgain:
    """Answers that the teachers give to each batch. It travels as weights; the models are built where the inputs are.

    On the CPU an unfit teacher is refused at once. On an accelerator that would mean to wait for it after every teacher
    of every batch: there the answers of a batch with an unfit teacher are NaN, so that the student cannot be used, and
    :meth:`refuse_unfit` says whose fault it is.
    """

    def __init__(
        self,
        teachers: Sequence[Model],
        weights: Mapping[str, Weight],
        target: Target,
        temperature: float,
        prototypes: Mapping[str, Prototype],
        precision: str = "float32",
    ) -> None:
        self._teachers, self._prototypes = teachers, prototypes
        self._weights, self._target, self._temperature = dict(weights), target, temperature
        self._precision = precision
        self._modules: dict[str, Forward] = {}
        self._fit: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, chosen: Tensor, inputs: Tensor, /) -> Tensor:
        """Ask every teacher."""
        if not self._modules:
            self._prepare(inputs.device)
        answers = (Answer(name, ask(inputs)) for name, ask in self._modules.items())
        if inputs.device.type == "cpu":
            return self._target(_votes(usable(answers), self._weights), self._temperature)
        found = self._target(_votes(self._noted(answers), self._weights), self._temperature)
        return found.where(torch.stack(list(self._fit.values())).all(), torch.nan)

    def _prepare(self, device: torch.device) -> None:
        for teacher in self._teachers:
            module = folded(self._loaded(teacher, device))
            self._modules[teacher.id] = forward_of(module, compile=False, precision=self._precision)
        self._weights = {
            name: weight.to(device, wide(device)) if isinstance(weight, Tensor) else weight
            for name, weight in self._weights.items()
        }

    def _noted(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        for answer in answers:
            fit = answer.logits.isfinite().all()
            self._fit[answer.client_id] = self._fit.get(answer.client_id, fit) & fit
            yield answer

    def refuse_unfit(self) -> None:
        """Raise :class:`Refusal` where some teacher's logits were not finite."""
        unfit = [name for name, fit in self._fit.items() if not fit]
        if unfit:
            raise Refusal([Failure(name, NOT_FINITE) for name in unfit])

    def _loaded(self, teacher: Model, device: torch.device) -> nn.Module:
        try:
            return self._prototypes[teacher.prototype].load(teacher.state, device)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise Refusal([Failure(teacher.id, f"its model could not be asked: {reason(error)}")]) from error


NOT_FINITE = "its model's logits are not finite"


EARLIER = "earlier answers"
"""What the ensemble of earlier rounds is called in the server's memory."""

Past = Mapping[str, State]
Ask = Callable[[Sequence[Update], int, Past], tuple[Answers, Past]]
"""Turns updates, a seed and what was remembered into the students' answers and what is to be remembered."""


def ensemble(resources: Resources, settings: Settings, engine: Engine) -> Ask:
    """Return what turns the clients' updates into the answers that students learn from.

    ``teachers.average`` and ``teachers.weights`` say how the teachers' logits become one answer; ``swag_samples`` more
    teachers are drawn from a Gaussian over the clients' models. Unfit teachers are refused. With ``teachers.memory``
    the ensemble of earlier rounds is one more teacher (see :class:`Earlier`).
    """
    config, temperature = settings.teachers, settings.distill.temperature
    if resources.pool is None:
        raise ValueError("an ensemble answers for an unlabeled pool, and there is none")
    if resources.augment is not None and config.ask == "once":
        raise ValueError("answers given once are for the pool as it is; an augmented one needs ask = 'each-batch'")
    if config.swag_samples and config.ask == "each-batch":
        raise ValueError("sampled teachers have statistics for the whole pool only; they need ask = 'once'")
    target: Target = TARGETS[config.average]
    weigh = TEACHER_WEIGHTS[config.weights]
    execution = of_answers(settings.run)
    accuracies = validation_accuracies(resources, engine, execution) if resources.validation else no_accuracies
    evaluation = Evaluation(engine, resources.prototypes, resources.pool, execution)

    def ask(received: Sequence[Update], seed: int, past: Past) -> tuple[Answers, Past]:
        updates = [update for update in received if update.teaches]
        sampled = swag(updates, seed, samples=config.swag_samples, scale=config.swag_scale)
        weights = weigh([*updates, *sampled], resources, accuracies)
        teachers = [*map(model_of, updates), *(replace(model_of(update), sampled=True) for update in sampled)]
        if config.ask == "each-batch":
            asked_again = AskedAgain(teachers, weights, target, temperature, resources.prototypes, execution.precision)
            return asked_again, {}
        drawn = {teacher.id for teacher in teachers if teacher.sampled}
        votes = _votes(usable(evaluation(teachers), drawn), weights)
        if not config.memory:
            return Remembered(target(votes, temperature)), {}
        earlier = Earlier(config.memory, temperature, past)
        probabilities = target(earlier.among(votes), temperature)
        return Remembered(probabilities), earlier.with_answers(probabilities)

    return ask


class Earlier:
    """The ensemble of earlier rounds as one more teacher: clients that are absent are heard through it.

    Its logits are T log p of the last round's answers p, and its weight is W_t = γ (W_{t−1} + Σ_k w_k). So the updates
    of s rounds ago count with γ^s; with weights by class, a class that no teacher of this round knows is left to those
    that knew it. The memory is as large as the answers for the pool, whatever the number of clients (FedSDD, arXiv
    2312.17029, keeps models instead).
    """

    def __init__(self, decay: float, temperature: float, past: Past) -> None:
        self._decay, self._temperature, self._past = decay, temperature, past.get(EARLIER)
        self._weights = torch.zeros((), dtype=torch.float64)

    def among(self, votes: Iterable[Vote]) -> Iterator[Vote]:
        """Yield the votes, and that of earlier rounds if there is one."""
        for vote in votes:
            self._weights = self._weights + torch.as_tensor(vote.weight, dtype=torch.float64)
            yield vote
        if self._past is not None:
            earlier = self._past["weights"].to(torch.float64)
            self._weights = self._weights + earlier
            yield Vote(self._past["logits"], earlier)

    def with_answers(self, probabilities: Tensor) -> Past:
        """Return what the next round is to remember."""
        logits = self._temperature * probabilities.clamp_min(torch.finfo(torch.float32).tiny).log()
        return {EARLIER: {"logits": logits, "weights": (self._decay * self._weights).float().contiguous()}}


def no_accuracies(updates: Sequence[Update]) -> Mapping[str, float]:
    """Refuse to measure clients where the server has no labelled data."""
    raise ValueError("these weights need validation data, and the server has none")


def usable(outcomes: Iterable[Answer | Failure], sampled: Iterable[str] = ()) -> Iterator[Answer]:
    """Yield the answers that can be used. Once all are in, clients whose answers cannot be are refused together.

    Finite weights can still give logits that are not. Then the round is fused again without these clients, in the
    average as well. A model that the server has ``sampled`` is nobody's fault and is left out.
    """
    unfit: list[Failure] = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            unfit.append(Failure(outcome.client_id, f"its model could not be asked: {outcome.reason}"))
        elif not bool(outcome.logits.isfinite().all()):
            unfit.append(Failure(outcome.client_id, NOT_FINITE))
        else:
            yield outcome
    blameless = set(sampled)
    if refused := [failure for failure in unfit if failure.client_id not in blameless]:
        raise Refusal(refused)


def _votes(answers: Iterable[Answer], weights: Mapping[str, Weight]) -> Iterator[Vote]:
    for one in answers:
        weight = weights[one.client_id]
        yield Vote(one.logits, weight(one.logits) if callable(weight) else weight)
