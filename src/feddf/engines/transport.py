"""How jobs and results become bytes."""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from feddf.config.errors import reason


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


class _PlainPickler(pickle.Pickler):
    """Pickles tensors as NumPy arrays, ten times as fast as torch does: a state has dozens of small ones."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor and thing.dtype in _NUMPY and thing.is_contiguous() and not thing.requires_grad:
            return torch.from_numpy, (thing.numpy(),)
        return NotImplemented


_NUMPY = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool}


def packed(thing: Any) -> bytes:
    """Return a thing as bytes; whoever reads them must trust who wrote them."""
    buffer = io.BytesIO()
    _PlainPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()


class SharedStates:
    """The weights that several of these jobs are sent: packed once, and sent once to each place where they are needed.

    The jobs must stay alive meanwhile: a state's name is its ``id``. :func:`together` joins the parts again.
    """

    def __init__(self, jobs: Iterable[Any]) -> None:
        self._counts = Counter(id(job.state) for job in jobs if _has_state(job))
        self._packed: dict[int, bytes] = {}

    def apart(self, job: Any) -> tuple[Any, int | None]:
        """Return a job without its state, and the state's name; a job whose state is its own stays whole."""
        if not _has_state(job) or self._counts[id(job.state)] < 2:
            return job, None
        return replace(job, state={}), id(job.state)

    def packed(self, job: Any) -> bytes:
        """Return the state of a job as bytes."""
        name = id(job.state)
        if name not in self._packed:
            self._packed[name] = packed(job.state)
        return self._packed[name]

    def forget(self) -> None:
        """Let go of the bytes: no job is left."""
        self._packed.clear()


def together(job: Any, state: bytes | None) -> Any:
    """Return a job with the state that was taken from it: a copy of its own, as if it had been sent for it alone."""
    return job if state is None else replace(job, state=pickle.loads(state))


def _has_state(job: Any) -> bool:
    return is_dataclass(job) and type(getattr(job, "state", None)) is dict
