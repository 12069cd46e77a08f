"""What clients find when they try the fused model on data of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from flwr.app import Message

from feddf.admit import MOST_EXAMPLES
from feddf.engines.in_process import reason
from feddf.flower.wire import complaint_of, counted
from feddf.types import Failure, Job

Found = tuple[int, Mapping[str, float]]
"""(number of examples, metrics)."""


def metrics_from(reply: Message, job: Job) -> Found | Failure:
    """Return what a client found, or why it cannot be used."""
    if reply.has_error():
        return Failure(job.id, complaint_of(reply))
    try:
        count, metrics, _ = counted(next(iter(reply.content.metric_records.values())))
    except Exception as error:  # whatever a hostile record does when it is looked at, the round goes on
        return Failure(job.id, f"its reply could not be read: {reason(error)}"[:300])
    if not 0 < count <= MOST_EXAMPLES or not all(math.isfinite(value) for value in metrics.values()):
        return Failure(job.id, "its metrics are not finite, or not of a number of examples")
    return count, {name[:64]: float(value) for name, value in metrics.items()}


def weighted_mean(found: Sequence[Found]) -> Mapping[str, float]:
    """Return Σ n_k m_k / Σ n_k for every metric that all of them have."""
    if not found:
        return {}
    shared = set.intersection(*(set(metrics) for _, metrics in found))
    total = sum(count for count, _ in found)
    return {name: sum(count * metrics[name] for count, metrics in found) / total for name in sorted(shared)}
