"""Flower's clients as an engine: jobs are pushed to their nodes, and replies pulled as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic, sleep
from typing import Any, TypeVar, cast

from flwr.app import Message, MessageType

from feddf.flower import evaluation
from feddf.flower.inbox import Inbox
from feddf.flower.roster import Roster
from feddf.flower.settings import FlowerSettings, orders
from feddf.flower.wire import job_message, unreadable, update_from
from feddf.types import Client, Failure, J, Job, Part, R

Reply = TypeVar("Reply")
Connected = Callable[[], Mapping[str, int]]
"""Returns the node of every client that is connected now."""


class Sites:
    """The clients behind one grid. A client that is not connected has ``wait`` seconds to come."""

    def __init__(self, inbox: Inbox, roster: Roster, settings: FlowerSettings, wait: float, poll: float) -> None:
        self.inbox, self._roster, self._settings = inbox, roster, settings
        self._wait, self._poll = wait, poll
        self.parts: Sequence[Part] = ()
        self._gathered = False

    @property
    def clients(self) -> list[Client]:
        """The clients that are known so far."""
        return self._roster.clients

    def gather(self) -> None:
        """Wait, the first time, until the expected clients have introduced themselves."""
        if not self._gathered:
            clients = self._settings.clients
            self._roster.gather(
                self.inbox, expected=clients.number, quorum=clients.quorum, wait=self._wait, poll=self._poll
            )
            self._gathered = True

    def begin_round(self) -> None:
        """Look who is here before a round: newcomers join, and those that stay away are forgotten."""
        self.connected()
        self._roster.begin_round()

    def connected(self) -> dict[str, int]:
        """Return the node of each client that is connected now; newcomers join."""
        return self._roster.connected(self.inbox)

    def train(self, function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        """Let clients train by their own code, not by ``function``: this is an engine."""
        send = partial(
            job_message, orders=orders(self._settings), kind=MessageType.TRAIN, ttl=self._settings.clients.deadline
        )
        outcomes = self._exchange(cast(Sequence[Job], jobs), send, partial(update_from, parts=self.parts))
        yield from cast(Iterator[R | Failure], outcomes)

    def evaluate(self, jobs: Sequence[Job], config: Mapping[str, Any]) -> list[evaluation.Found | Failure]:
        """Let clients try models on their own data."""
        send = partial(job_message, orders=dict(config), kind=MessageType.EVALUATE, ttl=self._settings.clients.deadline)
        return list(self._exchange(jobs, send, evaluation.metrics_from))

    def _exchange(
        self, jobs: Sequence[Job], message: Callable[[Job, int], Message], read: Callable[[Message, Job], Reply]
    ) -> Iterator[Reply | Failure]:
        return exchange(
            self.inbox,
            jobs,
            self.connected,
            message=message,
            read=read,
            deadline=self._settings.clients.deadline,
            wait=self._wait,
            poll=self._poll,
        )


def exchange(
    inbox: Inbox,
    jobs: Sequence[Job],
    connected: Connected,
    *,
    message: Callable[[Job, int], Message],
    read: Callable[[Message, Job], Reply],
    deadline: float,
    wait: float,
    poll: float,
) -> Iterator[Reply | Failure]:
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
                sent = inbox.push(message(absent.pop(job.id), nodes[job.id]))
                if sent is None:
                    yield Failure(job.id, f"its node {nodes[job.id]} could not be sent its job")
                else:
                    asked[sent] = job
            elif monotonic() - began >= min(wait, deadline):
                yield Failure(absent.pop(job.id).id, f"it was not connected for {min(wait, deadline):g} s")
        for number, reply in inbox.pull(list(asked)):
            moved = True
            job = asked.pop(number)
            yield unreadable(job, reply) if isinstance(reply, Exception) else read(reply, job)
        if not moved:
            sleep(poll)
    inbox.forget(asked)
    for job in (*absent.values(), *asked.values()):
        yield Failure(job.id, f"no answer within {deadline:g} s")
