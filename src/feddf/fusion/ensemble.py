"""The teachers as one ensemble: the target for each input of the pool.

Teachers are frozen, so they predict the whole pool once a round and their predictions are cached; or they predict each
batch, as in the pseudocode, which an augmented pool needs. :data:`Targets` hides the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from feddf.batches import device_copy
from feddf.evaluate import Evaluation, Network, Predictions, Teacher, fold_batchnorm, teacher_of, weigh_known
from feddf.fusion.groups import Groups, deal, group_averages
from feddf.fusion.knowledge import told
from feddf.fusion.swag import swag
from feddf.outputs import Outputs, classes
from feddf.runtime.device import accumulation_dtype, is_out_of_memory
from feddf.runtime.execution import Execution, Forward, forward_of
from feddf.types import Engine, Failure, Inputs, Prototype, Refusal, State, Target, Update, Weight, WeightedLogits

Targets = Callable[[Tensor, Tensor], Tensor]
"""(indices of inputs of the pool, these inputs, encoded) -> the probabilities that a student should predict."""

Weigh = Callable[[Sequence[Teacher]], Mapping[str, Weight]]
"""Teachers -> how much each counts, by its id."""

Memory = Mapping[str, State]
"""What an ensemble remembers between rounds."""

EARLIER = "earlier answers"  # what the ensemble of earlier rounds is called in the server's memory
NOT_FINITE = "its model's logits are not finite"


def avg_logits(votes: Iterable[WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()) -> Tensor:
    """Return σ(Σ_k w_k z_k / T Σ_k w_k), the paper's AvgLogits (section 3) for w_k = 1 and T = 1.

    Args:
        votes: the logits z_k of each teacher with its weight w_k, as a stream.
        temperature: T, by which logits are divided.
        outputs: what the models' outputs mean.

    >>> avg_logits([WeightedLogits(torch.tensor([[2.0, 0.0]])), WeightedLogits(torch.tensor([[0.0, 2.0]]))])
    tensor([[0.5000, 0.5000]])
    """
    mean = _mean((_widened(vote.logits) / temperature, vote.weight) for vote in votes)
    return outputs.probabilities(mean).float()


def avg_probabilities(
    votes: Iterable[WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()
) -> Tensor:
    """Return Σ_k w_k σ(z_k / T) / Σ_k w_k. Here a teacher with huge logits counts no more than any other.

    A student that minimizes the averaged loss Σ_k w_k KL(σ(z_k / T) ‖ q) / Σ_k w_k has the same target: that sum is
    KL(p̄ ‖ q) for the averaged probabilities p̄, plus a term without q.

    Args:
        votes: the logits z_k of each teacher with its weight w_k, as a stream.
        temperature: T, by which logits are divided.
        outputs: what the models' outputs mean.

    >>> avg_probabilities([WeightedLogits(torch.tensor([[900.0, 0.0]])), WeightedLogits(torch.tensor([[0.0, 0.0]]))])
    tensor([[0.7500, 0.2500]])
    """
    mean = _mean((outputs.probabilities(_widened(vote.logits) / temperature), vote.weight) for vote in votes)
    return outputs.normalize(mean).float()


def _widened(logits: Tensor) -> Tensor:
    return logits.to(accumulation_dtype(logits.device))


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


@dataclass(frozen=True)
class CachedTargets:
    """Targets for the whole pool, computed once. They travel on the CPU and are looked up where the inputs are."""

    probabilities: Tensor

    def __call__(self, chosen: Tensor, inputs: Tensor, /) -> Tensor:
        """Look the probabilities up."""
        return device_copy(self.probabilities, inputs.device)[chosen]


@dataclass(frozen=True)
class Ensemble:
    """Teachers, and how their answers become one: it can be asked about any inputs."""

    teachers: tuple[Teacher, ...]
    combine: Target
    temperature: float = 1.0
    outputs: Outputs = classes()
    known: Tensor | None = None
    """Which channels some teacher knows; ``None``: all"""

    def __call__(self, answers: Iterable[Predictions]) -> Tensor:
        """Return the target that the teachers' answers, which come as a stream, stand for."""
        return self.target(self.votes(answers))

    def target(self, votes: Iterable[WeightedLogits]) -> Tensor:
        """Return the target that weighted answers stand for."""
        found = self.combine(votes, self.temperature, self.outputs)
        return found if self.known is None else self.outputs.forget(found, self.known)

    def votes(self, answers: Iterable[Predictions]) -> Iterator[WeightedLogits]:
        """Yield the answers with their teachers' weights."""
        known = {teacher.id: teacher for teacher in self.teachers}
        for one in answers:
            teacher = known[one.client_id]
            yield teacher.vote(one.logits, teacher.weight)


