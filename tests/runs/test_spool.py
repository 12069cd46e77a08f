from __future__ import annotations

import json
import os
import pickle
import resource
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conftest import Tiny, update_of
from feddf.engines import Processes, in_process
from feddf.engines.open import Profile
from feddf.rounds import collect
from feddf.runs.spool import DiskSpool, StateOnDisk
from feddf.states import digest
from feddf.types import Failure, Job, Part, Reply, TensorForm, Update


@pytest.fixture
def jobs(tiny: Tiny) -> list[Job]:
    return [Job(c, 1, tiny.server.models[c.prototype], 7 + i) for i, c in enumerate(tiny.federation.clients[:4])]


def test_an_interrupted_round_trains_only_the_clients_that_had_not_finished(
    tiny: Tiny, jobs: list[Job], tmp_path: Path
) -> None:
    trained: list[str] = []

    def train(job: Job) -> Reply:
        trained.append(job.id)
        return tiny.local(job)

    def interrupted(job: Job) -> Reply:
        if job.id == "c2":
            raise KeyboardInterrupt
        return train(job)

    spool = DiskSpool(tmp_path / "spool")
    with pytest.raises(KeyboardInterrupt):
        collect(in_process, interrupted, jobs, spool)
    outcomes, failures = collect(in_process, train, jobs, DiskSpool(tmp_path / "spool"))
    assert trained == ["c0", "c1", "c2", "c3"]
    assert failures == []
    straight = [tiny.local(job) for job in jobs]
    assert [digest({"m": update.state}) for update in outcomes] == [digest({"m": update.state}) for update in straight]
    assert [(u.client_id, u.round, u.n_examples, u.metrics) for u in outcomes] == [
        (u.client_id, u.round, u.n_examples, u.metrics) for u in straight
    ]
    spool.clear()
    assert not (tmp_path / "spool").exists()


def test_only_the_answer_to_exactly_this_job_is_recalled(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path)
    spool.keep(jobs[0], update_of(tiny.local(jobs[0])))
    other = {key: tensor + 1 for key, tensor in jobs[0].state.items()}
    assert spool.recall(jobs[0]) is not None
    assert spool.recall(jobs[1]) is None
    assert spool.recall(replace(jobs[0], seed=99)) is None
    assert spool.recall(replace(jobs[0], state=other)) is None
    assert spool.recall(replace(jobs[0], payload={"control": {"w": torch.zeros(1)}})) is None
    assert spool.recall(replace(jobs[0], counted=1)) is None


# Names that could be taken for others: of a state's tensor, of a payload's, of the file's own metadata
PAYLOAD = {
    "state": {"features.0.weight": torch.tensor([1.0]), "": torch.tensor([2.0])},
    "a/b": {"c": torch.tensor([3, 4])},
    "a": {"b/c": torch.tensor([5]), "__metadata__": torch.zeros(0, 2)},
    '["x", "y"]': {"é": torch.tensor(True)},
}


def with_payload(job: Job, tiny: Tiny) -> Update:
    return replace(update_of(tiny.local(job)), payload=PAYLOAD)


def test_a_payload_comes_back_whole_and_under_its_names(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path)
    given = with_payload(jobs[0], tiny)
    for found in (spool.keep(jobs[0], given), DiskSpool(tmp_path).recall(jobs[0])):
        assert isinstance(found, Update)
        assert found.payload.keys() == PAYLOAD.keys()
        for name, state in PAYLOAD.items():
            assert set(found.payload[name]) == set(state)
            for key, tensor in state.items():
                assert found.payload[name][key].dtype == tensor.dtype
                assert torch.equal(found.payload[name][key], tensor)
        assert digest({"m": found.state}) == digest({"m": given.state})
        again = pickle.loads(pickle.dumps(found.payload["a/b"]))
        assert (type(again), again["c"].tolist()) == (dict, [3, 4])


