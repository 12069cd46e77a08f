"""How much each client counts: weights of teachers, and class counts that weight teachers and averages.

The paper's ensemble is uniform. A weighting of teachers is a function ``(teachers, resources, accuracies)`` that
returns a weight for every teacher, by its id; ``accuracies(teachers)`` measures them on the server's validation data.
Weights travel to workers, so those that are functions are functions of a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mode

import torch
from torch import Tensor, nn

from feddf.evaluate import Accuracies, Teacher
from feddf.fusion.average import average, trained
from feddf.runtime.device import accumulation_dtype
from feddf.scores import CHANNELS
from feddf.types import Form, Job, Part, Reply, Resources, Sent, State, Steps, TensorForm, Training, Update, Weight

CLASS_COUNTS = "class counts"  # what n_kc, the number of a client's examples of each class, is called in a payload


def uniform(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k = 1, as in the paper."""
    return {teacher.id: 1.0 for teacher in teachers}


def by_examples(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k = n_k, the number of examples that the teacher learned from."""
    return _positive({teacher.id: float(teacher.n_examples) for teacher in teachers})


def by_accuracy(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k = the teacher's accuracy on the server's validation data (another score, where it is above zero)."""
    return _positive({id: max(0.0, score) for id, score in accuracies(teachers).items()})


def _positive(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights, or equal ones where all are zero."""
    return dict(weights) if any(weights.values()) else dict.fromkeys(weights, 1.0)


def by_certainty(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k(d) = exp(−H(σ(z_k(d)))) for every sample d: one over the effective number of classes that it predicts."""
    return {teacher.id: certainty for teacher in teachers}


def certainty(logits: Tensor) -> Tensor:
    """Return exp(−H(σ(logits))) of each row, between 1/M and 1."""
    logs = logits.to(accumulation_dtype(logits.device)).log_softmax(dim=CHANNELS)
    return (logs.exp() * logs).sum(dim=CHANNELS, keepdim=True).exp()


def by_class_counts(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k(c) = n_kc, the number of examples of class c that the teacher learned from, where it discloses them.

    A teacher that does not is taken to have n_k / M of each; a class that no teacher has gets equal weights.
    """
    known = resources.validation.n_classes if resources.validation is not None else None
    n_classes = known or number_of_classes(teachers)
    if not n_classes:
        return by_examples(teachers, resources, accuracies)
    rows = torch.stack([counts_of(teacher, n_classes) for teacher in teachers])
    rows[:, rows.sum(dim=0) <= 0] = 1.0
    return {teacher.id: row for teacher, row in zip(teachers, rows, strict=True)}


# Class counts: the part by which clients tell them, and the average by them


def class_counts(resources: Resources) -> Part:
    """Return the part of a method that weighs or averages by n_kc."""
    return Part(half=tell, form=partial(form, n_classes=resources.outputs.channels), complaint=complaint)


def tell(model: nn.Module, training: Training) -> Steps:
    """Tell the server how many examples of each class the client has."""
    counts = torch.bincount(training.labels.flatten(), minlength=training.outputs.channels or 0)
    return Steps(finish=lambda: Sent(payload={CLASS_COUNTS: {"counts": counts}}))


def form(job: Job, *, n_classes: int | None) -> Form:
    """Ask for one count for each class; where the server does not know how many there are, the clients do."""
    most = 1e9  # beyond it a sum of counts could overflow and add up to anything
    return {CLASS_COUNTS: {"counts": TensorForm((n_classes,), torch.int64, 0, most)}}


def complaint(reply: Reply) -> str | None:
    """Return what is wrong with a client's counts: they must add up to its n_k."""
    total = int(reply.payload[CLASS_COUNTS]["counts"].sum())
    return None if total == reply.n_examples else f"its class counts do not add up to its n_k = {reply.n_examples}"


def told(client: Update | Teacher) -> Tensor | None:
    """Return the counts that a client told, if it did."""
    return client.payload[CLASS_COUNTS]["counts"] if CLASS_COUNTS in client.payload else None


def number_of_classes(clients: Sequence[Update | Teacher]) -> int:
    """Return the number of classes that more than half of the clients have counted; 0 where there is none.

    It is for a server that has no data to try a model on. Fewer clients must not say which layer is the last.
    """
    lengths = [len(counts) for client in clients if (counts := told(client)) is not None]
    usual = mode(lengths) if lengths else 0
    return usual if 2 * lengths.count(usual) > len(clients) else 0


def counts_of(client: Update | Teacher, classes: int) -> Tensor:
    """Return n_kc of every class c, or n_k / M where the client does not tell.

    They add up to n_k at the most, which may be less than the client said; a class may count for less than that as well
    (:func:`feddf.robust.defense.bounded_counts`).
    """
    counts = told(client)
    if counts is None or len(counts) != classes:
        return torch.full((classes,), client.n_examples / classes, dtype=torch.float64)
    total = int(counts.sum())
    return counts.to(torch.float64) * (client.n_examples / total if total > client.n_examples else 1.0)


def class_average(previous: State, updates: Sequence[Update]) -> State:
    """Return the average in which the last layer's row of class c is Σ n_kc x̂_kc / Σ n_kc: of those who have seen it.

    With a loss that is adjusted by a client's own class prior, the row of a class that the client lacks hardly moves,
    so that FedAvg's average of a rare class's row is mostly of untrained rows. All else, and the row of a class that no
    client has, is averaged as in :func:`average`. The last layer is the only linear one with a row and a bias for each
    class; where there are several, or none, it is averaged like the others.
    """
    averaged, used = average(previous, updates), trained(updates)
    n_classes = number_of_classes(used)
    layer = _last_layer(averaged, n_classes)
    if not layer:
        return averaged
    counts = torch.stack([counts_of(update, n_classes) for update in used])
    counts[:, counts.sum(dim=0) <= 0] = torch.tensor([[float(update.n_examples)] for update in used]).double()
    return {**averaged, **{key: _row_mean([update.state[key] for update in used], counts) for key in layer}}


def _last_layer(state: State, n_classes: int) -> tuple[str, ...]:
    """Return the names of the last layer's weight and bias, whatever order the state is in; none if that is unclear."""
    pairs = [(key, key.removesuffix("weight") + "bias") for key in state if key.endswith("weight")]
    layers = [
        (weight, bias)
        for weight, bias in pairs
        if bias in state and state[weight].ndim == 2 and len(state[weight]) == n_classes == state[bias].numel()
    ]
    return layers[0] if len(layers) == 1 else ()


def _row_mean(tensors: Sequence[Tensor], counts: Tensor) -> Tensor:
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, count in zip(tensors, counts, strict=True):
        total += tensor.to(torch.float64) * count.view(-1, *[1] * (tensor.ndim - 1))
    return (total / counts.sum(dim=0).view(-1, *[1] * (total.ndim - 1))).to(tensors[0].dtype)
