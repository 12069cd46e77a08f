"""A job, wherever it runs: one that fails is a failure and nothing else; and how jobs and results become bytes."""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from feddf import batches
from feddf.config.errors import first_line, reason
from feddf.runtime.device import is_out_of_memory, present, release_reserve, threads
from feddf.types import Failure, J, OutOfMemory, R

Pack = Callable[[Any], bytes]


def in_process(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
    """Run the jobs here, each on one torch thread. A job that raises becomes a failure."""
    for job in jobs:
        with threads(1):
            outcome = attempt(function, job)
        yield outcome


def attempt(function: Callable[[J], R], job: J) -> R | Failure:
    """Return the function's result, or the one-line reason why there is none."""
    try:
        return function(job)
    except (Exception, SystemExit) as error:  # a client that calls exit() does not end the server
        if not is_out_of_memory(error):
            return Failure(job.id, reason(error))
        complaint = first_line(error)
    data = batches.resident_bytes() / 2**20
    batches.forget()  # after the error, which holds the tensors of the job
    release_reserve(*present())
    lower = "lower run.workers, local.batch_size or distill.batch_size"
    taken = f"data that stay on the device take {data:.0f} MiB"
    return OutOfMemory(job.id, f"the device's memory is full: {lower}; {taken} ({complaint})")


def obstacle(thing: object, *, elsewhere: bool = False) -> str | None:
    """Return why a value cannot be sent to a worker process, or ``None``.

    What an interactive session defines (a notebook, a prompt) is in no file that a worker could import; the main script
    can be imported by processes that it starts, but not by workers that run ``elsewhere``.
    """
    try:
        content = pickle.dumps(thing)
    except Exception as error:
        return f"{reason(error)}; make it a function or class of a module"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if b"__main__" in content and (elsewhere or not script or not Path(script).is_file()):
        return "it is defined in the main program, which they cannot import; put it into a module"
    return None


class PlainPickler(pickle.Pickler):
    """Pickles tensors as NumPy arrays, ten times as fast as torch does: a state has dozens of small ones."""

    def reducer_override(self, thing: Any) -> Any:
        """Return how a tensor of plain numbers is made again; other things are pickled as ever."""
        if type(thing) is torch.Tensor and thing.dtype in _NUMPY and thing.is_contiguous() and not thing.requires_grad:
            return torch.from_numpy, (thing.numpy(),)
        return NotImplemented


_NUMPY = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool}


def packed(thing: Any) -> bytes:
    """Return a thing as bytes; to read them is to trust where they come from."""
    buffer = io.BytesIO()
    PlainPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()


class SharedStates:
    """The weights that several of these jobs are sent: packed once, and sent once to each place where they are needed.

    The jobs must stay alive meanwhile: a state's name is its ``id``, which is unique within a ``call`` of an engine.
    ``put`` is what becomes of a state's bytes. :func:`carry_out` joins the parts again.
    """

    _calls = count()

    def __init__(self, jobs: Sequence[Any], put: Callable[[bytes], Any] = bytes) -> None:
        self.call, self._put = next(self._calls), put
        self._counts = Counter(id(job.state) for job in jobs if _has_state(job))
        self._kept: dict[int, Any] = {}

    def apart(self, job: Any) -> tuple[bytes, int | None]:
        """Return a job without its state, as bytes, and the state's name; a job whose state is its own stays whole."""
        if not _has_state(job) or self._counts[id(job.state)] < 2:
            return packed(job), None
        return packed(replace(job, state={})), id(job.state)

    def of(self, job: Any) -> Any:
        """Return the state of a job as it was put."""
        if id(job.state) not in self._kept:
            self._kept[id(job.state)] = self._put(packed(job.state))
        return self._kept[id(job.state)]


def _has_state(job: Any) -> bool:
    return is_dataclass(job) and type(getattr(job, "state", None)) is dict


def loaded(body: bytes) -> Callable[[Any], Any]:
    """Return a worker's copy of a function; if it cannot be loaded, every job says why."""
    try:
        function: Callable[[Any], Any] = pickle.loads(body)
    except Exception as error:  # for instance a class that only the main script's guarded part defines
        why = f"its work cannot be loaded in a worker process (put it into a module): {reason(error)}"

        def function(job: Any) -> Any:
            raise RuntimeError(why)

    return function


def carry_out(function: Callable[[Any], Any], rest: bytes, state: bytes | None, pack: Pack = packed) -> bytes:
    """Run a job in a worker, with a copy of its state as if sent for it alone; return its outcome, packed."""
    job = pickle.loads(rest)
    if state is not None:
        job = replace(job, state=pickle.loads(state))
    outcome = attempt(function, job)
    try:
        return pack(outcome)
    except Exception as error:  # a result that cannot travel is the job's failure, not the worker's
        return pack(Failure(job.id, f"its result cannot travel: {reason(error)}"))
