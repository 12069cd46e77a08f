"""Two parts of a method of your own: a client's loss (FedNTD), and teachers' weights from what clients send.

feddf run own_parts.toml      # fusion.parts and ensemble.weights name what is below as module:attribute
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import feddf
from feddf.evaluate import Accuracies, Teacher
from feddf.types import Form, Job, Part, Sent, Steps, TensorForm, Training, Weight


def fedntd(resources: feddf.Resources) -> Part:
    """FedNTD (Lee et al. 2022): KL(received ‖ own model), both without the true class, is added to the loss."""
    return Part(half=not_true)


def not_true(model: nn.Module, training: Training) -> Steps:
    received = training.prototype.load(training.job.state, next(model.parameters()).device)

    def loss(outputs: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            before = received(inputs)
        others = ~F.one_hot(labels, outputs.shape[1]).bool()
        mine, theirs = (z[others].view(len(labels), -1).log_softmax(dim=1) for z in (outputs, before))
        return F.cross_entropy(outputs, labels) + F.kl_div(mine, theirs, reduction="batchmean", log_target=True)

    return Steps(loss=loss)


STATISTICS = "input statistics"


def statistics(resources: feddf.Resources) -> Part:
    """Let every client send the mean and the variance of each of its input's numbers, beside its weights."""
    return Part(half=measure, form=form)


def form(job: Job) -> Form:
    one = TensorForm((None,), torch.float32, -1e6, 1e6)
    return {STATISTICS: {"mean": one, "variance": one}}


def measure(model: nn.Module, training: Training) -> Steps:
    seen: list[Tensor] = []
    hook = model.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach().flatten(1).cpu()))

    def finish() -> Sent:
        hook.remove()
        rows = torch.cat(seen) if seen else torch.zeros(1, 1)
        return Sent(payload={STATISTICS: {"mean": rows.mean(dim=0), "variance": rows.var(dim=0, correction=0)}})

    return Steps(finish=finish)


class Density:
    """w_k(x) = n_k p_k(x), as in FedGO (ICML 2025), with a Gaussian for the client's density p_k.

    It has a state of its own: the pool as numbers, which is read in the first round.
    """

    def __init__(self) -> None:
        self.pool: Tensor | None = None

    def __call__(
        self, teachers: Sequence[Teacher], resources: feddf.Resources, accuracies: Accuracies
    ) -> Mapping[str, Weight]:
        if self.pool is None:
            assert resources.pool is not None
            self.pool = resources.pool.batch(torch.arange(len(resources.pool))).flatten(1)
        logs = torch.stack([self.log_density(teacher) for teacher in teachers])
        weights = logs.softmax(dim=0)  # relative to the other teachers', for each input
        return {teacher.id: row[:, None] for teacher, row in zip(teachers, weights, strict=True)}

    def log_density(self, teacher: Teacher) -> Tensor:
        known = teacher.payload[STATISTICS]
        assert self.pool is not None
        squares = (self.pool - known["mean"]).square() / (known["variance"] + 0.1)
        logs: Tensor = -(squares + (known["variance"] + 0.1).log()).mean(dim=1) / 2  # the mean: images are correlated
        return logs + torch.tensor(float(max(1, teacher.n_examples))).log()


by_density = Density()
