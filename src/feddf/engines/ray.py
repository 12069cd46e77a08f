"""Work on a Ray cluster: warm actors with one torch thread each. Needs the extra ``ray``.

What a function holds (data sets, the pool) and the weights that several clients are sent are put into Ray's object
store once; from there each node takes them once. An actor that dies, with its node or alone, is replaced where there is
room, and its job is run again elsewhere: every job is a pure function of what it is given, so the result is the same to
the bit.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feddf.config.errors import FeddfError, first_line
from feddf.engines.jobs import SharedStates, carry_out, loaded, packed
from feddf.runtime.device import WORKERS_A_DEVICE
from feddf.runtime.packages import keep_freed_memory
from feddf.types import Engine, Failure, J, R

Packed = NDArray[np.uint8]
"""Bytes as an array: Ray shares arrays between the processes of a node without copying them."""


class RayError(FeddfError):
    """Ray cannot be used as asked; the message says why."""


class RayWorkers:
    """An engine of actors on a Ray cluster: the one at ``address``, or one started on this machine for the occasion.

    ``workers`` is the number of actors, one CPU each (default: as many as the cluster has); with ``gpus`` they also
    share the cluster's GPUs (default: two actors each), and Ray shows each of them its own. ``tries`` is how often a
    job is begun whose worker dies under it. Use it as a context manager::

        with RayWorkers(address="auto") as engine:
            results = list(engine(function, jobs))
    """

    def __init__(
        self, workers: int | None = None, address: str | None = None, tries: int = 3, *, gpus: bool = False
    ) -> None:
        self._wanted, self._address, self._tries, self._gpus = workers, address, tries, gpus
        self._team: list[Any] = []  # handles of actors
        self._functions: dict[int, tuple[Callable[..., Any], Any]] = {}  # by their ids, with references to their copies

    def __enter__(self) -> RayWorkers:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            raise RayError("run.engine = 'ray' needs Ray: pip install 'feddf[ray]'") from error
        self._own = not self._ray.is_initialized()
        if self._own:
            self._connect()
        elif self._address is not None:
            raise RayError("this process is connected to a Ray cluster already; leave run.ray_address out to use it")
        self._resources: dict[str, float] = {"num_cpus": 1}
        if self._gpus:
            whole = self._ray.cluster_resources()
            self._wanted = self._wanted or int(min(whole.get("CPU", 1), WORKERS_A_DEVICE * whole.get("GPU", 0)))
            self._resources["num_gpus"] = gpu_share(whole.get("GPU", 0), max(1, self._wanted))
        return self

    def _connect(self) -> None:
        if self._address is not None:
            _call(self._address)  # Ray itself would try for many minutes
        paths = os.pathsep.join(path for path in sys.path if path)  # a user's own modules, where the disk is shared
        options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": paths}}, "log_to_driver": False}
        if self._address is None:
            options |= {"num_cpus": self._wanted or os.cpu_count() or 1, "include_dashboard": False}
        with _own_signals():
            try:
                self._ray.init(address=self._address or "local", logging_level="ERROR", **options)
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                where = self._address or "this machine"
                raise RayError(f"no Ray cluster answers at {where}: {first_line(error)}") from error

    def __exit__(self, *error: object) -> None:
        for actor in self._team:
            self._drop(actor)
        self._team, self._functions = [], {}
        if self._own:
            with _own_signals():
                self._ray.shutdown()

    def __call__(
        self, function: Callable[[J], R], jobs: Sequence[J], /, deadline: float | None = None
    ) -> Iterator[R | Failure]:
        """Run the jobs on the actors; yield each outcome as it comes."""
        number, states = id(function), SharedStates(jobs, self._put)
        if number not in self._functions:
            self._functions[number] = function, self._put(packed(function))
        _, body = self._functions[number]
        waiting = deque(_Task(job) for job in jobs)
        busy: dict[Any, _Task] = {}  # by the reference of the answer to come
        self._fill(len(jobs))
        try:
            while waiting or busy:
                free = [actor for actor in self._team if all(actor is not task.actor for task in busy.values())]
                for actor in free[: len(waiting)]:
                    task = waiting.popleft()
                    rest, name = states.apart(task.job)
                    task.actor, task.ready = actor, actor.know.remote(number, body)
                    state = None if name is None else states.of(task.job)
                    busy[actor.work.remote(number, _array(rest), state)] = task
                for answer, task in self._ended(busy, deadline):
                    outcome = self._outcome(answer, task, waiting, deadline)
                    if outcome is not _AGAIN:
                        yield outcome
        finally:
            for task in busy.values():  # the caller went away in mid-round: nothing may answer for an old job later
                self._drop(task.actor)

    def within(self, deadline: float) -> Engine:
        """Return this engine with a limit of ``deadline`` seconds a job; later is too late."""
        return partial(self, deadline=deadline)

    def _put(self, content: bytes) -> Any:
        return self._ray.put(_array(content))

    def _fill(self, jobs: int) -> None:
        """Start actors as there are jobs and CPUs for them; one is always started, and waits for a CPU if it must."""
        room = int(self._ray.available_resources().get("CPU", 0))
        most = min(self._wanted or sys.maxsize, jobs)
        for _ in range(max(min(most - len(self._team), room), 0 if self._team else min(1, jobs))):
            self._team.append(self._ray.remote(**self._resources, max_restarts=0)(_Worker).remote())

    def _ended(self, busy: dict[Any, _Task], deadline: float | None) -> Iterator[tuple[Any, _Task]]:
        """Wait until a worker has answered, died or run out of time; yield and remove all of which that is true."""
        if deadline is not None:
            for task in busy.values():
                if task.started is None and self._ray.wait([task.ready], timeout=0)[0]:
                    task.started = time.monotonic()  # its data have arrived: now its time runs
        answered = set(self._ray.wait(list(busy), timeout=None if deadline is None else min(0.05, deadline))[0])
        now = time.monotonic()
        for answer, task in list(busy.items()):
            late = deadline is not None and task.started is not None and now - task.started >= deadline
            if answer in answered or late:
                del busy[answer]
                yield answer if answer in answered else None, task

    def _outcome(self, answer: Any, task: _Task, waiting: deque[_Task], deadline: float | None) -> Any:
        """Return a job's outcome; a late or dead worker is replaced, and a job whose worker died begins again."""
        if answer is not None:
            try:
                return pickle.loads(self._ray.get(answer).tobytes())
            except self._ray.exceptions.RayError as error:
                kind = type(error).__name__
        self._drop(task.actor)
        self._fill(len(waiting) + 1)
        if answer is None:
            return Failure(task.job.id, f"late: no answer within {deadline:g} s")
        if task.number >= self._tries:
            return Failure(task.job.id, f"its worker died {task.number} times ({kind})")
        waiting.append(_Task(task.job, task.number + 1))
        return _AGAIN

    def _drop(self, actor: Any) -> None:
        self._team = [other for other in self._team if other is not actor]
        with suppress(Exception):  # it is dead, or the cluster is: both are what was wanted
            self._ray.kill(actor, no_restart=True)


