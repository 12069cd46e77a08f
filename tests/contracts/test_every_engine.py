"""What every engine promises: an outcome for every job, the same bytes everywhere, and no failure that spreads."""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import Tiny
from engines.jobs import Number, fill, hang_or_answer, lock, process, stop
from feddf.config import with_values
from feddf.config.names import METHODS
from feddf.engines import Processes, in_process, processes
from feddf.rounds import run_round
from feddf.states import digest
from feddf.types import Engine, Failure

pytestmark = pytest.mark.xdist_group("engines")  # all that need the Ray cluster are in one process
pytest_plugins = ["engines.ray_cluster"]

ENGINES = {"in_process": None, "one process": "one_worker", "two processes": "two_workers", "ray": "ray_engine"}


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Processes]:
    with Processes(1) as opened:
        yield opened


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Processes]:
    with Processes(2) as opened:
        yield opened


@pytest.fixture(params=ENGINES, scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine; all tests share its workers, because starting one takes longer than most tests."""
    fixture = ENGINES[request.param]
    return in_process if fixture is None else request.getfixturevalue(fixture)


def square_or_raise(job: Number) -> int:
    if job.value % 3 == 0:
        raise ValueError(f"{job.value} is a multiple of three\nsecond line")
    return job.value**2


def threads_and_data(job: Number, data: Tensor) -> tuple[int, int]:
    return torch.get_num_threads(), int(data.sum()) + job.value


def test_every_job_has_one_outcome(engine: Engine) -> None:
    outcomes = list(engine(square_or_raise, [Number(i) for i in range(10)]))
    results = sorted(outcome for outcome in outcomes if isinstance(outcome, int))
    failures = {outcome.client_id: outcome.reason for outcome in outcomes if isinstance(outcome, Failure)}
    assert results == [1, 4, 16, 25, 49, 64]
    assert failures == {f"n{i}": f"ValueError: {i} is a multiple of three" for i in (0, 3, 6, 9)}


def test_no_jobs_no_outcomes(engine: Engine) -> None:
    assert list(engine(square_or_raise, [])) == []


def test_one_thread_and_the_data_that_the_function_holds(engine: Engine) -> None:
    before = torch.get_num_threads()
    function = partial(threads_and_data, data=torch.arange(1000))
    for _ in range(2):
        assert sorted(engine(function, [Number(i) for i in range(4)])) == [(1, 499500 + i) for i in range(4)]
    assert torch.get_num_threads() == before


def test_an_engine_can_be_left_in_the_middle_and_used_again(engine: Engine) -> None:
    for _ in range(2):
        for outcome in engine(square_or_raise, [Number(i) for i in (1, 2, 4, 5, 7)]):
            assert outcome in (1, 4, 16, 25, 49)
            break
    assert sorted(engine(square_or_raise, [Number(1), Number(2)])) == [1, 4]


@dataclass(frozen=True)
class Sent:
    value: int
    state: dict[str, Tensor]

    @property
    def id(self) -> str:
        return f"s{self.value}"


def total_or_die(job: Sent) -> tuple[int, float]:
    if job.value == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return job.value, float(job.state["w"].sum())


def test_every_job_has_the_state_that_it_was_sent(engine: Engine) -> None:
    for call in range(3):  # of an earlier call's states nothing is left, though ids may be the same
        one, two = ({"w": torch.full((50,), float(10 * call + k))} for k in range(2))
        jobs = [Sent(k, {"w": torch.full((50,), -1.0)} if k == 6 else (one, two)[k % 2]) for k in range(10) if k != 5]
        expected = [(k, -50.0 if k == 6 else 50.0 * (10 * call + k % 2)) for k in range(10) if k != 5]
        assert sorted(engine(total_or_die, jobs)) == expected


def spoil_and_total(job: Sent) -> float:
    total = float(job.state["w"].sum())
    job.state["w"].zero_()
    return total


def test_shared_weights_are_sent_once_and_are_each_jobs_own(
    one_worker: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def send(pipe: Connection, content: bytes) -> None:
        sizes.append(len(content))
        as_before(pipe, content)

    as_before = Connection.send_bytes
    state = {"w": torch.ones(100_000)}
    list(one_worker(spoil_and_total, [Sent(0, state)]))
    monkeypatch.setattr(Connection, "send_bytes", send)
    assert list(one_worker(spoil_and_total, [Sent(k, state) for k in range(5)])) == [100_000.0] * 5
    assert sum(sizes) < 2 * 400_000


def test_a_new_worker_is_sent_what_the_dead_one_knew(one_worker: Processes) -> None:
    state = {"w": torch.ones(50)}
    outcomes = list(one_worker(total_or_die, [Sent(k, state) for k in (3, 4, 5, 6, 7)]))
    assert [outcome for outcome in outcomes if not isinstance(outcome, Failure)] == [(k, 50.0) for k in (3, 4, 6, 7)]
    assert [outcome.client_id for outcome in outcomes if isinstance(outcome, Failure)] == ["s5"]


CHANGES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "feddf": {},
    "feddf each batch, certainty": {"ensemble.cache": False, "ensemble.weights": "certainty"},
    "feddf swag, held out": {
        "ensemble.swag_samples": 2,
        "distill.early_stopping": "held-out-loss",
        "distill.held_out": 0.25,
        "distill.init": "best",
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_round_has_the_same_bytes_on_every_engine(engine: Engine, tiny: Tiny, name: str) -> None:
    settings = with_values(tiny.settings, {"fusion.method": name.split()[0], **CHANGES[name]})
    method = METHODS[settings.fusion.method]
    closed, plain = (
        run_round(
            tiny.server,
            tiny.federation,
            engine=one,
            train=tiny.local,
            fuse=method(tiny.resources, settings, one),
        )
        for one in (engine, in_process)
    )
    assert not closed.failures
    assert digest(closed.server.models) == digest(plain.server.models)


def die_or_answer(job: Number) -> int:
    if job.value == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_a_worker_that_dies_is_one_failure_and_is_replaced(two_workers: Processes) -> None:
    outcomes = list(two_workers(die_or_answer, [Number(i) for i in range(6)]))
    assert [o.client_id for o in outcomes if isinstance(o, Failure)] == ["n2"]
    assert [o.reason for o in outcomes if isinstance(o, Failure)] == ["its worker process died (exit code -9)"]
    pids = {o for o in outcomes if isinstance(o, int)}
    assert os.getpid() not in pids
    again = list(two_workers(die_or_answer, [Number(i) for i in (3, 4, 5)]))
    assert all(isinstance(o, int) for o in again)
    assert set(again) & pids  # workers are kept from call to call


def test_a_stopped_worker_is_continued_and_no_result_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a deadline a round would wait for ever for a worker that somebody stopped: at work, or before it."""
    monkeypatch.setattr(processes, "LOOK", 0.05)
    with Processes(2) as engine:
        with ended_after(60, engine):
            assert sorted(engine(stop, [Number(i) for i in range(5)])) == [0, 1, 2, 3, 4]
            for worker in engine._team:
                os.kill(worker._process.pid or 0, signal.SIGSTOP)
            jobs = [Weighed(i, torch.full((1 << 20,), float(i))) for i in range(4)]  # more than a pipe holds
            assert sorted(engine(first_value, jobs)) == [0.0, 1.0, 2.0, 3.0]
        for worker in engine._team:
            os.kill(worker._process.pid or 0, signal.SIGSTOP)


@contextmanager
def ended_after(seconds: float, engine: Processes) -> Iterator[None]:
    """Kill the workers where a block takes too long, so that it fails and does not hang."""
    timer = threading.Timer(seconds, lambda: [worker._process.kill() for worker in engine._team])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True)
