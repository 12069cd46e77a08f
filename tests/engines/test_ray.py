"""Ray for real: clusters on this machine, of one node and of several, of which one is killed.

What it promises like every engine is in tests/contracts/test_every_engine.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from feddf.runs.config import parse

from conftest import make_tiny
from feddf.engines import RayError, RayWorkers, in_process
from feddf.fusion import FUSIONS
from feddf.rounds import play
from feddf.runs import RunFolder, build
from feddf.runs import play as play_run
from feddf.states import digest
from feddf.types import Failure

pytestmark = pytest.mark.xdist_group("engines")  # one Ray cluster at a time
cluster_utils = pytest.importorskip("ray.cluster_utils")


@dataclass(frozen=True)
class Number:
    value: int

    @property
    def id(self) -> str:
        return f"n{self.value}"


def lock(job: Number) -> object:
    return threading.Lock() if job.value else "fine"


def die_once(job: Number, folder: str) -> str:
    """The first to try dies with its process; whoever comes after it does not."""
    marker = Path(folder) / job.id
    if job.value == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return job.id


def always_die(job: Number) -> int:
    if job.value == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return job.value


def hang_or_answer(job: Number) -> int:
    if job.value == 1:
        threading.Event().wait()
    return job.value


@pytest.fixture(scope="module")
def engine() -> Iterator[RayWorkers]:
    with RayWorkers(2) as opened:
        yield opened


@contextmanager
def away(engine: RayWorkers) -> Iterator[None]:
    """A process has one Ray cluster at a time: leave the module's own for another."""
    engine.__exit__()
    try:
        yield
    finally:
        engine.__enter__()


def test_a_result_that_cannot_travel_is_the_jobs_failure(engine: RayWorkers) -> None:
    outcomes = list(engine(lock, [Number(0), Number(1)]))
    assert "fine" in outcomes
    (failure,) = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert failure.client_id == "n1"


def test_the_job_of_a_worker_that_died_is_run_again(engine: RayWorkers, tmp_path: Path) -> None:
    function = partial(die_once, folder=str(tmp_path))
    assert sorted(engine(function, [Number(i) for i in range(4)])) == ["n0", "n1", "n2", "n3"]


def test_a_job_that_kills_every_worker_is_given_up(engine: RayWorkers) -> None:
    outcomes = list(engine(always_die, [Number(i) for i in range(4)]))
    assert sorted(o for o in outcomes if isinstance(o, int)) == [0, 1, 3]
    (failure,) = [o for o in outcomes if isinstance(o, Failure)]
    assert (failure.client_id, failure.reason.startswith("its worker died 3 times")) == ("n2", True)


def test_a_late_job_is_ended_and_the_others_are_not(engine: RayWorkers) -> None:
    outcomes = list(engine.within(3.0)(hang_or_answer, [Number(i) for i in range(4)]))
    assert sorted(o for o in outcomes if isinstance(o, int)) == [0, 2, 3]
    (failure,) = [o for o in outcomes if isinstance(o, Failure)]
    assert failure == Failure("n1", "late: no answer within 3 s")


CONFIG: dict[str, Any] = {
    "data": "toy", "pool": "plane", "prototypes": ["mlp"], "clients": 4, "rounds": 2, "local_epochs": 2,
    "distill_steps": 20, "distill_threads": 1,
}  # fmt: skip


def test_a_configuration_ends_with_the_same_bytes_on_every_engine(tmp_path: Path, engine: RayWorkers) -> None:
    found = set()
    with away(engine):
        for name in ("in-process", "processes", "ray"):
            parts = build(parse({**CONFIG, "engine": name, "workers": 2}))
            folder = RunFolder.create(tmp_path / name, parts.experiment)
            list(play_run(parts, folder))
            server, _ = folder.latest()
            assert server is not None
            found.add(digest(server.models))
    assert len(found) == 1


def test_a_node_killed_in_mid_round_changes_nothing(engine: RayWorkers) -> None:
    """A head without CPUs and two nodes, all processes of their own; one node goes while its client is training."""
    tiny = make_tiny(clients=8, fraction=1.0)
    plain = play(tiny.server, tiny.federation, engine=in_process, train=tiny.local, fuse=FUSIONS["fedavg"](tiny.kit))
    with away(engine):
        cluster = cluster_utils.Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
            cluster.wait_for_nodes()
            with RayWorkers(2, address=cluster.address) as workers:

                def killing(function: Any, jobs: Any, /) -> Iterator[Any]:
                    for number, outcome in enumerate(workers(function, jobs)):
                        if number == 1:
                            cluster.remove_node(nodes[0], allow_graceful=False)  # SIGKILL
                        yield outcome

                fuse = FUSIONS["fedavg"](tiny.kit)
                closed = play(tiny.server, tiny.federation, engine=killing, train=tiny.local, fuse=fuse)
        finally:
            cluster.shutdown()
    assert not closed.failures
    assert digest(closed.server.models) == digest(plain.server.models)


def test_no_cluster_at_an_address_is_one_line(engine: RayWorkers) -> None:
    nowhere = RayWorkers(1, address="127.0.0.1:1")
    with away(engine), pytest.raises(RayError, match=r"no Ray cluster answers at 127.0.0.1:1: Connection refused"):
        nowhere.__enter__()


def test_a_cluster_that_the_process_has_already_is_used_and_left_alone(engine: RayWorkers) -> None:
    with RayWorkers(1) as second:
        assert list(second(hang_or_answer, [Number(2)])) == [2]
    assert list(engine(hang_or_answer, [Number(2)])) == [2]
    with pytest.raises(RayError, match="connected to a Ray cluster already"):
        RayWorkers(1, address="127.0.0.1:1").__enter__()


def test_the_servers_own_signal_handler_stays(engine: RayWorkers) -> None:
    """Ray puts another one in its place, under which a run would not stop in a safe state."""

    def mine(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with away(engine), RayWorkers(1):
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
