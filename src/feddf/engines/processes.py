"""Persistent worker processes with one torch thread each.

What a function holds (data sets, the pool) goes to each worker once, through shared memory. Jobs travel as bytes, and
results through a file without a name, whose pages each writes over: a pipe would hand a model over in a hundred pieces.
A worker that dies or is late is replaced, and its job becomes a failure.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import connection, forkserver
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import torch
import torch.multiprocessing as multiprocessing

from feddf.config.errors import reason
from feddf.engines.jobs import PlainPickler, SharedStates, carry_out, loaded, packed
from feddf.runtime.device import this_is_worker
from feddf.runtime.packages import keep_freed_memory
from feddf.types import Engine, Failure, J, R, WorkerDied

START = "forkserver" if sys.platform == "linux" else "spawn"
"""How workers start: a fork of a process with running threads can hang, and so does one of Apple's libraries. On Linux
they are forks of one that has imported everything and computed nothing: they share its pages, and import nothing."""
PRELOADED = ["feddf.engines.processes", "feddf.runs.run"]
MOST_KEPT = 1 << 26  # bytes of a result that was read that stay in memory to be overwritten
LOOK = 5.0  # seconds between two looks whether a worker was stopped


class Processes:
    """An engine of ``workers`` processes, started at the first use and kept until :meth:`close`.

    Use it as a context manager, and make a function once, not for every call: workers keep what they know::

        with Processes(workers=2) as engine:
            results = list(engine(function, jobs))
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        start_early()
        self._team: list[_Worker] = []
        self._functions: dict[int, Callable[..., Any]] = {}  # by their ids, which are theirs while they are kept alive

    def __call__(
        self, function: Callable[[J], R], jobs: Sequence[J], /, deadline: float | None = None
    ) -> Iterator[R | Failure]:
        """Run the jobs on the workers; yield each outcome as it comes."""
        self._functions[id(function)] = function
        states, waiting = SharedStates(jobs), deque(jobs)
        busy: dict[_Worker, J] = {}
        while len(self._team) < min(self.workers, len(jobs)):
            free = set(range(self.workers)) - {worker.number for worker in self._team}
            self._team.append(_Worker(min(free)))  # devices are dealt by number, so that each has as many workers
            if len(self._team) == 1:
                threading.Thread(target=self._wake, daemon=True).start()
        try:
            while waiting or busy:
                for worker in self._team:
                    if waiting and worker not in busy:
                        busy[worker] = waiting.popleft()
                        worker.start(function, busy[worker], states)
                for worker in _first(busy, deadline):
                    outcome = worker.outcome(busy[worker], deadline)
                    if outcome is _READY:
                        continue
                    del busy[worker]
                    if not worker.alive:
                        number = self._team.index(worker)
                        self._team[number] = worker = _Worker(worker.number)
                    if waiting:  # before the caller looks at the outcome, which takes a while
                        busy[worker] = waiting.popleft()
                        worker.start(function, busy[worker], states)
                    yield outcome
        finally:
            for worker in busy:  # the caller went away in mid-round: nothing may answer for an old job later
                worker.kill()
            self._team = [worker for worker in self._team if worker not in busy]

    def _wake(self) -> None:
        """Let workers go on that were stopped from outside (SIGSTOP): without a deadline a round would never end."""
        time.sleep(LOOK)
        while self._team:
            for worker in list(self._team):
                worker.wake()
            time.sleep(LOOK)

    def within(self, deadline: float) -> Engine:
        """Return this engine with a limit of ``deadline`` seconds a job; later is too late."""
        return partial(self, deadline=deadline)

    def close(self) -> None:
        """End all workers; an idle one ends by itself and gives back what it holds (a compiler's semaphores)."""
        for worker in self._team:
            if worker.idle:
                worker.pipe.close()
        latest = time.monotonic() + 5.0  # for all of them together
        for worker in self._team:
            worker.end_by(latest)
        self._team = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start_early() -> None:
    """Start the process that workers are forks of, if it is not there: it imports while others go on."""
    if START == "forkserver":
        multiprocessing.get_context(START).set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


def _first(busy: dict[_Worker, Any], deadline: float | None) -> list[_Worker]:
    """Wait until a worker has said something, died or run out of time; return all of which that is true."""
    ends = {worker: worker.started + (math.inf if deadline is None else deadline) for worker in busy}
    soonest = min(ends.values())
    patience = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
    ready = set(connection.wait([worker.pipe for worker in busy], patience))  # a dead worker's pipe is ready too
    now = time.monotonic()
    return [worker for worker in busy if worker.pipe in ready or now >= ends[worker]]


