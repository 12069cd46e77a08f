"""Messages out, replies in, over a Flower grid, such that no client can hold up or end the server.

What is used of Flower and is not in its public interface is all here; tests/flower/test_private.py watches over it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from time import monotonic, sleep

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid
from httpx import HTTPError

from feddf.types import Failure, Job, Reply

THREADS = 16
"""Pulls at a time, and so the replies held in memory at a time: a cohort of a thousand would not fit."""

TRANSPORT_ERRORS = (HTTPError, OSError)
"""What Flower's grid raises when the SuperLink cannot be reached, after its own retries."""


def has_no_such_function(reply: Message) -> bool:
    """Say whether a client's app raised, as one without a function for a message's type does."""
    return reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION


class MessageQueue:
    """A grid, with pulls that end.

    Flower pulls a reply that has been announced until all of it has been uploaded, for minutes or hours. A client that
    dies in mid-upload, or only pretends to begin one, would stop the server. So each pull is for one message, in a
    thread, which is abandoned once nothing has moved for ``patience`` seconds; what comes late is not lost. A reply is
    handed out by Flower once, so no message is pulled for by two threads.
    """

    def __init__(self, grid: Grid, patience: float = 5.0) -> None:
        self.grid, self._patience = grid, patience
        self._arrived: Queue[tuple[str, Message | BaseException | None]] = Queue(THREADS)
        self._wanted: set[str] = set()
        self._pulling: set[str] = set()

    def push(self, message: Message) -> str | None:
        """Send one message; return its id, or ``None`` where it was not taken."""
        return next((number for number in self.grid.push_messages([message]) if number), None)

    def pull(self, asked: Collection[str]) -> Iterator[tuple[str, Message | Exception]]:
        """Yield the replies to these messages that are there, each once, or the error under which one was not readable.

        These are all that are still wanted: what comes for others is thrown away. An error of the transport itself is
        raised: no client has caused it.
        """
        if isinstance(self.grid, InMemoryGrid):  # a simulation's replies are whole, so no pull of all can get stuck
            for reply in self.grid.pull_messages(list(asked)) if asked else ():
                yield reply.metadata.reply_to_message_id, reply
            return
        self._wanted = set(asked)
        waiting = deque(number for number in asked if number not in self._pulling)
        begun = set(waiting)
        self._pulling |= begun
        for _ in range(min(THREADS, len(waiting))):
            Thread(target=self._work, args=(waiting,), daemon=True).start()
        with suppress(Empty):  # nothing moves any more
            while True:
                number, found = self._arrived.get(bool(begun), self._patience)
                begun.discard(number)
                self._pulling.discard(number)
                if isinstance(found, TRANSPORT_ERRORS) or not isinstance(found, Message | Exception | None):
                    raise found
                if found is not None and number in self._wanted:
                    yield number, found
        with suppress(IndexError):  # all threads are stuck; what they have left is pulled next time
            while True:
                self._pulling.discard(waiting.popleft())

    def forget(self) -> None:
        """Throw away what may still come."""
        self._wanted = set()

    def _work(self, waiting: deque[str]) -> None:
        """Pull for one message after the other, until another thread has taken the last."""
        with suppress(IndexError):
            while True:
                number = waiting.popleft()
                found = self._pull_one(number)
                self._arrived.put((number, found if number in self._wanted else None))

    def _pull_one(self, number: str) -> Message | BaseException | None:
        """Return what a pull brought: a reply, why there will be none, or nothing yet."""
        try:
            reply = next(iter(self.grid.pull_messages([number])), None)
            if reply is not None and reply.metadata.reply_to_message_id != number:  # its sender wrote that
                raise ValueError("it answers another message than the one that was asked for")
            return reply
        except BaseException as error:  # it is raised, or told, where the reply is waited for
            return error


def exchange(
    queue: MessageQueue,
    jobs: Sequence[Job],
    connected: Callable[[], Mapping[str, int]],
    message: Callable[[Job, int], Message],
    read: Callable[[Message | Exception, Job], Reply | Failure],
    deadline: float,
    wait: float,
    poll: float,
) -> Iterator[Reply | Failure]:
    """Send each job to its client's node; yield what comes back, and a failure for each client that has no answer.

    ``connected`` returns the node of every client that is connected now. One that is not has ``wait`` seconds to
    connect; all have ``deadline`` seconds to answer. Replies are told apart by the message that they answer: the error
    for a node that died names another sender.
    """
    began, wait = monotonic(), min(wait, deadline)
    absent = {job.id: job for job in jobs}
    asked: dict[str, Job] = {}
    while (absent or asked) and monotonic() - began < deadline:
        nodes = connected() if absent else {}
        here = [absent.pop(name) for name in list(absent) if name in nodes]
        for job in here:
            sent = queue.push(message(job, nodes[job.id]))
            if sent is None:
                yield Failure(job.id, f"its node {nodes[job.id]} could not be sent its job")
            else:
                asked[sent] = job
        while absent and monotonic() - began >= wait:
            yield Failure(absent.popitem()[0], f"it was not connected for {wait:g} s")
        answered = False
        for number, reply in queue.pull(list(asked)):
            job, answered = asked.pop(number), True
            yield read(reply, job)
        if not here and not answered:
            sleep(poll)
    queue.forget()
    for job in (*absent.values(), *asked.values()):
        yield Failure(job.id, f"no answer within {deadline:g} s")
