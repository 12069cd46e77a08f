"""Jobs over a Flower grid: pushed to the nodes, their replies pulled as they come, each under its own client's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import TypeVar

from flwr.app import Message

from feddf.flower.post import Post
from feddf.flower.wire import unreadable
from feddf.types import Failure, Job

R = TypeVar("R")
Connected = Callable[[], Mapping[str, int]]
"""Returns the node of every client that is connected now."""


def exchange(
    post: Post,
    jobs: Sequence[Job],
    connected: Connected,
    *,
    message: Callable[[Job, int], Message],
    read: Callable[[Message, Job], R],
    deadline: float,
    wait: float,
    poll: float,
) -> Iterator[R | Failure]:
    """Send each job to its client's node; yield what comes back, and a failure for each client that has no answer.

    A client that is not connected has ``wait`` seconds to come; all have ``deadline`` seconds to answer. Replies are
    told apart by the message that they answer: the error for a node that died names another sender.
    """
    began = monotonic()
    absent = {job.id: job for job in jobs}
    asked: dict[str, Job] = {}
    while (absent or asked) and monotonic() - began < deadline:
        moved = False
        nodes = connected() if absent else {}
        for job in list(absent.values()):
            if job.id in nodes:
                moved = True
                sent = post.push(message(absent.pop(job.id), nodes[job.id]))
                if sent is None:
                    yield Failure(job.id, f"its node {nodes[job.id]} could not be sent its job")
                else:
                    asked[sent] = job
            elif monotonic() - began >= min(wait, deadline):
                yield Failure(absent.pop(job.id).id, f"it was not connected for {min(wait, deadline):g} s")
        for number, reply in post.pull(list(asked)):
            moved = True
            job = asked.pop(number)
            yield unreadable(job, reply) if isinstance(reply, Exception) else read(reply, job)
        if not moved:
            sleep(poll)
    post.forget(asked)
    for job in (*absent.values(), *asked.values()):
        yield Failure(job.id, f"no answer within {deadline:g} s")