_AGAIN = object()  # not an outcome: the job is run again


@dataclass(eq=False)
class _Task:
    job: Any
    number: int = 1
    actor: Any = None
    ready: Any = None
    started: float | None = None


class _Worker:
    """The actor's side: it keeps every function that it was ever sent."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._functions: dict[int, Any] = {}

    def know(self, number: int, body: Packed) -> None:
        """Load a function, if it is new."""
        if number not in self._functions:
            self._functions[number] = loaded(body.tobytes())

    def work(self, number: int, job: Packed, state: Packed | None) -> Packed:
        """Run a job; whatever it raises is its failure, and not the actor's."""
        return _array(carry_out(self._functions[number], job.tobytes(), None if state is None else state.tobytes()))


def gpu_share(gpus: float, workers: float) -> float:
    """Return how much of a GPU each worker asks for: its share, and never more than one.

    >>> gpu_share(2, 4), gpu_share(1, 3), gpu_share(8, 4)
    (0.5, 0.3333, 1.0)
    """
    if gpus < 1:
        raise RayError("run.device is a GPU, and the Ray cluster has none")
    return min(1.0, int(gpus / workers * 10_000) / 10_000)  # Ray counts in ten-thousandths


def _array(content: bytes) -> Packed:
    return np.frombuffer(content, np.uint8)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray puts one of its own there, under which a run would not end in a safe state."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _call(address: str) -> None:
    """Raise if nothing listens at a ``host:port``; other forms ("auto", "ray://...") are left to Ray."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise RayError(f"no Ray cluster answers at {address}: {error.strerror or error}") from error
