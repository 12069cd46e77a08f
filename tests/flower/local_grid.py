"""A Flower grid without a network: nodes are ClientApps in this process, and each can be made to misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Behavior = Callable[[Message, Message | None], Message | None]
"""(message, the app's reply) -> what comes back; ``None`` for nothing, ever."""


@dataclass
class Node:
    app: ClientApp
    config: dict[str, bool | float | int | str]
    online: bool = True
    behave: Behavior | None = None
    run_config: dict[str, bool | float | int | str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


def died(message: Message, reply: Message | None) -> Message:
    """What Flower sends for a node that is gone; the sender that it names is another."""
    gone = Message(Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable"), reply_to=message)
    gone.metadata.__dict__["_src_node_id"] = 424242
    return gone


class LocalGrid(Grid):
    def __init__(self, nodes: dict[int, Node]) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # as Flower's own processes set it
        self.nodes = nodes
        self._replies: dict[str, Message] = {}
        self._sent: dict[str, Message] = {}

    def set_run(self, run: object) -> None:
        raise NotImplementedError

    @property
    def run(self) -> object:
        raise NotImplementedError

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, node in self.nodes.items() if node.online]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = str(uuid4())
        self._sent[message.metadata.message_id] = message
        node = self.nodes[message.metadata.dst_node_id]
        node.asked.append(message.metadata.message_type)
        context = Context(1, message.metadata.dst_node_id, node.config, RecordDict(), node.run_config)
        try:
            reply: Message | None = node.app(message, context)
        except Exception as error:
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"Traceback\n{error!r}"), reply_to=message)
        if node.behave is not None and message.metadata.message_type != "query":
            reply = node.behave(message, reply)
        if reply is not None:
            self._replies[message.metadata.message_id] = reply
        return message.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand each reply out once; a second question for it is answered as Flower does."""
        return [found for number in message_ids if (found := self._pull(number)) is not None]

    def _pull(self, number: str) -> Message | None:
        if number in self._replies:
            self._sent.pop(number)
            return self._replies.pop(number)
        if number in self._sent:
            return None
        asked = Message(RecordDict(), 1, "query")
        asked.metadata.__dict__["_message_id"] = number
        return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "Error: Message Unavailable"), reply_to=asked)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
