"""Who takes part: which node is which client, and which architecture it has.

A node's id is Flower's and means nothing (in a simulation it is new in every run), so a client has a name, by which it
is sampled and seeded. It introduces itself, once, when it is first seen. The roster is on disk, so that a server that
was killed knows its clients before they come back.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from math import ceil
from pathlib import Path
from time import monotonic, sleep

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from feddf.config.errors import reason
from feddf.flower.inbox import Inbox
from feddf.flower.private import has_no_such_function
from feddf.flower.wire import CONFIG, complaint_of, printable
from feddf.rounds import QuorumError
from feddf.runtime.atomic import write_atomically
from feddf.types import Client

UNNAMED = "node-"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_log = logging.getLogger("flwr")


ASK_AGAIN = 60.0
"""Seconds after which a node is asked again that did not answer, or not as it should."""


FORGET_AFTER = 3
"""Rounds in a row after which a client that was never connected is forgotten. It is enrolled again when it comes."""


def most_clients(expected: int) -> int:
    """Return how many clients a roster holds at the most: a node that comes back under new names must not fill it."""
    return 2 * expected + 8


def _read(path: Path) -> dict[str, str]:
    """Return the clients in a roster's file; a damaged one is put aside, and its clients introduce themselves again."""
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(known, dict) and all(type(prototype) is str for prototype in known.values()):
            return known
    except (ValueError, RecursionError):
        pass
    aside = path.with_name(f"{path.name}.damaged")
    path.replace(aside)
    _log.warning("feddf: %s is damaged: it is kept as %s, and all clients are asked who they are", path, aside.name)
    return {}


