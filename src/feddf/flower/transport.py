"""Messages out, replies in, over a Flower grid, such that no client can hold up or end the server.

What is used of Flower and is not in its public interface is all here; tests/flower/test_private.py watches over it.

A node's id is Flower's and means nothing (in a simulation it is new in every run), so a client has a name, by which it
is sampled and seeded. It is asked for it, once, when it is first seen. The registry of names is on disk, so that a
server that was killed knows its clients before they reconnect.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import monotonic, sleep

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid
from httpx import HTTPError

from feddf.config import ClientsConfig
from feddf.config.errors import reason
from feddf.config.foreign import parse_json, validated
from feddf.flower.wire import CONFIG, complaint_of, printable
from feddf.rounds import QuorumError
from feddf.runtime.atomic import read_regular, write_atomically
from feddf.types import Client, Failure, Job, Reply

THREADS = 16
"""Pulls at a time, and so the replies held in memory at a time: a cohort of a thousand would not fit."""

UNNAMED = "node-"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ASK_AGAIN = 60.0  # seconds after which a node is asked again that did not answer, or not as it should
FORGET_AFTER = 3  # rounds in a row without a connection after which a client is forgotten, until it returns
_log = logging.getLogger("flwr")


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
                # Flower's grid raises the first two when the SuperLink cannot be reached, after its own retries
                if isinstance(found, HTTPError | OSError) or not isinstance(found, Message | Exception | None):
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
                found: Message | BaseException | None
                try:
                    found = next(iter(self.grid.pull_messages([number])), None)
                    if found is not None and found.metadata.reply_to_message_id != number:  # its sender wrote that
                        found = ValueError("it answers another message than the one that was asked for")
                except BaseException as error:  # it is raised, or told, where the reply is waited for
                    found = error
                self._arrived.put((number, found if number in self._wanted else None))


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
            if sent := queue.push(message(job, nodes[job.id])):
                asked[sent] = job
            else:
                yield Failure(job.id, f"its node {nodes[job.id]} could not be sent its job")
        while absent and monotonic() - began >= wait:
            yield Failure(absent.popitem()[0], f"it was not connected for {wait:g} s")
        waiting = len(asked)
        for number, reply in queue.pull(list(asked)):
            yield read(reply, asked.pop(number))
        if not here and len(asked) == waiting:
            sleep(poll)
    queue.forget()
    for job in (*absent.values(), *asked.values()):
        yield Failure(job.id, f"no answer within {deadline:g} s")


def _read(path: Path) -> dict[str, str]:
    """Return the clients in a registry's file; a damaged one is put aside, and all clients are asked again."""
    try:
        known: dict[str, str] = validated(dict[str, str], parse_json(read_regular(path)) if path.exists() else {})
        return known
    except ValueError:
        pass
    aside = path.with_name(f"{path.name}.damaged")
    path.replace(aside)
    _log.warning("feddf: %s is damaged: it is kept as %s, and all clients are asked for their names", path, aside.name)
    return {}


