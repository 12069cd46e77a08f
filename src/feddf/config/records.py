"""The record of a round: one JSON object a line in a run's ``metrics.jsonl``."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import Field, FiniteFloat
from typing_extensions import TypedDict  # Python's own, in a form that pydantic reads before 3.12

from feddf.config.foreign import validated


class ModelRecord(TypedDict):
    """Accuracies of one prototype: averaged (line 11), fused (line 15), and fused on the validation data."""

    averaged: FiniteFloat | None
    fused: FiniteFloat | None
    validation: NotRequired[float]


class DistillationRecord(TypedDict):
    """How one student learned: steps taken, the step whose weights were kept, and scores.

    They are those of its start, of its best snapshot after that, and of what was kept. ``best_step`` is 0 where the
    start won (``distill.keep_init``); the difference of the first two scores says by how much.
    """

    steps: int
    best_step: int
    score_before: float | None
    score_student: NotRequired[float | None]
    score_after: float | None


class Record(TypedDict):
    """What happened in a round. A method may add notes of its own under further names.

    What is called accuracy here is another ``score`` where that is given: at most 1, higher is better. ``measures`` are
    further ones, of each fused model and of the ensemble.

    ``ensemble`` is the test accuracy of the ensemble that the students learned from: null where the method has none, or
    where it cannot be asked about other inputs than the pool's, which ``no_ensemble`` then says. ``avg_logits`` is that
    of the clients' averaged logits, whatever the method. (Records of version 0.1 have the latter as ``ensemble``.)
    ``dropped`` has a ``client`` without a usable update and the ``reason``, each.
    """

    round: int
    clients: list[str]
    ensemble: float | None
    no_ensemble: NotRequired[str]
    avg_logits: NotRequired[float | None]
    models: dict[str, ModelRecord]
    score: NotRequired[str]
    measures: NotRequired[dict[str, dict[str, float]]]
    metrics_of_clients: dict[str, float]
    accuracy_of_clients: NotRequired[dict[str, float | None]]
    drift_of_clients: NotRequired[dict[str, float | None]]
    bytes_down: dict[str, int]
    bytes_up: dict[str, int]
    dropped: list[dict[str, str]]
    attempts: int
    seconds: dict[str, float]
    distillation: NotRequired[dict[str, DistillationRecord]]
    dropped_worst: NotRequired[dict[str, Any]]
    trust: NotRequired[dict[str, float]]
    bounded_counts: NotRequired[dict[str, Any]]
    bounded_statistics: NotRequired[dict[str, float]]
    guard: NotRequired[dict[str, Any]]
    attack: NotRequired[dict[str, Any]]
    fedma: NotRequired[dict[str, Any]]
    evaluated_by_clients: NotRequired[dict[str, Any]]
    kept_by_clients: NotRequired[int]
    privacy: NotRequired[dict[str, Any]]
    clip: NotRequired[float]
    lost_states: NotRequired[list[str]]


_KINDS = {name: NotRequired[kind] for name, kind in get_type_hints(Record).items()}
_Line = TypedDict("_Line", {**_KINDS, "round": Annotated[int, Field(ge=1)], "models": dict[str, ModelRecord]})  # type: ignore[misc]


def is_record(value: object) -> bool:
    """Say whether a line of a log has a round and its models, and whatever else it has in the form of a record."""
    try:
        validated(_Line, value)
    except ValueError:
        return False
    return True
