"""Algorithm 2: what a client does between receiving the server's weights and sending its own back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, cos, pi

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from feddf.batches import batches, device_copy
from feddf.config.sections import LocalConfig
from feddf.losses import channelwise
from feddf.models.small import Standardized
from feddf.runtime.device import device_of
from feddf.runtime.execution import Execution, forward_of
from feddf.seeds import derive, seed_torch, torch_generator
from feddf.states import init_state, state_of
from feddf.types import Augment, ClientHalf, Examples, Job, Prototype, Reply, Sent, Steps, Training


def local_update(
    job: Job,
    *,
    prototypes: Mapping[str, Prototype],
    train: Examples,
    local: LocalConfig,
    half: ClientHalf | None = None,
    augment: Augment | None = None,
    execution: Execution = Execution(),
) -> Reply:
    """Train on the client's own examples at a constant rate (no momentum, no decay): Algorithm 2.

    x ← x − η ∇ℓ(x; b) for every mini-batch b of P_k, for E epochs, or Adam's step. ``local.lr_schedule`` lets the rate
    fall to zero over the round's steps (the ablation of appendix C.3). The optimizer is new in every round. A client
    without examples sends back what it received, with n_k = 0. One that is sent no weights draws them by its seed.

    A ``half`` fills the open places: what happens to the model before it is trained, the loss, a correction of the
    gradient, and what is sent. Those of ``local.logit_adjustment`` and ``local.prox_mu`` (:func:`logit_adjustment`,
    :func:`proximal_term`) come after it.

    Args:
        job: the client, the weights and the payload that it is sent, and its seed.
        prototypes: the architectures by name; the client's own is built.
        train: the training examples, of which the client uses those at its indices.
        local: the section ``[local]``.
        half: what a method adds on the client's side.
        augment: changes raw batches before they are encoded.
        execution: device, precision and threads; what is sent is on the CPU.
    """
    indices = job.client.indices
    assert indices is not None, f"client {job.client.id} has no indices: its data are not here"
    with execution.begun() as device:
        prototype = prototypes[job.client.prototype]
        if not job.state:
            job = replace(job, state=init_state(prototype, job.seed))
        model = prototype.load(job.state, device).train()  # line 2
        steps = local.epochs * n_batches(len(indices), local.batch_size)
        shape = _shape(local.lr_schedule, steps)
        rates = sum(local.lr * shape(step) for step in range(steps))
        if job.client.known is not None:
            train = replace(train, outputs=train.outputs.knowing(job.client.known))
        training = Training(job, prototype, train.labels[indices], train.outputs, local.optimizer, steps, rates)
        places = combine_halves([half, *halves_of(local)])(model, training)
        losses = _train(model, indices, train, job.seed, local, shape, places, augment, execution)  # lines 3 to 5
        sent = places.finish() if places.finish else Sent()
        state = state_of(model, like=job.state) if sent.state is None else sent.state
        known = job.id, job.client.prototype, job.round, state, len(indices)
        metrics = {"train_loss": float(torch.stack(losses).mean())} if losses else {}
        return Reply(*known, metrics, sent.payload, sent.kept)  # line 6


def _train(
    model: nn.Module,
    indices: Tensor,
    train: Examples,
    seed: int,
    local: LocalConfig,
    shape: Callable[[int], float],
    places: Steps,
    augment: Augment | None,
    execution: Execution,
) -> list[Tensor]:
    """Take all steps; return the losses of the last epoch. No step waits for the device."""
    device, forward = device_of(model), forward_of(model, execution.compile, execution.precision)
    make = torch.optim.Adam if local.optimizer == "adam" else torch.optim.SGD
    optimizer = make(trained_weights(model), lr=local.lr)
    rates = LambdaLR(optimizer, shape) if local.lr_schedule != "none" else None
    shuffle = torch_generator(derive(seed, "shuffle"))
    distort = torch_generator(derive(seed, "augment"))
    labels = device_copy(train.labels, device)
    losses: list[Tensor] = []
    with seed_torch(derive(seed, "dropout"), device):
        for _ in range(local.epochs):  # line 3
            losses = []
            order = places.batches(indices) if places.batches else mini_batches(indices, local.batch_size, shuffle)
            for chosen, raw in batches(train.inputs.raw, order, device):  # line 4
                inputs = train.inputs.encode(augment(raw, distort) if augment else raw)
                outputs, wanted = forward(inputs), labels[chosen]
                loss = places.loss(outputs, wanted, inputs) if places.loss else train.outputs.loss(outputs, wanted)
                optimizer.zero_grad()
                loss.backward()
                if places.correct:
                    places.correct()
                optimizer.step()  # line 5
                if rates:
                    rates.step()
                losses.append(loss.detach())
    return losses


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that are not frozen."""
    return [weight for weight in model.parameters() if weight.requires_grad]


# Client halves


def halves_of(local: LocalConfig) -> list[ClientHalf]:
    """Return the halves that the section ``[local]`` asks for."""
    halves: list[ClientHalf] = [standardize]
    if local.logit_adjustment:
        halves.append(partial(logit_adjustment, tau=local.logit_adjustment))
    if local.prox_mu:
        halves.append(partial(proximal_term, mu=local.prox_mu))
    return halves