@pytest.mark.parametrize("name", PAYLOAD)
def test_a_changed_payload_is_not_believed(tiny: Tiny, jobs: list[Job], tmp_path: Path, name: str) -> None:
    """One value is changed in an otherwise whole file, as a careful hand would."""
    spool = DiskSpool(tmp_path)
    spool.keep(jobs[0], with_payload(jobs[0], tiny))
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    place = next(place for place in tensors if json.loads(place)[:2] == ["payload", name] and tensors[place].numel())
    tensors[place] = ~tensors[place] if tensors[place].dtype == torch.bool else tensors[place] + 1
    save_file(load_file(path), path, about)
    assert spool.recall(jobs[0]) is not None
    save_file(tensors, path, about)
    assert spool.recall(jobs[0]) is None


def test_a_payload_on_disk_passes_the_gate_too(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    """What nobody asks for any more, or no longer in this form, is trained again."""
    spool = DiskSpool(tmp_path)
    spool.keep(jobs[0], with_payload(jobs[0], tiny))
    (update,), failures = collect(in_process, tiny.local, jobs[:1], spool)
    assert (dict(update.payload), failures) == ({}, [])
    form = {"n": {"of": TensorForm((1,), torch.int64, 0, 9)}}
    asked = (Part(form=lambda job: form),)
    sent = {"n": {"of": torch.tensor([7])}}

    def tell(job: Job) -> Reply:
        return replace(tiny.local(job), payload=sent)

    for kept, expected in ((torch.tensor([3]), 3), (torch.tensor([30]), 7), (torch.tensor([3.0]), 7)):
        spool.keep(jobs[1], replace(update_of(tell(jobs[1])), payload={"n": {"of": kept}}))
        (update,), failures = collect(in_process, tell, jobs[1:2], spool, asked)
        assert (update.payload["n"]["of"].tolist(), failures) == ([expected], [])


def test_a_state_is_read_from_disk_as_safetensors_reads_it(tmp_path: Path) -> None:
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
    kinds += (torch.int8, torch.uint8, torch.bool)
    tensors = {str(kind): (torch.randn(3, 5) * 9).to(kind) for kind in kinds}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(7), "whole": torch.randn(2, 3, 4, 5)}
    listed = {json.dumps(["state", name]): tensor for name, tensor in tensors.items()}
    listed[json.dumps(["payload", "state", "scalar"])] = torch.tensor(8)
    save_file(listed, tmp_path / "state.safetensors", {"about": "metadata are no tensor"})
    state = StateOnDisk(tmp_path / "state.safetensors", "state")
    written = load_file(tmp_path / "state.safetensors")
    expected = {json.loads(name)[1]: one for name, one in written.items() if json.loads(name)[0] == "state"}
    assert len(state) == len(tensors)
    assert set(state) == set(expected) == set(tensors)
    for name, tensor in expected.items():
        assert (state[name].dtype, state[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(state[name], tensor)
    with pytest.raises(KeyError):
        state["__metadata__"]
    content = (tmp_path / "state.safetensors").read_bytes()
    (tmp_path / "state.safetensors").write_bytes(content[:-1])
    with pytest.raises(OSError, match="ends before"):
        dict(state)  # never zeros for what is not there


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_update_is_trained_again(tiny: Tiny, jobs: list[Job], tmp_path: Path, damage: str) -> None:
    spool = DiskSpool(tmp_path)
    spool.keep(jobs[0], update_of(tiny.local(jobs[0])))
    (path,) = tmp_path.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.unlink()
    path.write_bytes({"truncate": content[:-9], "flip": content, "empty": b""}[damage])
    assert spool.recall(jobs[0]) is None
    updates, failures = collect(in_process, tiny.local, jobs[:1], spool)
    assert (len(updates), failures) == (1, [])
    assert spool.recall(jobs[0]) is not None


def test_an_update_on_disk_passes_the_gate_too(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    """What another version let pass, or somebody put there, is trained again."""
    spool = DiskSpool(tmp_path)
    honest = update_of(tiny.local(jobs[0]))
    spool.keep(jobs[0], replace(honest, n_examples=10**6))
    (update,), failures = collect(in_process, tiny.local, jobs[:1], spool)
    assert (update.n_examples, failures) == (honest.n_examples, [])


@pytest.mark.parametrize(
    "spoil",
    [{"metrics": {True: 1.0}}, {"metrics": {None: 1.0}}, {"state": None}, {"n_examples": 10**6}, {"round": 2}],
)
def test_what_the_gate_refuses_is_not_kept_for_a_second_chance(
    tiny: Tiny, jobs: list[Job], tmp_path: Path, spoil: dict[str, object]
) -> None:
    def hostile(job: Job) -> Reply:
        return replace(tiny.local(job), **spoil)

    spool = DiskSpool(tmp_path / "spool")
    updates, failures = collect(in_process, hostile, jobs[:1], spool)
    assert updates == []
    assert [failure.client_id for failure in failures] == ["c0"]
    assert spool.recall(jobs[0]) is None
    assert not (tmp_path / "spool").exists()


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    """A limit of the process stands for the disk's: writing fails in the middle of a file."""
    update, before = update_of(tiny.local(jobs[0])), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"round-0001-c0-.*File too large"):
            DiskSpool(tmp_path).keep(jobs[0], update)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_an_update_that_cannot_be_written_down_is_its_clients_failure(
    tiny: Tiny, jobs: list[Job], tmp_path: Path
) -> None:
    strange = replace(update_of(tiny.local(jobs[0])), metrics={"loss": object()})
    assert DiskSpool(tmp_path).keep(jobs[0], strange) == Failure("c0", "it could not be kept: TypeError")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["stranger", None, ["c0"], "../c0"])
def test_an_update_under_another_name_is_refused_and_not_kept(
    tiny: Tiny, jobs: list[Job], tmp_path: Path, name: object
) -> None:
    def pose(job: Job) -> Reply:
        return replace(tiny.local(job), client_id=name)

    updates, failures = collect(in_process, pose, jobs[:1], DiskSpool(tmp_path / "spool"))
    assert updates == []
    assert failures[-1] == Failure("unknown", f"client {name!r} was not sampled this round")
    assert not (tmp_path / "spool").exists()


def test_failures_pass_and_are_not_remembered(jobs: list[Job], tmp_path: Path) -> None:
    def broken(job: Job) -> Reply:
        raise RuntimeError("no")

    found = collect(in_process, broken, jobs[:1], DiskSpool(tmp_path / "spool"))
    assert found == ([], [Failure("c0", "RuntimeError: no")])
    assert not (tmp_path / "spool").exists()


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


def test_a_state_on_disk_is_a_state(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    original = tiny.local(jobs[0]).state
    kept = DiskSpool(tmp_path).keep(jobs[0], update_of(tiny.local(jobs[0])))
    assert isinstance(kept, Update)
    stored = kept.state
    assert stored.keys() == original.keys()
    assert digest({"m": stored}) == digest({"m": original}) == digest({"m": pickle.loads(pickle.dumps(stored))})
    assert type(pickle.loads(pickle.dumps(stored))) is dict
    assert stored["features.0.weight"] is not stored["features.0.weight"]  # read anew, kept by nobody
    with pytest.raises(KeyError):
        stored["nothing"]


def test_weights_are_in_the_checksum_whatever_a_payload_is_called(tiny: Tiny, jobs: list[Job], tmp_path: Path) -> None:
    spool = DiskSpool(tmp_path)
    spool.keep(jobs[0], replace(update_of(tiny.local(jobs[0])), payload={"update": {"w": torch.zeros(1)}}))
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    place = next(place for place, one in tensors.items() if json.loads(place)[0] == "state" and one.numel())
    save_file({**tensors, place: tensors[place] + 1}, path, about)
    assert spool.recall(jobs[0]) is None


def test_other_weights_are_another_job_whatever_a_payload_is_called(
    tiny: Tiny, jobs: list[Job], tmp_path: Path
) -> None:
    spool, job = DiskSpool(tmp_path), replace(jobs[0], payload={"sent": {"w": torch.zeros(1)}})
    spool.keep(job, update_of(tiny.local(jobs[0])))
    assert spool.recall(job) is not None
    assert spool.recall(replace(job, state={key: tensor + 1 for key, tensor in job.state.items()})) is None


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_durable_is_on_disk_before_it_is_used(
    tiny: Tiny, jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    spool = DiskSpool(tmp_path, durable)
    spool.keep(jobs[0], update_of(tiny.local(jobs[0])))
    assert len(synced) == (2 if durable else 0)  # the file and its folder
    assert spool.recall(jobs[0]) is not None
