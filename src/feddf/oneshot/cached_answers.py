"""Teachers' answers: each teacher is asked once, a batch at a time, and what it said is remembered on disk.

A file of answers is named by a hash of the teacher's files, of the inputs and of how they are fed to it: another
student, or one more teacher, asks nobody again. One teacher's answers are in memory at a time, so a hundred teachers
need no more of it than five.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from feddf.batches import batches as raw_batches
from feddf.config.errors import FeddfError, first_line
from feddf.evaluate import BATCH, BATCH_ON_DEVICE
from feddf.oneshot.teachers import Ask, TeacherError, TrainedModel, check_sizes
from feddf.oneshot.unlabeled_inputs import Raw
from feddf.runtime.atomic import new_file
from feddf.runtime.compile import in_precision
from feddf.runtime.device import CPU
from feddf.runtime.device import described as name_of
from feddf.runtime.execution import Execution
from feddf.saved.preprocess import Preprocess, described

VERSION = 1
"""Counts up when the same teacher and inputs would give other bytes."""

SMALLEST = 1e-12
"""Probabilities are taken to be at least this much, where they become logits."""

Progress = Callable[[str, int, int], None]
"""(teacher, inputs answered for, all inputs) -> nothing; all of them at once where the answers were remembered."""


def quiet(teacher: str, done: int, total: int) -> None:
    """Show no progress."""


def default_cache() -> Path:
    """Return the folder of remembered answers: ``feddf/answers`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "feddf" / "answers"


class Memory:
    """Asks teachers and remembers what they said. ``asked`` are the ids of those that had to be asked."""

    def __init__(
        self, folder: Path, fleeting: Path, progress: Progress = quiet, execution: Execution = Execution()
    ) -> None:
        self._folder, self._fleeting, self._progress, self._execution = folder, fleeting, progress, execution
        self.asked: list[str] = []
        self._shown: set[Path] = set()

    def logits(self, teacher: TrainedModel, raw: Raw, preprocess: Preprocess | None) -> Tensor:
        """Return a teacher's logits over its own classes for every input.

        ``preprocess`` is the teacher's own or, if it has none, the student's.
        """
        path = self._path(teacher, preprocess, raw.fingerprint)
        found = _mapped(path, len(raw))
        if found is None:
            self._ask(teacher, raw, preprocess, path)
            self.asked.append(teacher.id)
            found = _mapped(path, len(raw))
            assert found is not None, "it has just been written"
        elif path not in self._shown:
            self._progress(teacher.id, len(raw), len(raw))
        self._shown.add(path)
        return found

    def n_outputs(self, teacher: TrainedModel, raw: Raw, preprocess: Preprocess | None) -> int:
        """Return a teacher's number of outputs: from its remembered answers, or by two inputs that it is tried on."""
        found = _mapped(self._path(teacher, preprocess, raw.fingerprint), len(raw))
        return n_outputs(teacher, raw, preprocess, self._execution) if found is None else int(found.shape[1])

    def _path(self, teacher: TrainedModel, preprocess: Preprocess | None, inputs: str) -> Path:
        if teacher.content is None:  # nobody can say whether a module in memory is the same as the last time
            name = hashlib.sha256(f"{teacher.id} {inputs}".encode()).hexdigest()[:32]
            return self._fleeting / f"{name}.npy"
        said = [VERSION, teacher.content, inputs, described(preprocess) if preprocess else None, teacher.outputs]
        run = where(teacher, self._execution)
        if (run.device, run.precision) != ("cpu", "float32"):  # elsewhere the last bits are others
            said += [name_of(torch.device(run.device)), run.precision]
        return self._folder / f"{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]}.npy"

    def _ask(self, teacher: TrainedModel, raw: Raw, preprocess: Preprocess | None, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as temporary:
                self._written(teacher, raw, preprocess, temporary)
        except OSError as error:
            raise FeddfError(f"cannot remember answers in {path.parent}: {error.strerror or error}") from error

    def _written(self, teacher: TrainedModel, raw: Raw, preprocess: Preprocess | None, path: Path) -> None:
        whole: np.memmap | None = None
        done = 0
        self._progress(teacher.id, done, len(raw))
        with asked(teacher, raw, preprocess, self._execution) as batches:
            for outputs in batches:
                if whole is None:
                    whole = open_memmap(path, "w+", np.float32, (len(raw), outputs.shape[1]))
                if not bool(outputs.isfinite().all()):
                    bad = (~outputs.isfinite().all(dim=1)).nonzero().flatten()
                    raise TeacherError(
                        f"teacher {teacher.id}: its answer to input {done + int(bad[0])} is not finite "
                        f"({len(bad)} of {len(outputs)} in that batch); leave it out, or mend it"
                    )
                whole[done : done + len(outputs)] = outputs.numpy()
                done += len(outputs)
                self._progress(teacher.id, done, len(raw))
        assert whole is not None, "there are inputs"
        whole.flush()


@contextmanager
def asked(
    teacher: TrainedModel, raw: Raw, preprocess: Preprocess | None, execution: Execution = Execution()
) -> Iterator[Iterator[Tensor]]:
    """Open a teacher on a device and give its logits, a batch at a time, on the CPU."""
    run = where(teacher, execution)
    try:
        check_sizes(teacher, preprocess)
        inputs = raw.inputs(preprocess)
    except ValueError as error:
        raise TeacherError(f"teacher {teacher.id}: {first_line(error)}") from error
    with run.begun() as device, teacher.opened(device) as ask:
        order = torch.arange(len(inputs)).split(BATCH if device == CPU else BATCH_ON_DEVICE)
        forward = in_precision(ask, run.precision)

        def batches() -> Iterator[Tensor]:
            for _, chunk in raw_batches(inputs.raw, order, device):
                yield as_logits(teacher, _outputs(teacher, forward, inputs.encode(chunk)))

        yield batches()


def where(teacher: TrainedModel, execution: Execution) -> Execution:
    """Return how a teacher is executed: as everybody, or on the CPU if it works there only."""
    return execution if teacher.moves else Execution()


def _outputs(teacher: TrainedModel, ask: Ask, batch: Tensor) -> Tensor:
    try:
        outputs = ask(batch)
    except FeddfError:
        raise
    except Exception as error:  # a user's model may fail in any way
        shape = tuple(batch.shape)
        raise TeacherError(
            f"teacher {teacher.id} cannot answer inputs of shape {shape}; "
            f"does it take others (size, channels, max_tokens)? It says: {first_line(error)}"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(batch) or outputs.shape[1] < 2:
        given = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        allowed = f"one row of logits an input is needed, for a batch of {len(batch)}"
        raise TeacherError(f"teacher {teacher.id} gives {given}; {allowed}")
    return outputs.detach().to(CPU, torch.float32)


def as_logits(teacher: TrainedModel, outputs: Tensor) -> Tensor:
    """Return a teacher's outputs as logits; probabilities are checked for being some."""
    if teacher.outputs == "logits":
        return outputs
    if bool((outputs < -1e-4).any()) or bool(((outputs.sum(dim=1) - 1).abs() > 1e-2).any()):
        raise TeacherError(f"teacher {teacher.id}: its outputs are not probabilities; say outputs = 'logits'")
    return outputs.clamp(min=SMALLEST).log()


def n_outputs(teacher: TrainedModel, raw: Raw, preprocess: Preprocess | None, execution: Execution) -> int:
    """Return a teacher's number of outputs, by asking it about the first two inputs."""
    few = Raw(raw.rows[:2], raw.encode)
    with asked(teacher, few, preprocess, execution) as batches:
        return int(next(batches).shape[1])


@contextmanager
def remembering(
    folder: Path | None, progress: Progress = quiet, execution: Execution = Execution()
) -> Iterator[Memory]:
    """Give a memory; the answers of modules that live in memory only are forgotten at the end of the block."""
    with TemporaryDirectory(prefix="feddf-answers-") as fleeting:
        yield Memory(folder or default_cache(), Path(fleeting), progress, execution)


def _mapped(path: Path, n: int) -> Tensor | None:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if found.ndim != 2 or len(found) != n or found.dtype != np.float32:
        return None
    return torch.from_numpy(np.array(found))  # a copy: what is mapped cannot be written to, which torch warns of
