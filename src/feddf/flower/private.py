"""All that is used of Flower and is not in its public interface; tests/flower/test_private.py keeps watch over it."""

from __future__ import annotations

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid
from httpx import HTTPError

TRANSPORT_ERRORS = (HTTPError, OSError)
"""What Flower's grid raises when the SuperLink cannot be reached, after its own retries."""


def holds_whole_replies(grid: Grid) -> bool:
    """Say whether a grid is that of a simulation, whose replies are in memory, whole, before they are announced."""
    return isinstance(grid, InMemoryGrid)


def has_no_such_function(reply: Message) -> bool:
    """Say whether a client's app raised, as one without a function for a message's type does."""
    return reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