class OnlineTargets:
    """Targets that the teachers give for each batch. It travels as weights; the models are built where the inputs are.

    On the CPU an unfit teacher is refused at once. On an accelerator that would mean to synchronize after every teacher
    of every batch: there the targets of a batch with an unfit teacher are NaN, so that the student cannot be used, and
    :meth:`refuse_unfit` names the teacher.
    """

    def __init__(self, ensemble: Ensemble, precision: str = "float32") -> None:
        self._ensemble, self._precision = ensemble, precision
        self._modules: dict[str, Forward] = {}
        self._fit: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, chosen: Tensor, inputs: Tensor, /) -> Tensor:
        """Ask every teacher."""
        if not self._modules:
            self._prepare(inputs.device)
        answers = (Predictions(name, ask(inputs)) for name, ask in self._modules.items())
        if inputs.device.type == "cpu":
            return self._ensemble(refuse_unusable(answers))
        found = self._ensemble(self._noted(answers))
        return found.where(torch.stack(list(self._fit.values())).all(), torch.nan)

    def _prepare(self, device: torch.device) -> None:
        moved: list[Teacher] = []
        for teacher in self._ensemble.teachers:
            self._modules[teacher.id] = self._forward(teacher, device)
            weight = teacher.weight
            on_device = weight.to(device, accumulation_dtype(device)) if isinstance(weight, Tensor) else weight
            moved.append(replace(teacher, weight=on_device))
        self._ensemble = replace(self._ensemble, teachers=tuple(moved))

    def _forward(self, teacher: Teacher, device: torch.device) -> Forward:
        network = teacher.predict
        assert isinstance(network, Network), "only weights can be asked for each batch"
        try:
            module = fold_batchnorm(network.prototype.load(network.state, device))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            raise Refusal([Failure(teacher.id, f"its model could not be asked: {why}"[:300])]) from error
        return forward_of(module, compile=False, precision=self._precision)

    def _noted(self, answers: Iterable[Predictions]) -> Iterator[Predictions]:
        for answer in answers:
            fit = answer.logits.isfinite().all()
            self._fit[answer.client_id] = self._fit.get(answer.client_id, fit) & fit
            yield answer

    def refuse_unfit(self) -> None:
        """Raise :class:`Refusal` where some teacher's logits were not finite."""
        if unfit := [Failure(name, NOT_FINITE) for name, fit in self._fit.items() if not fit]:
            raise Refusal(unfit)


@dataclass(frozen=True)
class EnsembleTargets:
    """The targets of a round, the ensemble that they are of, and what is to be remembered.

    Without an ``ensemble`` the targets are known for the pool only, and ``why`` says for what reason.
    """

    targets: Targets
    ensemble: Ensemble | None
    memory: Memory
    why: str = ""


MakeTargets = Callable[[Sequence[Update], int, Memory], EnsembleTargets]
"""(updates, seed, what was remembered) -> what students learn from."""