class Weighed:
    value: int
    tensor: Tensor

    @property
    def id(self) -> str:
        return f"w{self.value}"


def first_value(job: Weighed) -> float:
    return float(job.tensor[0])


@pytest.mark.parametrize("killed", [False, True])
def test_a_worker_without_memory_is_one_failure(killed: bool, two_workers: Processes) -> None:
    """An allocation that is refused costs the job, and a worker that the kernel kills for it is replaced."""
    outcomes = list(two_workers(partial(fill, killed=killed), [Number(i) for i in range(6)]))
    assert sorted(one for one in outcomes if isinstance(one, int)) == [0, 1, 3, 4, 5]
    (failure,) = (one for one in outcomes if isinstance(one, Failure))
    assert failure.client_id == "n2"
    assert ("died (exit code -9)" if killed else "memory") in failure.reason
    assert len(set(two_workers(process, [Number(i) for i in range(40)]))) == 2


def test_a_late_job_is_one_failure_and_the_others_are_not_held_up(two_workers: Processes) -> None:
    list(two_workers(hang_or_answer, [Number(0), Number(2)]))  # start-up is not the clients' time
    outcomes = list(two_workers.within(2.0)(hang_or_answer, [Number(i) for i in range(5)]))
    assert sorted(o for o in outcomes if isinstance(o, int)) == [0, 2, 3, 4]
    assert [o for o in outcomes if isinstance(o, Failure)] == [Failure("n1", "late: no answer within 2 s")]
    assert isinstance(outcomes[-1], Failure)


