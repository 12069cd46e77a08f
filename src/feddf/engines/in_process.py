"""The simplest engine: one job after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from feddf import batches
from feddf.config.errors import first_line, reason
from feddf.runtime.device import is_out_of_memory, present, release_reserve, threads
from feddf.types import Failure, J, OutOfMemory, R


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
        if not is_out_of_memory(error):
            return Failure(job.id, reason(error))
        complaint = _too_much(error)
    batches.forget()  # after the error, which holds the tensors of the job
    release_reserve(*present())
    return OutOfMemory(job.id, complaint)


def _too_much(error: BaseException) -> str:
    data = batches.resident_bytes() / 2**20
    lower = (
        f"lower run.workers, local.batch_size or distill.batch_size; data that stay on the device take {data:.0f} MiB"
    )
    return f"the device's memory is full: {lower} ({first_line(error)})"
