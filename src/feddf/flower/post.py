"""Messages out, replies in, over a Flower grid, such that no client can hold up the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import Thread

from flwr.app import Message
from flwr.serverapp import Grid

PULLED_AT_ONCE = 16
"""Replies held in memory at a time: a cohort of a thousand would not fit."""

Pulled = SimpleQueue[list[Message] | BaseException]


class Post:
    """A grid, with pulls that end.

    Flower pulls a reply that has been announced until all of it has been uploaded, for minutes or hours. A client that
    dies in mid-upload, or only pretends to begin one, would stop the server. So each pull runs in a thread and is left
    alone after ``patience`` seconds: what it was for is pulled one by one, and what comes late is not lost.
    """

    def __init__(self, grid: Grid, patience: float = 5.0) -> None:
        self.grid, self._patience = grid, patience
        self._slow: set[str] = set()
        self._stuck: dict[str, Pulled] = {}

    def nodes(self) -> set[int]:
        """Return the ids of the nodes that are connected."""
        return set(self.grid.get_node_ids())

    def push(self, message: Message) -> str | None:
        """Send one message; return its id, or ``None`` where it was not taken."""
        sent = [number for number in self.grid.push_messages([message]) if number]
        return sent[0] if sent else None

    def pull(self, asked: Sequence[str]) -> Iterator[Message]:
        """Yield the replies to these messages that are there, a few at a time; each of them once."""
        wanted = set(asked)
        for some in self._portions(asked):
            for reply in self._pulled(some):
                if reply.metadata.reply_to_message_id in wanted:
                    wanted.remove(reply.metadata.reply_to_message_id)
                    yield reply

    def _portions(self, asked: Sequence[str]) -> Iterator[list[str]]:
        usual = [number for number in asked if number not in self._slow]
        yield from (usual[first : first + PULLED_AT_ONCE] for first in range(0, len(usual), PULLED_AT_ONCE))
        yield from ([number] for number in asked if number in self._slow)

    def _pulled(self, some: list[str]) -> list[Message]:
        pulled = self._stuck.get(some[0])
        if pulled is None:
            pulled = SimpleQueue()
            Thread(target=_pull, args=(self.grid, some, pulled), daemon=True).start()
        try:
            found = pulled.get(timeout=0.0 if some[0] in self._stuck else self._patience)
        except Empty:
            self._set_aside(some, pulled)
            return []
        self._stuck.pop(some[0], None)
        if isinstance(found, BaseException):
            raise found
        return found

    def _set_aside(self, some: list[str], pulled: Pulled) -> None:
        """Remember whom a pull is stuck with: one alone waits for it; several are asked for again, one by one."""
        self._slow.update(some)
        if len(some) == 1:
            self._stuck[some[0]] = pulled


def _pull(grid: Grid, some: Collection[str], pulled: Pulled) -> None:
    try:
        pulled.put(list(grid.pull_messages(list(some))))
    except BaseException as error:  # it is raised where the replies are waited for
        pulled.put(error)
