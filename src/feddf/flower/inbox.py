"""Messages out, replies in, over a Flower grid, such that no client can hold up or end the server."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from queue import Empty, Queue
from threading import Thread

from flwr.app import Message
from flwr.serverapp import Grid

from feddf.flower.private import TRANSPORT_ERRORS, holds_whole_replies

THREADS = 16
"""Pulls at a time, and so the replies held in memory at a time: a cohort of a thousand would not fit."""

Arrived = Message | BaseException | None
"""What a pull brought: a reply, why there will be none, or nothing yet."""


class Inbox:
    """A grid, with pulls that end.

    Flower pulls a reply that has been announced until all of it has been uploaded, for minutes or hours. A client that
    dies in mid-upload, or only pretends to begin one, would stop the server. So each pull is for one message, in a
    thread, which is left alone once nothing has moved for ``patience`` seconds; what comes late is not lost. A reply is
    handed out by Flower once, so no message is pulled for by two threads.
    """

    def __init__(self, grid: Grid, patience: float = 5.0) -> None:
        self.grid, self._patience = grid, patience
        self._arrived: Queue[tuple[str, Arrived]] = Queue(THREADS)
        self._wanted: set[str] = set()
        self._pulling: set[str] = set()
        self._kept: dict[str, Message | Exception] = {}

    def nodes(self) -> set[int]:
        """Return the ids of the nodes that are connected."""
        return set(self.grid.get_node_ids())

    def push(self, message: Message) -> str | None:
        """Send one message; return its id, or ``None`` where it was not taken."""
        sent = [number for number in self.grid.push_messages([message]) if number]
        return sent[0] if sent else None

    def pull(self, asked: Sequence[str]) -> Iterator[tuple[str, Message | Exception]]:
        """Yield the replies to these messages that are there, each once, or the error under which one was not readable.

        An error of the transport itself is raised: it is nobody's fault among the clients.
        """
        if holds_whole_replies(self.grid):  # all at once: a lock is taken for every pull, and nothing can get stuck
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
            yield number, self._handed_out(number)
        own = set(asked)
        for number in self._arriving(begun):
            if number in own and number in self._kept:
                yield number, self._handed_out(number)
        while waiting:  # all threads are stuck; these are pulled next time
            self._pulling.discard(waiting.popleft())

    def forget(self, asked: Collection[str]) -> None:
        """Throw away what may still come for these messages."""
        self._wanted.difference_update(asked)
        for number in asked:
            self._kept.pop(number, None)

    def _handed_out(self, number: str) -> Message | Exception:
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
            if isinstance(found, BaseException) and (
                isinstance(found, TRANSPORT_ERRORS) or not isinstance(found, Exception)
            ):
                raise found
            if isinstance(found, Message | Exception) and number in self._wanted:
                self._kept[number] = found
                yield number

    def _work(self, waiting: deque[str]) -> None:
        while waiting:
            try:
                number = waiting.popleft()
            except IndexError:  # another thread took it
                return
            found = self._pulled(number)
            self._arrived.put((number, found if number in self._wanted or found is None else None))

    def _pulled(self, number: str) -> Arrived:
        try:
            replies = list(self.grid.pull_messages([number]))
        except BaseException as error:  # it is raised, or told, where the reply is waited for
            return error
        if not replies:
            return None
        if replies[0].metadata.reply_to_message_id != number:  # its sender wrote that
            return ValueError("it answers another message than the one that was asked for")
        return replies[0]
