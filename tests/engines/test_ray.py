"""Ray for real: a cluster on this machine, of one node and of several, of which one is killed.

What it promises like every engine is in tests/contracts/test_every_engine.py.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import make_tiny
from engines.jobs import Number, always_die, die_once, hang_or_answer, lock
from engines.ray_settings import CPUS, handler_must_stay
from feddf.config import parse
from feddf.config.keys import nested
from feddf.engines import RayError, RayWorkers, in_process
from feddf.rounds import run_round
from feddf.runs.build import build
from feddf.runs.methods import fedavg
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder, pack
from feddf.states import digest
from feddf.types import Failure

pytestmark = pytest.mark.xdist_group("engines")  # all that need the cluster are in one process
pytest_plugins = ["engines.ray_cluster"]
ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")


def test_a_result_that_cannot_travel_is_the_jobs_failure(ray_engine: RayWorkers) -> None:
    outcomes = list(ray_engine(lock, [Number(0), Number(1)]))
    assert "fine" in outcomes
    (failure,) = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert failure.client_id == "n1"


def test_the_job_of_a_worker_that_died_is_run_again(ray_engine: RayWorkers, tmp_path: Path) -> None:
    function = partial(die_once, folder=str(tmp_path))
    assert sorted(ray_engine(function, [Number(i) for i in range(4)])) == ["n0", "n1", "n2", "n3"]
    assert [path.name for path in tmp_path.iterdir()] == ["n2"]


def test_a_job_that_kills_every_worker_is_given_up(ray_engine: RayWorkers) -> None:
    outcomes = list(ray_engine(always_die, [Number(i) for i in range(4)]))
    assert sorted(outcome for outcome in outcomes if isinstance(outcome, int)) == [0, 1, 3]
    (failure,) = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert (failure.client_id, failure.reason.startswith("its worker died 2 times")) == ("n2", True)


def test_a_late_job_is_ended_and_the_others_are_not(ray_engine: RayWorkers) -> None:
    outcomes = list(ray_engine.within(2.0)(hang_or_answer, [Number(i) for i in range(4)]))
    assert sorted(outcome for outcome in outcomes if isinstance(outcome, int)) == [0, 2, 3]
    (failure,) = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert failure == Failure("n1", "late: no answer within 2 s")


CONFIG: dict[str, Any] = {
    "data": {"name": "toy"},
    "pool": {"sources": ["plane"]},
    "prototypes": ["mlp"],
    "clients": {"total": 4},
    "rounds": 2,
    "local": {"epochs": 2},
    "distill": {"steps": 20},
    "run": {"threads": 1, "workers": 1},
}


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "changes", [{}, {"fusion.parts": ["scaffold", "class-counts"]}], ids=["plain", "with payloads"]
)
def test_a_configuration_ends_with_the_same_bytes_on_every_engine(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = set()
    for name in ("in-process", "processes", "ray"):
        parts = build(parse(nested(CONFIG, {"run.engine": name, **changes})))
        folder = RunFolder.create(tmp_path / name, parts.experiment)
        list(run_experiment(parts, folder))
        server, _ = folder.latest()
        assert server is not None
        found.add(pack(server))
    assert len(found) == 1


def node_of(job: Number) -> str:
    return str(ray.get_runtime_context().get_node_id())


@pytest.fixture
def two_more_nodes(ray_engine: RayWorkers) -> Iterator[tuple[Any, list[Any]]]:
    """Two nodes of one CPU each join the cluster, while all is reserved that its workers leave of the first node."""
    reserved = ray.util.placement_group([{"CPU": CPUS - len(ray_engine._team)}])
    assert reserved.wait(60)
    cluster = cluster_utils.Cluster()
    cluster.head_node = SimpleNamespace(gcs_address=ray.get_runtime_context().gcs_address)
    try:
        yield cluster, [cluster.add_node(num_cpus=1) for _ in range(2)]
    finally:
        ray.util.remove_placement_group(reserved)
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node)


def test_a_node_killed_in_mid_round_changes_nothing(two_more_nodes: tuple[Any, list[Any]]) -> None:
    """A node is a group of processes of its own; one is killed while both work on a round."""
    cluster, nodes = two_more_nodes
    tiny = make_tiny(clients=8, fraction=1.0)
    fuse = fedavg(tiny.resources, tiny.settings, in_process)
    plain = run_round(tiny.server, tiny.federation, engine=in_process, train=tiny.local, fuse=fuse)
    with RayWorkers(2) as workers:
        while set(workers(node_of, [Number(0), Number(1)])) != {node.node_id for node in nodes}:
            time.sleep(0.1)  # until the second node's CPU is known

        def killing(function: Any, jobs: Any, /) -> Iterator[Any]:
            for number, outcome in enumerate(workers(function, jobs)):
                if number == 1:
                    cluster.remove_node(nodes[0], allow_graceful=False)  # SIGKILL
                yield outcome

        closed = run_round(tiny.server, tiny.federation, engine=killing, train=tiny.local, fuse=fuse)
    assert not closed.failures
    assert digest(closed.server.models) == digest(plain.server.models)


def test_no_cluster_at_an_address_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RayError, match=r"no Ray cluster answers at 127.0.0.1:1: Connection refused"):
        RayWorkers(1, address="127.0.0.1:1").__enter__()


def test_a_cluster_that_the_process_has_already_is_used_and_left_alone(ray_engine: RayWorkers) -> None:
    with RayWorkers(1) as second:
        assert list(second(hang_or_answer, [Number(2)])) == [2]
    assert list(ray_engine(hang_or_answer, [Number(2)])) == [2]
    with pytest.raises(RayError, match="connected to a Ray cluster already"):
        RayWorkers(1, address="127.0.0.1:1").__enter__()


def test_the_servers_own_signal_handler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster's real start and end are held to it as well, in the fixture."""

    def takes_the_handler(*words: object, **options: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", takes_the_handler)
    monkeypatch.setattr(ray, "shutdown", takes_the_handler)
    engine = RayWorkers(1)
    with handler_must_stay():
        engine.__enter__()
    with handler_must_stay():
        engine.__exit__()