def test_a_result_that_cannot_travel_is_the_jobs_failure(one_worker: Processes) -> None:
    bad, good = list(one_worker(lock, [Number(1), Number(0)]))
    assert isinstance(bad, Failure)
    assert "pickle" in bad.reason
    assert good == "fine"


def of_size(job: Number) -> tuple[Tensor, str]:
    return torch.full((job.value,), job.value % 256, dtype=torch.uint8), "end"


def test_results_of_any_size_follow_one_another(one_worker: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is written over the one before it, and a very large one's memory is given back."""
    monkeypatch.setattr(processes, "MOST_KEPT", 50_000)
    for size, kept in ((10, False), (90_000, False), (0, False), (40_000, True), (3, True)):
        ((tensor, word),) = one_worker(of_size, [Number(size)])
        assert (len(tensor), set(tensor.tolist()) - {size % 256}, word) == (size, set(), "end")
        tensor += 1  # it is the caller's own
        file = one_worker._team[0]._results.fileno()
        assert (os.fstat(file).st_size >= 40_000) == kept


def test_a_result_that_was_cut_short_is_the_jobs_failure(
    one_worker: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(file: Any) -> object:
        os.ftruncate(file.fileno(), 5_000)
        return pickle.Unpickler(file).load()

    with monkeypatch.context() as patched:
        patched.setattr(processes.pickle, "load", cut)
        (failure,) = one_worker(of_size, [Number(90_000)])
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("its result cannot be read: ")
    ((tensor, _),) = one_worker(of_size, [Number(90_000)])
    assert len(tensor) == 90_000


def test_results_lie_in_files_that_end_with_their_workers() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with Processes(1) as engine:
        ((tensor, _),) = engine(of_size, [Number(90_000)])
        assert len(tensor) == 90_000
        assert len(list(engine(partial(fill, killed=True), [Number(2), Number(3)]))) == 2
    assert len(set(Path("/proc/self/fd").iterdir()) - before) == 0


def test_workers_can_be_ended_before_all_outcomes_are_read() -> None:
    engine = Processes(2)
    outcomes = engine(square_or_raise, [Number(number) for number in (1, 2, 4)])
    assert next(outcomes) in (1, 4)
    engine.close()
    outcomes.close()  # type: ignore[attr-defined]
    assert list(engine(square_or_raise, [Number(5)])) == [25]
    engine.close()


def write_at_the_end(job: Number, folder: Path) -> None:
    atexit.register((folder / job.id).write_text, "")


def test_idle_workers_end_by_themselves(tmp_path: Path) -> None:
    """Some things, such as a compiler's semaphores, are given back only when a process ends."""
    with Processes(2) as engine:
        list(engine(partial(write_at_the_end, folder=tmp_path), [Number(1), Number(2)]))
        assert not list(tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n1", "n2"]


def test_workers_end_with_the_server(tmp_path: Path) -> None:
    """A server that is killed leaves no worker behind, even one in the middle of a job."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from engines.jobs import Number\n"
        "from test_every_engine import report_and_hang\n"
        "from feddf.engines import Processes\n"
        "if __name__ == '__main__':\n"
        "    list(Processes(2)(report_and_hang, [Number(0), Number(1)]))\n"
    )
    script = tmp_path / "server.py"
    script.write_text(code)
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    server = subprocess.Popen([sys.executable, str(script), str(here)], stdout=subprocess.PIPE, env=environment)
    assert server.stdout is not None
    workers = [int(server.stdout.readline()) for _ in range(2)]
    watches = [os.pidfd_open(pid) for pid in workers]
    server.kill()
    server.wait()
    for watch in watches:  # a pidfd is readable once its process has ended
        assert select.select([watch], [], [], 30)[0], "a worker outlived its server"
        os.close(watch)


def report_and_hang(job: Number) -> None:
    os.write(1, f"{os.getpid()}\n".encode())
    threading.Event().wait()
