"""What clients find when they try the fused model on data of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flwr.app import Message

from feddf.admit import MOST_EXAMPLES
from feddf.flower.wire import complaint_of, counted, unreadable
from feddf.types import Failure, Job

Found = tuple[int, Mapping[str, float]]
"""(number of examples, metrics)."""


def metrics_from(reply: Message, job: Job) -> Found | Failure:
    """Return what a client found, or why it cannot be used."""
    if reply.has_error():
        return Failure(job.id, complaint_of(reply))
    try:
        count, metrics = counted(next(iter(reply.content.metric_records.values())))
    except Exception as error:  # whatever a hostile record does when it is looked at, the round goes on
        return unreadable(job, error)
    if not 0 < count <= MOST_EXAMPLES or not all(math.isfinite(value) for value in metrics.values()):
        return Failure(job.id, "its metrics are not finite, or not of a number of examples")
    return count, metrics
