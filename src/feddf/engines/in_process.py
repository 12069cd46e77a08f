"""The simplest engine: one job after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from feddf.config.errors import reason
from feddf.runtime.threads import threads
from feddf.types import Failure, J, R


def in_process(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
    """Run the jobs here, each on one torch thread. A job that raises becomes a failure."""
    for job in jobs:
        with threads(1):
            outcome = attempt(function, job)
        yield outcome


def attempt(function: Callable[[J], R], job: J) -> R | Failure:
    """Return the function's result, or the one-line reason why there is none."""
    try:
        return function(job)
    except (Exception, SystemExit) as error:  # a client that calls exit() does not end the server
        return Failure(job.id, reason(error))
