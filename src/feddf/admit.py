"""The gate: every update passes it before it is fused, from whatever engine and client it comes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from feddf.types import Failure, Form, Job, Part, Reply, State, TensorForm, Update

LARGEST = 1e4  # no trained weight or running statistic comes near this; a scaled attack or a diverged client does
MOST_EXAMPLES = 10**9
MOST_STEPS = 10**12
MOST_METRICS = 100
METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def admit(reply: object, jobs: Mapping[str, Job], parts: Sequence[Part] = ()) -> Update | Failure:
    """Return the update that a reply becomes, or why it may not be fused.

    ``jobs`` holds what each sampled client of this round was asked to do; it is also the manifest against
    which keys, shapes and dtypes are checked. Weights and payload must be what the method's ``parts`` ask for, no more.
    The cheap checks come first, and nothing is computed with values before their form is known to be right.
    """
    if not isinstance(reply, Reply):
        return Failure("unknown", f"not a reply but a {type(reply).__name__}")
    if not isinstance(reply.client_id, str) or reply.client_id not in jobs:
        return Failure("unknown", f"client {_shown(reply.client_id)} was not sampled this round")
    job = jobs[reply.client_id]
    try:
        reason = _sender(reply, job) or _weights(reply.state, job.state, weights_due(parts))
        reason = reason or _count(reply, job, parts) or _metrics(reply) or _payload(reply, job, parts)
    except Exception as error:  # whatever a hostile object does when it is looked at, the round goes on
        reason = f"it could not be checked: {type(error).__name__}"
    if reason:
        return Failure(reply.client_id, reason)
    known = reply.client_id, reply.prototype, reply.round, reply.state, reply.n_examples
    return Update(*known, reply.metrics, reply.payload)


def _sender(update: Reply, job: Job) -> str | None:
    if type(update.round) is not int or update.round != job.round:
        return f"stale: it belongs to round {_shown(update.round)}, and this is round {job.round}"
    if type(update.prototype) is not str or update.prototype != job.client.prototype:
        return f"prototype {_shown(update.prototype)} is not the client's, which is {job.client.prototype!r}"
    return None


def _shown(value: object) -> str:
    """Return a short picture of a value that may be anything."""
    try:
        return repr(value)[:60]
    except Exception:
        return f"a {type(value).__name__}"


def weights_due(parts: Sequence[Part]) -> bool:
    """Say whether clients send weights."""
    return all(part.weights_up for part in parts)


def _weights(state: State, manifest: State, due: bool) -> str | None:
    if due:
        return _form(state, manifest) or _values(state, manifest)
    return None if isinstance(state, Mapping) and len(state) == 0 else "it sent weights, which were not asked for"


def _form(state: State, manifest: State) -> str | None:
    if not isinstance(state, Mapping):
        return f"its state is a {type(state).__name__}, not a mapping"
    if complaint := different_keys(state.keys(), manifest):
        return complaint
    for key, expected in manifest.items():
        if wrong := _misshapen(state[key], tuple(expected.shape), expected.dtype):
            return f"{key} {wrong}"
    return None


def _misshapen(tensor: object, shape: tuple[int | None, ...], dtype: torch.dtype) -> str | None:
    """Return how a tensor differs in form from what was asked for; its values are not looked at."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return "is not a dense tensor in memory"
    if tensor.requires_grad:
        return "carries a gradient"
    sizes = zip(tensor.shape, shape, strict=False)
    if tensor.ndim != len(shape) or any(size not in (None, here) for here, size in sizes):
        return f"has shape {tuple(tensor.shape)}, not {shape}"
    return None if tensor.dtype == dtype else f"is {tensor.dtype}, not {dtype}"


