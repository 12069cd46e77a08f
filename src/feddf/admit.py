"""The gate: every update passes it before it is fused, whatever engine brought it and whoever sent it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from feddf.types import Failure, Job, State, Update

LARGEST = 1e5
"""No trained weight or running statistic comes near this; a scaled attack or a diverged client does."""

MOST_EXAMPLES = 10**9
_METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def admit(update: object, jobs: Mapping[str, Job]) -> Failure | None:
    """Return why an update may not be fused, or ``None`` if it may.

    ``jobs`` holds what each sampled client of this round was asked to do; it is also the manifest against
    which keys, shapes and dtypes are checked. The cheap checks come first, and nothing is computed with an
    update's values before its form is known to be right.
    """
    if not isinstance(update, Update):
        return Failure("unknown", f"not an update but a {type(update).__name__}")
    reason = _sender(update, jobs) or _form(update.state, jobs[update.client_id].state)
    reason = reason or _values(update.state) or _count(update, jobs[update.client_id]) or _metrics(update)
    return Failure(str(update.client_id), reason) if reason else None


def _sender(update: Update, jobs: Mapping[str, Job]) -> str | None:
    job = jobs.get(update.client_id) if isinstance(update.client_id, str) else None
    if job is None:
        return f"client {update.client_id!r:.80} was not sampled this round"
    if update.round != job.round:
        return f"stale: it belongs to round {update.round!r:.20}, and this is round {job.round}"
    if update.prototype != job.client.prototype:
        return f"prototype {update.prototype!r:.80} is not the client's, which is {job.client.prototype!r}"
    return None


def _form(state: State, manifest: State) -> str | None:
    if not isinstance(state, Mapping):
        return f"its state is a {type(state).__name__}, not a mapping"
    if len(state) != len(manifest) or state.keys() != manifest.keys():
        missing, extra = sorted(manifest.keys() - state.keys()), sorted(map(str, state.keys() - manifest.keys()))
        return f"keys differ from the prototype's: missing {missing[:3]}, unexpected {extra[:3]}"[:300]
    for key, expected in manifest.items():
        tensor = state[key]
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return f"{key} is not a dense tensor"
        if tensor.shape != expected.shape:
            return f"{key} has shape {tuple(tensor.shape)}, and its prototype {tuple(expected.shape)}"
        if tensor.dtype != expected.dtype:
            return f"{key} is {tensor.dtype}, and its prototype {expected.dtype}"
    return None


def _values(state: State) -> str | None:
    for key, tensor in state.items():
        if tensor.numel() == 0 or not tensor.is_floating_point():
            continue
        low, high = (float(value) for value in tensor.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"{key} has values that are not finite"
        if max(-low, high) > LARGEST:
            return f"{key} has a value of {max(-low, high):.3g}, and {LARGEST:.0e} is the most that is believed"
        if key.endswith("running_var") and low < 0:
            return f"{key} has a negative variance, {low:.3g}"
    return None


def _count(update: Update, job: Job) -> str | None:
    count = update.n_examples
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_EXAMPLES:
        return f"n_k = {count!r:.40} is not a number of examples (0 to {MOST_EXAMPLES:.0e})"
    known = job.client.indices
    if known is not None and count != len(known):
        return f"n_k = {count}, and the client holds {len(known)} examples"
    if known is None and count == 0:
        return "n_k = 0: it was not trained on anything"
    return None


def _metrics(update: Update) -> str | None:
    if not isinstance(update.metrics, Mapping) or len(update.metrics) > 100:
        return "its metrics are not a mapping of at most 100 names"
    for name, value in update.metrics.items():
        if not isinstance(name, str) or not _METRIC_NAME.fullmatch(name):
            return f"metric name {name!r:.80} is not made of letters, digits, '_', '.' and '-'"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"metric {name} is {value!r:.40}, not a finite number"
    return None
