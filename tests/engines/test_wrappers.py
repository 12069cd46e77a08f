from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from feddf.engines import in_process
from feddf.engines.open import DeferredEngine, Profile, report_progress, with_retries
from feddf.types import Failure, WorkerDied


@dataclass(frozen=True)
class Work:
    id: str


def shout(job: Work) -> str:
    if job.id == "bad":
        raise ValueError("no")
    return job.id.upper()


def test_the_servers_own_work_is_tried_twice() -> None:
    calls: list[str] = []

    def flaky(job: Work) -> str:
        calls.append(job.id)
        if job.id == "bad" or calls.count(job.id) == 1:
            raise ValueError("no")
        return job.id

    outcomes = list(with_retries(in_process)(flaky, [Work("good"), Work("bad")]))
    assert outcomes == ["good", Failure("bad", "ValueError: no")]
    assert calls == ["good", "bad", "good", "bad"]


def test_a_watched_engine_tells_of_every_job_that_is_done() -> None:
    seen: list[tuple[str, int, int]] = []
    engine = report_progress(in_process, lambda *progress: seen.append(progress), "train")
    assert list(engine(shout, [Work("a"), Work("bad")])) == ["A", Failure("bad", "ValueError: no")]
    assert seen == [("train", 0, 2), ("train", 1, 2), ("train", 2, 2)]


def test_a_profile_has_a_span_for_every_job_that_was_done_and_changes_no_outcome(tmp_path: Path) -> None:
    profile = Profile()
    engine = profile.engine(in_process, "train")
    assert list(engine(shout, [Work("a"), Work("bad"), Work("b")])) == ["A", Failure("bad", "ValueError: no"), "B"]
    profile.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["server"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["name"], span["pid"]) for span in spans] == [("train: a", os.getpid()), ("train: b", os.getpid())]
    assert all(span["dur"] >= 0 for span in spans)


def test_a_span_is_not_negative_where_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1000.0, 10.0])
    monkeypatch.setattr(time, "time", lambda: next(times))
    profile = Profile()
    assert list(profile.engine(in_process, "train")(shout, [Work("a")])) == ["A"]
    assert profile.spans[0]["ts"] == 1000.0 * 1e6
    assert profile.spans[0]["dur"] >= 0


def test_a_profiled_function_stays_the_same_for_workers_that_have_seen_it() -> None:
    seen: list[object] = []

    def engine(function, jobs):
        seen.append(function)
        return in_process(function, jobs)

    profiled = Profile().engine(engine, "train")
    for _ in range(2):
        assert list(profiled(shout, [Work("a")])) == ["A"]
    assert seen[0] is seen[1]


def test_nothing_runs_in_an_engine_that_is_not_open_and_then_where_it_was_opened_last() -> None:
    later = DeferredEngine()
    with pytest.raises(AssertionError, match="once its engines are open"):
        later(shout, [Work("a")])
    later.become(in_process)
    assert list(later(shout, [Work("a"), Work("bad")])) == ["A", Failure("bad", "ValueError: no")]
    later.become(lambda function, jobs: iter([Failure(job.id, "closed") for job in jobs]))
    assert list(later(shout, [Work("a")])) == [Failure("a", "closed")]


@pytest.mark.parametrize(("deaths", "lost"), [(3, 0), (4, 1)])
def test_a_job_of_the_server_outlives_the_death_of_its_workers(deaths: int, lost: int) -> None:
    """A worker that is killed three times costs no client; a model that kills its worker each time costs its own."""
    asked: list[str] = []

    def engine(function: Callable[[Work], str], jobs: Sequence[Work]) -> Iterator[str | Failure]:
        for job in jobs:
            asked.append(job.id)
            yield WorkerDied(job.id, "killed") if asked.count("a") <= deaths and job.id == "a" else function(job)

    outcomes = list(with_retries(engine)(lambda job: job.id, [Work("a"), Work("b")]))  # type: ignore[arg-type]
    assert sum(isinstance(one, Failure) for one in outcomes) == lost
    assert asked.count("b") == 1
