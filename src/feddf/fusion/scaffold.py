"""SCAFFOLD: control variates take the drift out of local steps (Karimireddy et al. 2020, option II)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from feddf import types as t
from feddf.states import is_statistic

CONTROL, LARGEST = "control", 1e3  # its name in a payload; and no mean gradient comes near that


def scaffold(resources: t.Resources) -> t.Part:
    """Return the part of a method by which client k steps along g(x) − c_k + c.

    After K steps at the rate η from x to y it keeps c_k⁺ = c_k − c + (x − y) / (K η) and sends Δc_k = c_k⁺ − c_k; the
    server's c ← c + Σ_k Δc_k / N, over the N clients of an architecture. The method it is added to fuses the models.
    """

    def around(inner: t.Fusion) -> t.Fusion:
        def fuse(server: t.ServerState, updates: Sequence[t.Update], seed: int) -> t.Fused:
            fused, now = inner(server, updates, seed), dict(server.memory.get(CONTROL, {}))
            for name in sorted({update.prototype for update in updates}):
                sent = [update.payload[CONTROL] for update in updates if update.prototype == name]
                n = max(len(sent), resources.n_clients(name) if resources.n_clients else 0)
                change = {key: torch.stack([one[key] for one in sent]).sum(dim=0) / n for key in sent[0]}
                now[name] = {key: now[name][key] + one if name in now else one for key, one in change.items()}
            return replace(fused, server=replace(fused.server, memory={**fused.server.memory, CONTROL: now}))

        return fuse

    return t.Part(half=follow, fuse=around, send=send, form=form, keeps=True)


def send(server: t.ServerState, client: t.Client) -> t.Payload:
    """Send the server's control variate, once there is one."""
    return {CONTROL: control} if (control := server.memory.get(CONTROL, {}).get(client.prototype)) else {}


def form(job: t.Job) -> t.Form:
    """Ask for a change of every weight's control variate."""
    state = {key: t.TensorForm(tuple(one.shape), one.dtype, -LARGEST, LARGEST) for key, one in job.state.items()}
    return {CONTROL: {key: one for key, one in state.items() if one.dtype.is_floating_point and not is_statistic(key)}}


def follow(model: torch.nn.Module, training: t.Training) -> t.Steps:
    """The client's half."""
    if training.optimizer != "sgd":
        raise ValueError(f"control variates are for steps of SGD, and local.optimizer is '{training.optimizer}'")
    job, weights = training.job, dict(model.named_parameters())
    nothing = {key: torch.zeros_like(job.state[key]) for key in form(job)[CONTROL]}
    if other := sorted(weights.keys() - nothing.keys()):
        raise ValueError(f"control variates are for plain weights, and '{other[0]}' is none (binarized clients)")
    server, own = job.payload.get(CONTROL, nothing), job.kept.get(CONTROL, nothing)
    drift = {key: (server[key] - own[key]).to(weight.device) for key, weight in weights.items()}

    def correct() -> None:
        for key, weight in weights.items():
            if weight.grad is not None:
                weight.grad.add_(drift[key])

    def finish() -> t.Sent:
        moved = {key: job.state[key] - weight.detach().cpu() for key, weight in weights.items() if training.steps}
        change = {key: moved[key] / training.rates - server[key] if key in moved else nothing[key] for key in nothing}
        return t.Sent(payload={CONTROL: change}, kept={CONTROL: {key: own[key] + change[key] for key in change}})

    return t.Steps(correct=correct, finish=finish)