def different_keys(keys: Collection[str], manifest: Mapping[str, object]) -> str | None:
    """Return how a state's keys differ from its prototype's, or ``None`` where they are the same."""
    if len(keys) > 2 * len(manifest) + 100:  # not worth looking through
        return f"keys differ from the prototype's: it has {len(manifest)}, and the update {len(keys)}"
    if len(keys) == len(manifest) and set(keys) == manifest.keys():
        return None
    missing, extra = sorted(manifest.keys() - set(keys)), sorted(map(str, set(keys) - manifest.keys()))
    return f"keys differ from the prototype's: missing {missing[:3]}, unexpected {extra[:3]}"[:300]


def _values(state: State, manifest: State) -> str | None:
    for key in manifest:  # not the sender's own list of names
        tensor = state[key]
        if tensor.numel() == 0:
            continue
        low, high = (float(value) for value in tensor.aminmax())
        if not tensor.is_floating_point():
            if low < 0 or high > MOST_STEPS:
                return f"{key} counts {high if high > MOST_STEPS else low:.3g}, not 0 to {MOST_STEPS:.0e}"
            continue
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"{key} has values that are not finite"
        if max(-low, high) > LARGEST:
            return f"{key} has a value of {max(-low, high):.3g}, and {LARGEST:.0e} is the most that is believed"
        if key.endswith("running_var") and low < 0:
            return f"{key} has a negative variance, {low:.3g}"
    return None


def _count(update: Reply, job: Job, parts: Sequence[Part]) -> str | None:
    count = update.n_examples
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_EXAMPLES:
        return f"n_k = {_shown(count)} is not a number of examples (0 to {MOST_EXAMPLES:.0e})"
    if not all(part.tells_count for part in parts):
        return None if count == 1 else f"n_k = {count}, which clients are to withhold: they say 1"
    known = job.client.indices
    if known is not None and count != len(known):
        return f"n_k = {count}, and the client holds {len(known)} examples"
    if known is None and count == 0:
        return "n_k = 0: it was not trained on anything"
    return None


def form_of(job: Job, parts: Sequence[Part]) -> Form:
    """Return what the reply to a job must hold beside the weights."""
    return {name: tensors for part in parts for name, tensors in part.form(job).items()}


def _payload(reply: Reply, job: Job, parts: Sequence[Part]) -> str | None:
    form, payload = form_of(job, parts), reply.payload
    if not isinstance(payload, Mapping) or set(payload) != set(form):
        asked = ", ".join(form) or "nothing"
        return f"its payload is {_shown(sorted(map(str, payload)))}, and it was asked for {asked}"
    for name, tensors in form.items():
        if not isinstance(payload[name], Mapping) or set(payload[name]) != set(tensors):
            return f"its payload '{name}' does not have the tensors {', '.join(sorted(tensors)[:5])}"
        for key, expected in tensors.items():
            if wrong := _unasked(payload[name][key], expected):
                return f"its payload '{name}': {key} {wrong}"
    return next((wrong for part in parts if (wrong := part.complaint(reply))), None)


def _unasked(tensor: Tensor, expected: TensorForm) -> str | None:
    """Return how a tensor of a payload differs from what was asked for, or ``None``."""
    if wrong := _misshapen(tensor, expected.shape, expected.dtype):
        return wrong
    if tensor.numel() > 10**9:  # its size may be the client's to say
        return f"has {tensor.numel()} values"
    if not tensor.numel():
        return None
    low, high = (float(value) for value in tensor.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)) or low < expected.least or high > expected.most:
        return f"has values from {low:.3g} to {high:.3g}, not {expected.least:.3g} to {expected.most:.3g}"
    return None


def _metrics(update: Reply) -> str | None:
    if not isinstance(update.metrics, Mapping) or len(update.metrics) > MOST_METRICS:
        return f"its metrics are not a mapping of at most {MOST_METRICS} names"
    for name, value in update.metrics.items():
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            return f"metric name {_shown(name)} is not made of letters, digits, '_', '.' and '-'"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"metric {name} is {_shown(value)}, not a finite number"
    return None
