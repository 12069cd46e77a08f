"""Messages out, replies in, over a Flower grid, such that no client can hold up or end the server.

What is used of Flower and is not in its public interface is all here; tests/flower/test_private.py watches over it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from queue import Empty, Queue
from threading import Thread
from time import monotonic, sleep
from typing import TypeVar

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid
from httpx import HTTPError

from feddf.flower.wire import unreadable
from feddf.types import Failure, Job

THREADS = 16
"""Pulls at a time, and so the replies held in memory at a time: a cohort of a thousand would not fit."""

TRANSPORT_ERRORS = (HTTPError, OSError)
"""What Flower's grid raises when the SuperLink cannot be reached, after its own retries."""

Pulled = Message | BaseException | None
"""What a pull brought: a reply, why there will be none, or nothing yet."""

R = TypeVar("R")


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
        self._arrived: Queue[tuple[str, Pulled]] = Queue(THREADS)
        self._wanted: set[str] = set()
        self._pulling: set[str] = set()
        self._kept: dict[str, Message | Exception] = {}

    def push(self, message: Message) -> str | None:
        """Send one message; return its id, or ``None`` where it was not taken."""
        sent = [number for number in self.grid.push_messages([message]) if number]
        return sent[0] if sent else None

    def pull(self, asked: Sequence[str]) -> Iterator[tuple[str, Message | Exception]]:
        """Yield the replies to these messages that are there, each once, or the error under which one was not readable.

        An error of the transport itself is raised: no client has caused it.
        """
        if isinstance(self.grid, InMemoryGrid):  # a simulation's replies are whole, so no pull of all can get stuck
            for reply in self.grid.pull_messages(list(asked)) if asked else ():
                yield reply.metadata.reply_to_message_id, reply
            return
        self._wanted.update(asked)
        waiting = deque(number for number in asked if number not in self._pulling and number not in self._kept)
        begun = set(waiting)
        self._pulling |= begun
        for _ in range(min(THREADS, len(waiting))):
            Thread(target=self._work, args=(waiting,), daemon=True).start()
        for number in [number for number in asked if number in self._kept]:
            yield number, self._take(number)
        own = set(asked)
        for number in self._arriving(begun):
            if number in own and number in self._kept:
                yield number, self._take(number)
        while waiting:  # all threads are stuck; these are pulled next time
            self._pulling.discard(waiting.popleft())

    def forget(self, asked: Collection[str]) -> None:
        """Throw away what may still come for these messages."""
        self._wanted.difference_update(asked)
        for number in asked:
            self._kept.pop(number, None)

    def _take(self, number: str) -> Message | Exception:
        self._wanted.discard(number)
        return self._kept.pop(number)

    def _arriving(self, begun: set[str]) -> Iterator[str]:
        """Keep what the threads bring, and yield whose it is, until all have brought something or nothing moves."""
        while True:
            try:
                number, found = self._arrived.get(timeout=self._patience) if begun else self._arrived.get_nowait()
            except Empty:
                return
            begun.discard(number)
            self._pulling.discard(number)
            if isinstance(found, TRANSPORT_ERRORS):
                raise found
            if isinstance(found, BaseException) and not isinstance(found, Exception):
                raise found
            if found is not None and number in self._wanted:
                self._kept[number] = found
                yield number

    def _work(self, waiting: deque[str]) -> None:
        while waiting:
            try:
                number = waiting.popleft()
            except IndexError:  # another thread took it
                return
            found = self._pull_one(number)
            self._arrived.put((number, found if number in self._wanted else None))

    def _pull_one(self, number: str) -> Pulled:
        try:
            replies = list(self.grid.pull_messages([number]))
        except BaseException as error:  # it is raised, or told, where the reply is waited for
            return error
        if not replies:
            return None
        if replies[0].metadata.reply_to_message_id != number:  # its sender wrote that
            return ValueError("it answers another message than the one that was asked for")
        return replies[0]


def exchange(
    queue: MessageQueue,
    jobs: Sequence[Job],
    connected: Callable[[], Mapping[str, int]],
    message: Callable[[Job, int], Message],
    read: Callable[[Message, Job], R],
    deadline: float,
    wait: float,
    poll: float,
) -> Iterator[R | Failure]:
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
            yield unreadable(job, reply) if isinstance(reply, Exception) else read(reply, job)
        if not here and not answered:
            sleep(poll)
    queue.forget(asked)
    for job in (*absent.values(), *asked.values()):
        yield Failure(job.id, f"no answer within {deadline:g} s")