def make_ensemble(
    prototypes: Mapping[str, Prototype],
    pool: Inputs,
    engine: Engine,
    *,
    combine: Target = avg_logits,
    weigh: Weigh | None = None,
    temperature: float = 1.0,
    outputs: Outputs = classes(),
    each_batch: bool = False,
    memory: float = 0.0,
    groups: int = 0,
    swag_samples: int = 0,
    swag_scale: float = 0.5,
    as_teacher: Callable[[Update], Teacher] | None = None,
    execution: Execution = Execution(),
) -> MakeTargets:
    """Return what turns the clients' updates into the targets that students learn from (line 14 of Algorithm 3).

    Args:
        prototypes: the architectures of the clients' models.
        pool: the unlabeled inputs.
        engine: where teachers are asked.
        combine: how the teachers' logits become class probabilities.
        weigh: how much each teacher counts; all count alike if it is left out.
        temperature: T, by which logits are divided before they become probabilities.
        outputs: what the models' outputs mean.
        each_batch: ask the teachers for each batch, not once for the whole pool.
        memory: γ; with it the ensemble of earlier rounds is one more teacher (:class:`PastEnsemble`).
        groups: with it, the averages of so many groups of each prototype's clients teach, and not the clients.
        swag_samples: how many further teachers are drawn from a Gaussian over the clients' models.
        swag_scale: the factor of that Gaussian's covariance.
        as_teacher: makes a teacher of an update that has no weights but answers for the pool.
        execution: how models are executed.

    Unfit teachers are refused.
    """
    if swag_samples and each_batch:
        raise ValueError("sampled teachers have statistics for the whole pool only, not for each batch")
    evaluation = Evaluation(engine, pool, execution)

    def ask(received: Sequence[Update], seed: int, past: Memory) -> EnsembleTargets:
        updates = [update for update in received if update.teaches]
        believed = [update for update in updates if update.trust >= 0.5]  # none is drawn from a client in doubt
        sampled = swag(believed or updates, seed, samples=swag_samples, scale=swag_scale)
        dealt = deal(updates, groups, seed) if groups else {}
        make = as_teacher or partial(teacher_of, prototypes=prototypes)
        teachers = _teachers(group_averages(dealt) if groups else updates, sampled, make, weigh)
        made: Groups = {**{update.client_id: () for update in sampled}, **dealt}
        ensemble = knowing(Ensemble(teachers, combine, temperature, outputs))
        for_pool = any(isinstance(one.weight, Tensor) and one.weight.ndim > 1 for one in teachers)
        if each_batch:
            if for_pool:
                raise ValueError("weights for each input of the pool need predictions for the whole pool")
            return EnsembleTargets(OnlineTargets(ensemble, execution.precision), ensemble, {})
        again = evaluation  # of the clients of a group whose average has no usable answers
        votes = ensemble.votes(
            refuse_unusable(evaluation(teachers), made, lambda some: again([make(one) for one in some]))
        )
        earlier = PastEnsemble(memory, temperature, past, outputs)
        probabilities = ensemble.target(earlier.among(votes))
        why = "the teachers' weights are known for the pool only" if for_pool else ""
        why = "clients' answers are known for the pool only" if as_teacher else why
        why = "earlier rounds' answers are known for the pool only" if memory and past else why
        remembered = earlier.with_answers(probabilities) if memory else {}
        return EnsembleTargets(CachedTargets(probabilities), None if why else ensemble, remembered, why)

    return ask


def _teachers(
    updates: Sequence[Update], sampled: Sequence[Update], teacher: Callable[..., Teacher], weigh: Weigh | None
) -> tuple[Teacher, ...]:
    """Return received and sampled models as teachers, whose weights are multiplied by the trust in their clients."""
    asked = [*(teacher(update) for update in updates), *(teacher(update, sampled=True) for update in sampled)]
    weights = weigh(asked) if weigh else {teacher.id: 1.0 for teacher in asked}
    trust = {update.client_id: update.trust for update in (*updates, *sampled)}
    return tuple(replace(one, weight=_trusted(weights[one.id], trust[one.id])) for one in asked)


