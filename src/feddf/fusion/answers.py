"""Answers instead of weights: clients keep their models, and send these models' predictions for an agreed pool.

In a round the server sends the target of the last round, once there is one. A client continues from its own model, of
any architecture, learns from the target, then from its own examples, and sends its answers (predictions) for the pool.
The server combines them as it combines teachers, and distills its students from the result as FedDF does. Several
published methods are choices within this:

* FedMD (Li, Wang, arXiv 1910.03581): averaged logits, which clients approach by the mean absolute difference;
* DS-FL (Itahara et al., arXiv 2008.06180): averaged probabilities whose entropy is reduced (:func:`entropy_reduced`);
* Cronus (Chang et al., arXiv 1912.11279): a robust mean (:func:`feddf.robust.trust.cronus`).

Deviations from all three: the pool has no labels to begin with, it is the same in every round, and the server has
students. FD (:func:`label_means`) needs no pool: it sends one mean answer for each label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from feddf import evaluate
from feddf import types as t
from feddf.batches import batches
from feddf.evaluate import Teacher
from feddf.fusion.ensemble import CachedTargets, EnsembleTargets, MakeTargets, Memory, avg_probabilities
from feddf.outputs import Outputs, classes
from feddf.runtime.device import device_of
from feddf.scores import CHANNELS
from feddf.seeds import derive, seed_torch, torch_generator
from feddf.states import digest, state_of

ANSWERS, MEANS, OWN = "answers", "label means", "own model"  # their names in a payload, and in what a client keeps
LARGEST = 50.0  # of a centered logit: e⁻⁵⁰ is no probability
LARGEST_VALUE = 1e9  # of an answer that has a unit
SHARPNESS = 0.1  # DS-FL's temperature
KEPT: Any = {"keeps": True, "weights_down": False, "weights_up": False}  # of a part whose clients keep their models


def as_answers(raw: Tensor, outputs: Outputs) -> Tensor:
    """Return raw outputs as they travel: logits without what their softmax ignores, in half precision.

    >>> as_answers(torch.tensor([[3.0, 1.0]]), classes(2))
    tensor([[ 1., -1.]], dtype=torch.float16)
    """
    if outputs.has_units:
        return raw.detach().to("cpu", torch.float32)
    centered = outputs.center(raw, torch.ones(outputs.channels or raw.shape[CHANNELS], dtype=torch.bool).to(raw.device))
    return centered.detach().clamp(-LARGEST, LARGEST).to("cpu", torch.float16)


@dataclass(frozen=True)
class Digest:
    """How a client learns from the others' answers: passes over the pool with Adam, before its own examples."""

    epochs: int = 1
    lr: float = 1e-3
    batch_size: int = 128
    temperature: float = 1.0
    absolute: bool = False  # FedMD's mean absolute difference of logits, in place of the divergence

    def __call__(self, model: nn.Module, pool: t.Inputs, target: Tensor, outputs: Outputs, seed: int) -> None:
        """Draw a model towards the target, which is in the form of answers."""
        device, generator = device_of(model), torch_generator(derive(seed, "digest"))
        optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=self.lr)
        with seed_torch(derive(seed, "digest dropout"), device):
            for _ in range(self.epochs):
                order = torch.randperm(len(pool), generator=generator).split(self.batch_size)
                for chosen, raw in batches(pool.raw, [one for one in order if len(one) > 1], device):
                    wanted = target[chosen].to(device, torch.float32)
                    loss = self.distance(wanted, model(pool.encode(raw)), outputs)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    def distance(self, wanted: Tensor, raw: Tensor, outputs: Outputs) -> Tensor:
        """Return how far raw outputs are from answers."""
        if not self.absolute:
            return outputs.distance(outputs.probabilities(wanted), raw, self.temperature)
        known = torch.ones(wanted.shape[CHANNELS] // outputs.numbers, dtype=torch.bool, device=raw.device)
        return (outputs.center(raw, known) - wanted).abs().mean()


def answer_for_pool(model: nn.Module, training: t.Training, *, pool: t.Inputs, digest: Digest) -> t.Steps:
    """Continue from the client's own model, learn from the others' answers if there are any, and answer at the end."""
    job, outputs = training.job, training.outputs
    resume(model, job)
    if ANSWERS in job.payload:
        digest(model, pool, job.payload[ANSWERS]["outputs"], outputs, job.seed)

    def finish() -> t.Sent:
        answers = {"outputs": as_answers(evaluate.logits(model, pool), outputs)}
        return t.Sent({}, {ANSWERS: answers}, {OWN: state_of(model, job.state)})

    return t.Steps(finish=finish)


def resume(model: nn.Module, job: t.Job) -> None:
    """Load the weights that the client has kept, if it has any."""
    if OWN in job.kept:
        model.load_state_dict(dict(job.kept[OWN]))


def exchange_answers(resources: t.Resources, inputs: str = "", **told: bool | int | float | str) -> t.Part:
    """Return the part of a method by which clients send answers for the pool, and learn from those of all.

    ``told`` are fields of :class:`Digest`; ``inputs`` identifies the server's pool by a hash of up to 1,000 rows.
    """
    pool, outputs = resources.pool, resources.outputs
    if pool is None:
        raise ValueError("clients answer for an agreed pool, and there is none")
    some = pool.raw[torch.linspace(0, len(pool) - 1, min(len(pool), 1000), dtype=torch.float64).long()]
    ours = digest({f"{len(pool)} inputs": {"some": some}})
    if inputs not in ("", ours):
        raise ValueError("the agreed pool has other inputs here than on the server, or another order")
    most, dtype = (LARGEST_VALUE, torch.float32) if outputs.has_units else (LARGEST, torch.float16)
    form = {ANSWERS: {"outputs": t.TensorForm((len(pool), *outputs.shape), dtype, -most, most)}}
    half = partial(answer_for_pool, pool=pool, digest=Digest(**told))  # type: ignore[arg-type]
    return t.Part(half, send=send_target, form=lambda job: form, told={**told, "inputs": ours}, **KEPT)


def send_target(server: t.ServerState, client: t.Client) -> t.Payload:
    """Send the target of the last round, once there is one."""
    target = server.memory.get("ensemble", {}).get(ANSWERS)
    return {ANSWERS: target} if target else {}


def as_teacher(update: t.Update) -> Teacher:
    """Return a client's answers as a teacher with fixed predictions."""
    said = update.payload[ANSWERS]["outputs"].to(torch.float32)
    return Teacher(update.client_id, lambda *_: said, n_examples=update.n_examples, payload=update.payload)


def remember_target(ensemble: MakeTargets, outputs: Outputs) -> MakeTargets:
    """Return an ensemble whose target is remembered, so that clients can be sent it in the next round."""

    def ask(updates: Sequence[t.Update], seed: int, past: Memory) -> EnsembleTargets:
        taught = ensemble(updates, seed, past)
        assert isinstance(taught.targets, CachedTargets), "answers are for the whole pool"
        target = {"outputs": as_answers(outputs.raw(taught.targets.probabilities), outputs)}
        return replace(taught, memory={**taught.memory, ANSWERS: target})

    return ask


def entropy_reduced(
    votes: Iterable[t.WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()
) -> Tensor:
    """Return σ(p̄ / 0.1) of the averaged probabilities p̄: DS-FL's entropy reduction aggregation.

    >>> entropy_reduced([t.WeightedLogits(torch.zeros(1, 2)), t.WeightedLogits(torch.tensor([[1.0, 0.0]]))])
    tensor([[0.9097, 0.0903]])
    """
    return (avg_probabilities(votes, temperature, outputs) / SHARPNESS).softmax(dim=CHANNELS)


# FD: one mean answer for each label


def label_means(resources: t.Resources, gamma: float = 0.1) -> t.Part:
    """Return FD's part: the loss is ℓ(x) + γ H(Ĝ_{k,c}, σ(f(x))) for an example of label c.

    Ĝ_{k,c} is the mean of F_{j,c} over the other clients j, and F_{k,c} the mean of σ(f(x)) over client k's examples of
    label c in its steps of a round (Jeong et al., "Communication-Efficient On-Device Machine Learning", 2018). The
    server has no model that learns. Deviation: of clients that are absent in a round, the last F_{j,c} count.
    """
    outputs = resources.outputs
    if not outputs.counts_classes:
        raise ValueError(f"FD has a mean answer for each label, and the outputs are {outputs.title}")
    form = {MEANS: {"means": t.TensorForm((outputs.channels, outputs.channels), torch.float32, 0.0, 1 + 1e-3)}}
    known: Any = {"send": send_means, "form": lambda job: form, "told": {"gamma": gamma}, **KEPT}
    return t.Part(partial(follow_means, gamma=gamma), **known)


def _on_simplex(means: Tensor) -> Tensor:
    """Return rows that sum to one; a row of a label that the client does not have stays zero."""
    sums = means.sum(dim=1, keepdim=True)
    return torch.where(sums > 1e-6, means / sums.clamp_min(1e-6), 0.0)


def send_means(server: t.ServerState, client: t.Client) -> t.Payload:
    """Send the mean answer of all others for each label: zero for one that no other client has."""
    others = [one["means"] for name, one in sorted(server.memory.get(MEANS, {}).items()) if name != client.id]
    return {MEANS: {"means": _on_simplex(torch.stack(others).sum(dim=0))}} if others else {}


def follow_means(model: nn.Module, training: t.Training, *, gamma: float) -> t.Steps:
    """FD's half on the client."""
    job, outputs, device = training.job, training.outputs, device_of(model)
    resume(model, job)
    wanted = job.payload[MEANS]["means"].to(device) if MEANS in job.payload else None
    sums = torch.zeros(outputs.channels or 0, outputs.channels or 0, device=device)

    def loss(raw: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
        log_p = raw.float().log_softmax(dim=CHANNELS)
        sums.index_add_(0, labels, log_p.detach().exp())
        own = outputs.loss(raw, labels)
        return own if wanted is None else own - gamma * (wanted[labels] * log_p).sum(dim=CHANNELS).mean()

    def finish() -> t.Sent:
        return t.Sent({}, {MEANS: {"means": _on_simplex(sums).cpu()}}, {OWN: state_of(model, job.state)})

    return t.Steps(loss=loss, finish=finish)


def remember_means(server: t.ServerState, updates: Sequence[t.Update], seed: int) -> t.Fused:
    """FD's fusion: the server keeps each client's last means, and its models learn nothing."""
    means = {update.client_id: {"means": _on_simplex(update.payload[MEANS]["means"])} for update in updates}
    memory = {MEANS: {**server.memory.get(MEANS, {}), **means}}
    return t.Fused(replace(server.next(server.models), memory=memory), server.models)