_READY = object()  # what :meth:`_Worker.outcome` returns when its worker only says that it has all that it needs


class _Worker:
    """One process, and this side's end of the pipe to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        context: Any = multiprocessing.get_context(START)
        self.pipe, theirs = context.Pipe()
        with TemporaryFile() as file:  # a Connection is what multiprocessing knows how to send
            self._results = connection.Connection(os.dup(file.fileno()))
        self._process = context.Process(None, _serve, "feddf-worker", (theirs, number, self._results), daemon=True)
        self._process.start()
        theirs.close()
        self._functions: set[int] = set()  # that it has, and the shared states of the last call
        self._states: tuple[int, set[int | None]] = -1, {None}
        self.started = math.inf  # when the present job began; the worker's start and the loading of data do not count
        self.alive, self.idle = True, False  # one that is starting has nothing to give back

    def start(self, function: Callable[..., Any], job: Any, states: SharedStates) -> None:
        new, self.idle = id(function) not in self._functions, False
        self._functions.add(id(function))
        self.started = math.inf if new else time.monotonic()  # it says when it has loaded what is new
        if self._states[0] != states.call:
            self._states = states.call, {None}
        rest, name = states.apart(job)
        state = b"" if name in self._states[1] else states.of(job)
        self._states[1].add(name)
        try:
            # the tensors that a function holds move to shared memory and are not copied
            body = bytes(ForkingPickler.dumps(function, pickle.HIGHEST_PROTOCOL)) if new else b""
            self.pipe.send_bytes(packed((id(function), body, states.call, name, state, rest)))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died before it was asked: outcome() finds out and says so

    def outcome(self, job: Any, deadline: float | None) -> Any:
        try:
            said = self.pipe.recv_bytes() if self.pipe.poll() else None
        except (EOFError, OSError):  # also in the middle of a message
            self.kill()
            return WorkerDied(job.id, f"its worker process died (exit code {self._process.exitcode})")
        if said is None:
            self.kill()
            return Failure(job.id, f"late: no answer within {deadline:g} s")
        if not said:
            self.started = time.monotonic()
            return _READY
        self.idle = True
        try:
            with open(self._results.fileno(), "rb", closefd=False) as file:
                file.seek(0)
                outcome = pickle.load(file)
                if file.tell() > MOST_KEPT:
                    os.ftruncate(file.fileno(), 0)
                return outcome
        except Exception as error:
            return Failure(job.id, f"its result cannot be read: {reason(error)}")

    def wake(self) -> None:
        with suppress(OSError, IndexError):  # there is no /proc, or it has just ended
            if self.alive and Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                os.kill(self._process.pid or 0, signal.SIGCONT)

    def end_by(self, latest: float) -> None:
        """Wait for a worker whose pipe was closed, and kill it if it is late; kill any other at once."""
        if self.pipe.closed:
            self._process.join(max(0.0, latest - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        self.alive = False
        if self._process.exitcode is None:
            self._process.join(0.05)  # one that has died may not have its exit code yet
            self._process.kill()
        self._process.join()
        self.pipe.close()
        self._results.close()


def _left_in(results: connection.Connection, outcome: Any) -> bytes:
    """Write an outcome into the file that the server reads (mapped, one cut short would be a bus error); say so."""
    with open(results.fileno(), "wb", closefd=False) as file:
        file.seek(0)  # server and worker have one position in it, and take turns
        PlainPickler(file, pickle.HIGHEST_PROTOCOL).dump(outcome)
    return b"done"


def _serve(pipe: connection.Connection, number: int, results: connection.Connection) -> None:
    """The worker's loop: answer jobs until the server closes the pipe; nothing means that a new function is loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the server decides
    torch.set_num_threads(1)
    this_is_worker(number)
    keep_freed_memory()
    threading.Thread(target=_follow_parent, daemon=True).start()
    functions: dict[int, Any] = {}
    last, states = -1, dict[int, bytes]()
    while True:
        try:
            function, body, call, name, state, rest = pickle.loads(pipe.recv_bytes())
        except EOFError:
            _end()
        if call != last:
            last, states = call, {}
        if state:
            states[name] = state
        if body:
            functions[function] = loaded(body)
            pipe.send_bytes(b"")
        pipe.send_bytes(carry_out(functions[function], rest, states.get(name), partial(_left_in, results)))


def _end() -> NoReturn:
    """Run the atexit functions, and exit without the interpreter's own clean-up, which takes most of a second."""
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:  # a stream may be closed, or not be read any more
        os._exit(0)


def _follow_parent() -> None:
    """End with the server, even if it was killed while this worker was in the middle of a job."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