def knowing(ensemble: Ensemble) -> Ensemble:
    """Return an ensemble in which a teacher does not count for channels that it has told it does not know."""
    known = {one.id: mask for one in ensemble.teachers if (mask := told(one)) is not None}
    votes = {id: partial(weigh_known, outputs=ensemble.outputs, known=mask) for id, mask in known.items()}
    teachers = tuple(replace(one, vote=votes.get(one.id, one.vote)) for one in ensemble.teachers)
    some = torch.stack(list(known.values())).any(dim=0) if len(known) == len(teachers) > 0 else None
    return replace(ensemble, teachers=teachers, known=None if some is None or bool(some.all()) else some)


def _trusted(weight: Weight, trust: float) -> Weight:
    return partial(_doubted, weight=weight, trust=trust) if callable(weight) else weight * trust


def _doubted(logits: Tensor, *, weight: Callable[[Tensor], Tensor], trust: float) -> Tensor:
    return weight(logits) * trust


class PastEnsemble:
    """The ensemble of earlier rounds as one more teacher: through it absent clients still count.

    Its logits are T log p of the last round's answers p, and its weight is W_t = γ (W_{t−1} + Σ_k w_k). So the updates
    of s rounds ago count with γ^s; with weights by class, a class that no teacher of this round knows is left to those
    that knew it. The memory is as large as the answers for the pool, whatever the number of clients (FedSDD, arXiv
    2312.17029, keeps models instead).
    """

    def __init__(self, decay: float, temperature: float, past: Memory, outputs: Outputs = classes()) -> None:
        self._outputs = outputs
        self._decay, self._temperature, self._past = decay, temperature, past.get(EARLIER) if decay else None
        self._weights = torch.zeros((), dtype=torch.float64)

    def among(self, votes: Iterable[WeightedLogits]) -> Iterator[WeightedLogits]:
        """Yield the votes, and that of earlier rounds if there is one."""
        for vote in votes:
            self._weights = self._weights + torch.as_tensor(vote.weight, dtype=torch.float64)
            yield vote
        if self._past is not None:
            earlier = self._past["weights"].to(torch.float64)
            self._weights = self._weights + earlier
            yield WeightedLogits(self._past["logits"], earlier)

    def with_answers(self, probabilities: Tensor) -> Memory:
        """Return what the next round is to remember."""
        logits = self._temperature * self._outputs.raw(probabilities)
        return {EARLIER: {"logits": logits, "weights": (self._decay * self._weights).float().contiguous()}}


def refuse_unusable(
    outcomes: Iterable[Predictions | Failure],
    made: Mapping[str, Sequence[Update]] = {},
    again: Callable[[Sequence[Update]], Iterable[Predictions | Failure]] = lambda members: (),
) -> Iterator[Predictions]:
    """Yield the answers that can be used. Once all are in, clients whose answers cannot be are refused together.

    Finite weights can still give logits that are not. Then the round is fused again without these clients, in the
    average as well. A model that the server has ``made`` of clients is left out, and these are asked ``again``: a
    sample was made of none in particular.
    """
    unfit: list[Failure] = []
    for outcome in outcomes:
        if isinstance(outcome, Predictions) and _is_usable(outcome):
            yield outcome
        else:
            unfit.append(_why_unusable(outcome))
    refused = [failure for failure in unfit if failure.client_id not in made]
    members = [one for failure in unfit for one in made.get(failure.client_id, ())]
    for outcome in again(members) if members else ():
        if isinstance(outcome, Failure) or not _is_usable(outcome):
            refused.append(_why_unusable(outcome))
    if refused:
        raise Refusal(refused)


def _is_usable(outcome: Predictions) -> bool:
    return bool(outcome.logits.isfinite().all())


def _why_unusable(outcome: Predictions | Failure) -> Failure:
    why = f"its model could not be asked: {outcome.reason}" if isinstance(outcome, Failure) else NOT_FINITE
    return Failure(outcome.client_id, why)