class ClientRegistry:
    """The clients behind a queue of messages of its own; ``clients`` grows as they connect.

    ``names`` are those of nodes, where only these nodes may take part. At most ``most`` clients are registered, because
    a node that returns under new names must not fill memory: for a new one beyond that, one that is not connected is
    forgotten, or else the new one is refused.
    """

    def __init__(
        self, queue: MessageQueue, path: Path, prototypes: Collection[str], names: Mapping[int, str] | None, most: int
    ) -> None:
        self.queue, self._path, self._prototypes, self._names, self._most = queue, path, prototypes, names, most
        self.clients = [Client(*known) for known in sorted(_read(path).items()) if known[1] in prototypes]
        self._nodes: dict[str, int] = {}  # of each client that is connected
        self._claims: dict[int, Client] = {}  # what each node says that it is
        self._asked: dict[str, int] = {}  # the node that each question went to
        self._when: dict[int, float] = {}
        self._absent: dict[str, int] = {}  # rounds in a row

    def connected(self) -> dict[str, int]:
        """Return the node of each client that is connected now; new nodes are asked for their names.

        A node that reconnects may be another client, or have another architecture: it is asked anew.
        """
        online = set(self.queue.grid.get_node_ids())
        self._asked = {number: node for number, node in self._asked.items() if node in online}
        self._claims = {node: client for node, client in self._claims.items() if node in online}
        self._when = {node: when for node, when in self._when.items() if node in online}
        for node in sorted(online - self._claims.keys()):
            if monotonic() - self._when.get(node, -ASK_AGAIN) >= ASK_AGAIN:
                question = RecordDict({CONFIG: ConfigRecord({"feddf": "who"})})
                if sent := self.queue.push(Message(question, node, MessageType.QUERY, ttl=ASK_AGAIN)):
                    self._asked[sent] = node
                self._when[node] = monotonic()
        for number, reply in self.queue.pull(list(self._asked)):
            node = self._asked.pop(number)
            try:
                self._claims[node] = self._client_in(node, reply)
            except ValueError as wrong:
                _log.warning("feddf: node %d may not take part: %s", node, wrong)
        self._assign_names()
        return dict(self._nodes)

    def gather(self, config: ClientsConfig, wait: float, poll: float) -> None:
        """Wait until as many clients are connected as are expected, or ``wait`` seconds for a quorum of them.

        Those that have no name but their node's id, and are not connected, will not return under it.
        """
        began, expected = monotonic(), config.total
        while (found := len(self.connected())) < expected and monotonic() - began < wait:
            sleep(poll)
        self.clients = [one for one in self.clients if one.id in self._nodes or not one.id.startswith(UNNAMED)]
        needed = max(1, ceil(config.quorum * expected))
        if found < needed:
            few = f"{found} of {expected} clients announced themselves within {wait:g} s; at least {needed} are needed"
            raise QuorumError(few)
        if found < expected:
            _log.warning("feddf: beginning with %d of %d clients", found, expected)

    def begin_round(self) -> None:
        """Register new clients, and forget those long not connected: they would be sampled, and not answer."""
        self.connected()
        for client in self.clients:
            self._absent[client.id] = 0 if client.id in self._nodes else self._absent.get(client.id, 0) + 1
        gone = [client.id for client in self.clients if self._absent[client.id] > FORGET_AFTER]
        if gone and self._names is None and len(gone) < len(self.clients):
            _log.warning("feddf: forgotten after %d rounds without them: %s", FORGET_AFTER, ", ".join(gone)[:300])
            self._keep([client for client in self.clients if client.id not in gone])

    def _client_in(self, node: int, reply: Message | Exception) -> Client:
        """Return the client that a node says it is; raise ``ValueError`` where it may not take part."""
        listed = (self._names or {}).get(node)
        if self._names is not None and listed is None:
            raise ValueError("client_names does not list it")
        if isinstance(reply, Exception):
            raise ValueError(printable(f"its answer could not be read: {reason(reply)}"))
        if has_no_such_function(reply) and len(self._prototypes) == 1:  # an app as it was before feddf
            return Client(listed or f"{UNNAMED}{node}", next(iter(self._prototypes)))
        if reply.has_error():
            raise ValueError(complaint_of(reply))
        config = reply.content.config_records.get(CONFIG, ConfigRecord())
        name, prototype = config.get("client"), config.get("prototype")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"its name {name!r:.80} is not made of up to 64 letters, digits, '_', '.' and '-'")
        if not isinstance(prototype, str) or prototype not in self._prototypes:
            raise ValueError(f"it has the architecture {prototype!r:.80}; known are {', '.join(self._prototypes)}")
        return Client(listed or name, prototype)

    def _assign_names(self) -> None:
        """Give each name to one node: to the one that had it, or else to the first to claim it."""
        claimed = {node: client.id for node, client in self._claims.items()}
        held = {name: node for name, node in self._nodes.items() if claimed.get(node) == name}
        for node, client in self._claims.items():
            holder = held.setdefault(client.id, node)
            if holder != node:
                self._warn_once(node, f"has to wait: node {holder} is '{client.id}' now")
            elif not self._register(client, held):
                del held[client.id]
                self._warn_once(node, f"may not join as '{client.id}': there are {self._most} clients")
        self._nodes = held

    def _warn_once(self, node: int, what: str) -> None:
        if self._when.pop(node, None) is not None:
            _log.warning("feddf: node %d %s", node, what)

    def _register(self, client: Client, connected: Collection[str]) -> bool:
        """Add a client, or let it change its architecture; return whether there was room."""
        if client in self.clients:
            return True
        others = [known for known in self.clients if known.id != client.id]
        absent = [known for known in others if known.id not in connected]
        if len(others) >= self._most:
            if not absent:
                return False
            others.remove(max(absent, key=lambda known: self._absent.get(known.id, 0)))
        self._keep([*others, client])
        return True

    def _keep(self, clients: list[Client]) -> None:
        self.clients = sorted(clients, key=lambda client: client.id)
        self._absent = {client.id: self._absent.get(client.id, 0) for client in self.clients}
        known = {client.id: client.prototype for client in self.clients}
        write_atomically(self._path, json.dumps(known, indent=1).encode())
