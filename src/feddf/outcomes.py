"""Engines answer in any order; these put the answers into the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from feddf.types import Failure, R


class Answered(Protocol):
    """An outcome that says whose it is."""

    @property
    def client_id(self) -> str:
        """The id of the job."""
        ...


A = TypeVar("A", bound=Answered)


def in_order(outcomes: Iterable[A | Failure], ids: Sequence[str]) -> Iterator[A | Failure]:
    """Yield the outcomes in the order of ``ids``, holding back only those that came too early.

    A floating-point sum depends on its order, so whatever is added up as it streams in goes through here.
    """
    early: dict[str, A | Failure] = {}
    expected = iter(ids)
    wanted = next(expected, None)
    for outcome in outcomes:
        early[outcome.client_id] = outcome
        while wanted in early:
            yield early.pop(wanted)
            wanted = next(expected, None)


def gather(outcomes: Iterable[R | Failure], what: str) -> list[R]:
    """Return all results, or raise if the server's own work failed anywhere."""
    results: list[R] = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{what} {outcome.client_id} failed: {outcome.reason}")
        results.append(outcome)
    return results