def combine_halves(halves: Sequence[ClientHalf | None]) -> ClientHalf:
    """Return several halves as one. They begin, correct and finish in the order given; ``None`` does nothing.

    At most one of them may set the loss, one the batches, and one the weights that are sent.
    """
    return partial(_begin_all, halves=tuple(half for half in halves if half))


def _begin_all(model: nn.Module, training: Training, *, halves: Sequence[ClientHalf]) -> Steps:
    begun = [half(model, training) for half in halves]
    losses = [one.loss for one in begun if one.loss]
    corrections = [one.correct for one in begun if one.correct]
    ends = [one.finish for one in begun if one.finish]
    batches = [one.batches for one in begun if one.batches]
    if max(len(losses), len(batches)) > 1:
        raise ValueError("two parts of the method change the clients' loss or batches; only one can")

    def correct() -> None:
        for change in corrections:
            change()

    def finish() -> Sent:
        sent = [end() for end in ends]
        states = [one.state for one in sent if one.state is not None]
        if len(states) > 1:
            raise ValueError("two parts of the method make the weights that clients send; only one can")
        payload = {name: state for one in sent for name, state in one.payload.items()}
        kept = {name: state for one in sent for name, state in one.kept.items()}
        return Sent(states[0] if states else None, payload, kept)

    places = losses[0] if losses else None, correct if corrections else None, finish if ends else None
    return Steps(*places, batches[0] if batches else None)


def proximal_term(model: nn.Module, training: Training, *, mu: float) -> Steps:
    """FedProx's half: the gradient of μ/2 ‖x − x_{t−1}‖² is added (appendix B; Li et al. 2018)."""
    weights = trained_weights(model)
    received = [weight.detach().clone() for weight in weights]

    def correct() -> None:
        for weight, origin in zip(weights, received, strict=True):
            if weight.grad is not None:
                weight.grad.add_(weight.detach() - origin, alpha=mu)

    return Steps(correct=correct)


def logit_adjustment(model: nn.Module, training: Training, *, tau: float) -> Steps:
    """Logit adjustment: the loss is the cross-entropy of f(x) + τ log((n_kc + ε) / n_k), ε = 0.001 n_k/M.

    The n_kc are the client's own class counts, which it keeps to itself (Menon et al. 2021; balanced softmax, Ren et
    al. 2020; FedLC, Zhang et al. 2022): the model that it sends estimates likelihoods, without the client's prior.
    """
    outputs = training.outputs
    assert outputs.channels is not None, "a client knows its classes"
    adjustment = (log_prior(training.labels, outputs.channels) * tau).to(device_of(model))
    adjustment = adjustment.view(-1, *[1] * len(outputs.positions))

    def loss(predictions: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
        return outputs.loss(predictions + adjustment, labels)

    return Steps(loss=loss)


def standardize(model: nn.Module, training: Training) -> Steps:
    """Let a network of values learn standardized values; other networks are left as they are.

    A model that was never trained takes the mean and deviation of the client's own labels; a trained one keeps its own.
    The loss is that of standardized values, so that a learning rate does not depend on their unit.
    """
    if not isinstance(model, Standardized):
        return Steps()
    outputs = training.outputs
    model.standardize(training.labels)

    def standard(values: Tensor) -> Tensor:
        return (values - channelwise(model.center, values)) / channelwise(model.scale, values)

    def loss(predictions: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
        means, spread = predictions[:, : model.channels], predictions[:, model.channels :]
        unit = spread - 2 * channelwise(model.scale, spread).log() if model.numbers > 1 else spread
        return outputs.loss(torch.cat([standard(means), unit], dim=1), standard(labels))

    return Steps(loss=loss)


def log_prior(labels: Tensor, n_classes: int) -> Tensor:
    """Return log((n_c + ε) / n) of each class c among n labels, ε = 0.001 n / M: finite for classes that do not occur.

    >>> log_prior(torch.tensor([0, 0, 1, 1]), 2)
    tensor([-0.6921, -0.6921])
    """
    there = labels[labels >= 0]
    n = max(1, len(there))
    counts = torch.bincount(there, minlength=n_classes).to(torch.float32)
    return ((counts + 0.001 * n / n_classes) / n).log()


def _shape(decay: str, steps: int) -> Callable[[int], float]:
    """Return the rate's schedule as a share of the first one: constant, or falling to zero over the round's steps."""
    shapes: dict[str, Callable[[int], float]] = {
        "none": lambda done: 1.0,
        "linear": lambda done: 1 - done / max(1, steps),
        "cosine": lambda done: (1 + cos(pi * done / max(1, steps))) / 2,
    }
    return shapes[decay]


def n_batches(n: int, size: int) -> int:
    """Return how many batches :func:`mini_batches` makes of n examples."""
    return ceil(n / size) - (1 if n > size and n % size == 1 else 0)


def mini_batches(indices: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices in random order, ``size`` at a time.

    A last batch of one example joins the batch before it: BatchNorm has no variance of a single value.
    """
    order = indices[torch.randperm(len(indices), generator=generator)]
    batches = list(order.split(size)) if len(order) else []
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    yield from batches
