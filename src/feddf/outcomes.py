"""Engines answer in any order; these put the answers into the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from feddf.types import Engine, Failure, J, R


class Answered(Protocol):
    """An outcome that says whose it is."""

    @property
    def client_id(self) -> str:
        """The id of the job's client."""
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


def retrying(engine: Engine) -> Engine:
    """Return the engine for the server's own work: a job that failed (say its worker died) is run once more."""

    def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        again: list[J] = []
        by_id = {job.id: job for job in jobs}
        for outcome in engine(function, jobs):
            if isinstance(outcome, Failure):
                again.append(by_id[outcome.client_id])
            else:
                yield outcome
        if again:
            yield from engine(function, again)

    return run


def gather(outcomes: Iterable[R | Failure], what: str) -> list[R]:
    """Return all results, or raise if the server's own work failed anywhere."""
    results: list[R] = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{what} {outcome.client_id} failed: {outcome.reason}")
        results.append(outcome)
    return results
