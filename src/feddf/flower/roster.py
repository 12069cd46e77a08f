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

from feddf.files import write_atomically
from feddf.flower.post import Post
from feddf.flower.private import has_no_such_function
from feddf.flower.wire import CONFIG, complaint_of
from feddf.rounds import QuorumError
from feddf.types import Client

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_log = logging.getLogger("flwr")


class Roster:
    """The clients of a run. ``clients`` grows as they come; ``members`` names nodes, where only those may take part."""

    def __init__(self, path: Path, prototypes: Collection[str], members: Mapping[int, str] | None = None) -> None:
        self._path, self._prototypes, self._members = path, prototypes, members
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.clients = [Client(name, prototype) for name, prototype in sorted(known.items())]
        self._nodes: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._seen: set[int] = set()

    def connected(self, post: Post) -> dict[str, int]:
        """Return the node of each client that is connected now; nodes that are new are asked who they are."""
        online = post.nodes()
        for node in sorted(online - self._seen):
            sent = post.push(Message(RecordDict({CONFIG: ConfigRecord({"feddf": "who"})}), node, MessageType.QUERY))
            if sent is not None:
                self._seen.add(node)
                self._asked[sent] = node
        for reply in post.pull(list(self._asked)):
            self._meet(self._asked.pop(reply.metadata.reply_to_message_id), reply, online)
        return {name: node for name, node in self._nodes.items() if node in online}

    def gather(self, post: Post, *, expected: int, quorum: float, wait: float, poll: float) -> None:
        """Wait until as many clients are connected as are expected, or ``wait`` seconds for a quorum of them."""
        began = monotonic()
        while len(found := self.connected(post)) < expected:
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

    def _meet(self, node: int, reply: Message, online: Collection[int]) -> None:
        try:
            name, prototype = self._introduced(node, reply)
        except LookupError as gone:
            self._seen.discard(node)  # it will be asked again when it is back
            _log.warning("feddf: node %d did not say who it is (%s)", node, gone)
            return
        except ValueError as wrong:
            _log.warning("feddf: node %d may not take part: %s", node, wrong)
            return
        holder = self._nodes.get(name)
        if holder is not None and holder != node and holder in online:
            _log.warning("feddf: node %d may not take part: node %d is '%s' already", node, holder, name)
            return
        self._nodes[name] = node
        self._enrol(Client(name, prototype))

    def _introduced(self, node: int, reply: Message) -> tuple[str, str]:
        if has_no_such_function(reply) and len(self._prototypes) == 1:  # an app as it was before feddf
            return self._named(node, f"node-{node}"), next(iter(self._prototypes))
        if reply.has_error():
            raise (ValueError if has_no_such_function(reply) else LookupError)(complaint_of(reply))
        config = reply.content.config_records.get(CONFIG, ConfigRecord())
        name, prototype = config.get("client"), config.get("prototype")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"its name {name!r:.80} is not made of up to 64 letters, digits, '_', '.' and '-'")
        if not isinstance(prototype, str) or prototype not in self._prototypes:
            raise ValueError(f"it has the architecture {prototype!r:.80}; known are {', '.join(self._prototypes)}")
        return self._named(node, name), prototype

    def _named(self, node: int, claimed: str) -> str:
        """Return a node's name: what it says, unless the server knows better."""
        if self._members is None:
            return claimed
        if node not in self._members:
            raise ValueError("it is not among the members")
        return self._members[node]

    def _enrol(self, client: Client) -> None:
        """Add a client, or let it change its architecture."""
        if client in self.clients:
            return
        others = [known for known in self.clients if known.id != client.id]
        self.clients[:] = sorted([*others, client], key=lambda known: known.id)
        known = {known.id: known.prototype for known in self.clients}
        write_atomically(self._path, json.dumps(known, indent=1).encode())
