from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from conftest import Tiny
from feddf.engines import Processes, in_process
from feddf.runs.profile import Profile
from feddf.runs.spool import forget, keep, recall, remembering
from feddf.states import digest
from feddf.types import Failure, Job, Update


@pytest.fixture
def jobs(tiny: Tiny) -> list[Job]:
    return [Job(c, 1, tiny.server.models[c.prototype], 7 + i) for i, c in enumerate(tiny.federation.clients[:4])]


def test_an_interrupted_round_trains_only_the_clients_that_had_not_finished(
    tiny: Tiny, jobs: list[Job], tmp_path: Path
) -> None:
    trained: list[str] = []

    def train(job: Job) -> Update:
        trained.append(job.id)
        return tiny.local(job)

    first = remembering(in_process, tmp_path / "spool")(train, jobs)
    next(first), next(first)
    first.close()  # the round is interrupted here
    outcomes = list(remembering(in_process, tmp_path / "spool")(train, jobs))
    assert trained == ["c0", "c1", "c2", "c3"]
    straight = [tiny.local(job) for job in jobs]
    assert [digest({"m": update.state}) for update in outcomes] == [digest({"m": update.state}) for update in straight]
    assert [(u.client_id, u.round, u.n_examples, u.metrics) for u in outcomes] == [
        (u.client_id, u.round, u.n_examples, u.metrics) for u in straight
    ]
    forget(tmp_path / "spool")
    assert not (tmp_path / "spool").exists()


def test_only_the_answer_to_exactly_this_job_is_recalled(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    keep(tmp_path, jobs[0], tiny.local(jobs[0]))
    other = {key: tensor + 1 for key, tensor in jobs[0].state.items()}
    assert recall(tmp_path, jobs[0]) is not None
    assert recall(tmp_path, jobs[1]) is None
    assert recall(tmp_path, replace(jobs[0], seed=99)) is None
    assert recall(tmp_path, replace(jobs[0], state=other)) is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_update_is_trained_again(tiny: Tiny, jobs: list[Job], tmp_path: Path, damage: str) -> None:
    keep(tmp_path, jobs[0], tiny.local(jobs[0]))
    (path,) = tmp_path.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.unlink()
    path.write_bytes({"truncate": content[:-9], "flip": content, "empty": b""}[damage])
    assert recall(tmp_path, jobs[0]) is None


def test_what_cannot_be_written_goes_on_to_the_gate(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    update = tiny.local(jobs[0])
    strange = [replace(update, state=None), replace(update, state={"w": "text"}), replace(update, metrics={"a": {1}})]
    for odd in strange:
        assert keep(tmp_path, jobs[0], odd) is odd
    shared = torch.ones(4)
    assert keep(tmp_path, jobs[0], replace(update, state={"a": shared, "b": shared[:2]})).state.keys() == {"a", "b"}


def test_failures_pass_and_are_not_remembered(jobs: list[Job], tmp_path: Path) -> None:
    def broken(job: Job) -> Update:
        raise RuntimeError("no")

    outcomes = list(remembering(in_process, tmp_path / "spool")(broken, jobs[:1]))
    assert outcomes == [Failure("c0", "RuntimeError: no")]
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_profile_is_a_trace_of_every_job_on_its_worker(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    profile = Profile()
    with Processes(2) as pool:
        engine = profile.engine(pool, "train")
        updates = [*engine(tiny.local, jobs), *engine(tiny.local, jobs)]
    assert len(updates) == 8
    profile.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sorted(span["name"] for span in spans) == sorted([f"train: c{i}" for i in range(4)] * 2)
    assert len({span["pid"] for span in spans}) == 2
    assert all(span["dur"] > 0 for span in spans)
    for worker in {span["pid"] for span in spans}:  # one job at a time
        times = sorted((span["ts"], span["ts"] + span["dur"]) for span in spans if span["pid"] == worker)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(times))