class Roster:
    """The clients of a run. ``clients`` grows as they come; ``members`` names nodes, where only those may take part.

    It holds ``most`` clients: for a newcomer beyond that one that is not connected is forgotten, or else it is refused.
    """

    def __init__(
        self,
        path: Path,
        prototypes: Collection[str],
        members: Mapping[int, str] | None = None,
        most: int = 10_000,
    ) -> None:
        self._path, self._prototypes, self._members, self._most = path, prototypes, members, most
        self._absent: dict[str, int] = {}
        self.clients = [Client(*known) for known in sorted(_read(path).items()) if known[1] in prototypes]
        self._nodes: dict[str, int] = {}
        self._claims: dict[int, Client] = {}
        self._asked: dict[str, int] = {}
        self._when: dict[int, float] = {}

    def connected(self, inbox: Inbox) -> dict[str, int]:
        """Return the node of each client that is connected now; nodes that are new are asked who they are."""
        online = inbox.nodes()
        self._forget_absent(inbox, online)
        for node in sorted(online - self._claims.keys()):
            if monotonic() - self._when.get(node, -ASK_AGAIN) >= ASK_AGAIN:
                self._ask(inbox, node)
        for number, reply in inbox.pull(list(self._asked)):
            self._meet(self._asked.pop(number), reply)
        self._grant()
        return dict(self._nodes)

    def _forget_absent(self, inbox: Inbox, online: Collection[int]) -> None:
        """A node that comes back may be somebody else, or have another architecture: it is asked anew."""
        inbox.forget([number for number, node in self._asked.items() if node not in online])
        self._asked = {number: node for number, node in self._asked.items() if node in online}
        self._claims = {node: client for node, client in self._claims.items() if node in online}
        self._when = {node: when for node, when in self._when.items() if node in online}

    def _ask(self, inbox: Inbox, node: int) -> None:
        question = RecordDict({CONFIG: ConfigRecord({"feddf": "who"})})
        sent = inbox.push(Message(question, node, MessageType.QUERY, ttl=ASK_AGAIN))
        self._when[node] = monotonic()
        if sent is not None:
            self._asked[sent] = node

    def _meet(self, node: int, reply: Message | Exception) -> None:
        try:
            self._claims[node] = self._introduced(node, reply)
        except ValueError as wrong:
            _log.warning("feddf: node %d may not take part: %s", node, wrong)

    def _grant(self) -> None:
        """Give each name to one node: to the one that had it, or else to the first to claim it."""
        held = {
            name: node for name, node in self._nodes.items() if node in self._claims and self._claims[node].id == name
        }
        for node, client in self._claims.items():
            if held.setdefault(client.id, node) == node:
                if not self._enrol(client, held):
                    del held[client.id]
                    if self._when.pop(node, None) is not None:
                        _log.warning(
                            "feddf: node %d may not join as '%s': there are %d clients", node, client.id, self._most
                        )
            elif self._when.pop(node, None) is not None:
                _log.warning("feddf: node %d has to wait: node %d is '%s' now", node, held[client.id], client.id)
        self._nodes = held

    def gather(self, inbox: Inbox, *, expected: int, quorum: float, wait: float, poll: float) -> None:
        """Wait until as many clients are connected as are expected, or ``wait`` seconds for a quorum of them.

        Those who have no name but their node's id, and are not here, will not come back under it.
        """
        began = monotonic()
        try:
            self._wait(inbox, began, expected, quorum, wait, poll)
        finally:
            present = self._nodes.keys()
            self.clients[:] = [one for one in self.clients if one.id in present or not one.id.startswith(UNNAMED)]

    def _wait(self, inbox: Inbox, began: float, expected: int, quorum: float, wait: float, poll: float) -> None:
        while len(found := self.connected(inbox)) < expected:
            if monotonic() - began >= wait:
                needed = max(1, ceil(quorum * expected))
                if len(found) < needed:
                    raise QuorumError(
                        f"{len(found)} of {expected} clients introduced themselves within {wait:g} s; "
                        f"at least {needed} are needed"
                    )
                _log.warning("feddf: beginning with %d of %d clients", len(found), expected)
                return
            sleep(poll)

    def _introduced(self, node: int, reply: Message | Exception) -> Client:
        if isinstance(reply, Exception):
            raise ValueError(printable(f"its answer could not be read: {reason(reply)}"))
        if has_no_such_function(reply) and len(self._prototypes) == 1:  # an app as it was before feddf
            return Client(self._named(node, f"{UNNAMED}{node}"), next(iter(self._prototypes)))
        if reply.has_error():
            raise ValueError(complaint_of(reply))
        config = reply.content.config_records.get(CONFIG, ConfigRecord())
        name, prototype = config.get("client"), config.get("prototype")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"its name {name!r:.80} is not made of up to 64 letters, digits, '_', '.' and '-'")
        if not isinstance(prototype, str) or prototype not in self._prototypes:
            raise ValueError(f"it has the architecture {prototype!r:.80}; known are {', '.join(self._prototypes)}")
        return Client(self._named(node, name), prototype)

    def _named(self, node: int, claimed: str) -> str:
        """Return a node's name: what it says, unless the server knows better."""
        if self._members is None:
            return claimed
        if node not in self._members:
            raise ValueError("it is not among the members")
        return self._members[node]

    def begin_round(self) -> None:
        """Forget clients that have not been connected for some rounds: they would be sampled, and nobody answers."""
        for client in self.clients:
            self._absent[client.id] = 0 if client.id in self._nodes else self._absent.get(client.id, 0) + 1
        gone = [client.id for client in self.clients if self._absent[client.id] > FORGET_AFTER]
        if gone and self._members is None and len(gone) < len(self.clients):
            _log.warning("feddf: forgotten after %d rounds without them: %s", FORGET_AFTER, ", ".join(gone)[:300])
            self._keep([client for client in self.clients if client.id not in gone])

    def _enrol(self, client: Client, connected: Collection[str]) -> bool:
        """Add a client, or let it change its architecture; return whether there was room."""
        if client in self.clients:
            return True
        others = [known for known in self.clients if known.id != client.id]
        if len(others) >= self._most:
            absent = [known for known in others if known.id not in connected]
            if not absent:
                return False
            others.remove(max(absent, key=lambda known: self._absent.get(known.id, 0)))
        self._keep([*others, client])
        return True

    def _keep(self, clients: list[Client]) -> None:
        self.clients[:] = sorted(clients, key=lambda known: known.id)
        self._absent = {client.id: self._absent.get(client.id, 0) for client in self.clients}
        known = {known.id: known.prototype for known in self.clients}
        write_atomically(self._path, json.dumps(known, indent=1).encode())
