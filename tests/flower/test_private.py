"""What is used of Flower and is not in its public interface is still there, and still means the same."""

from __future__ import annotations

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from feddf.flower.transport import has_no_such_function
from flower.local_grid import LocalGrid, Node


def test_an_app_without_a_function_for_a_message_is_told_apart_from_one_that_is_gone() -> None:
    grid = LocalGrid({1: Node(ClientApp(), {})})
    (number,) = grid.push_messages([Message(RecordDict(), 1, "query")])
    (reply,) = grid.pull_messages([number])
    assert has_no_such_function(reply)
