"""Teachers' predictions: each teacher is opened once, predicts a batch at a time, and its outputs are cached on disk.

A cached file is named by a hash of the teacher's files, of the inputs and of how they are fed to it: another student,
or one more teacher, reuses it. One teacher's predictions are in memory at a time, so a hundred teachers need no more of
it than five.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from feddf.batches import batches
from feddf.config.errors import FeddfError, one_line
from feddf.data.datasets import plain
from feddf.data.files import read_cached
from feddf.evaluate import BATCH, BATCH_ON_DEVICE
from feddf.fusing.inputs import RawInputs
from feddf.fusing.teachers import OutputKind, PredictBatch, TeacherError, TrainedModel
from feddf.runtime.atomic import new_file
from feddf.runtime.device import CPU
from feddf.runtime.device import described as name_of
from feddf.runtime.execution import Execution, in_precision
from feddf.saved.model import Preprocess, described

VERSION = 2
"""Counts up when the same teacher and inputs would give other bytes."""

ROUNDING = 2e-3
"""By which a sum of probabilities in float16 may miss one: a few units of its last place, 2⁻¹⁰."""

Progress = Callable[[str, int, int], None]
"""(teacher, inputs done, all inputs) -> nothing; all of them at once where the predictions were cached."""


Predict = Callable[[RawInputs], Iterator[Tensor]]


def quiet(teacher: str, done: int, total: int) -> None:
    """Show no progress."""


def default_cache() -> Path:
    """Return the folder of cached predictions: ``feddf/answers`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "feddf" / "answers"


@dataclass(frozen=True)
class PredictionCache:
    """The outputs of teachers for named ``sets`` of inputs. ``evaluated`` are the ids of those that had to be opened.

    What they mean is decided once for each teacher, by its answers to the first set. Teachers without a preprocessing
    of their own are fed as the ``student`` is. What modules in memory predict goes to
    the folder ``scratch``, as does what is fed through a function of the user's: nothing says whether they are the same
    the next time.
    """

    folder: Path
    scratch: Path
    sets: Mapping[str, RawInputs]
    student: Preprocess | None
    progress: Progress = quiet
    execution: Execution = Execution()
    evaluated: list[str] = field(default_factory=list)
    _shown: set[Path] = field(default_factory=set)

    def logits(self, teacher: TrainedModel, name: str = "pool") -> Tensor:
        """Return a teacher's logits over its own classes for every input of a set."""
        return as_logits(teacher, self.kind(teacher), self._outputs(teacher, name))

    def kind(self, teacher: TrainedModel) -> OutputKind:
        """Return what a teacher's outputs are: as it says, or as its answers to the first set look."""
        return teacher.outputs or kind_of(teacher.id, self._outputs(teacher, next(iter(self.sets))))

    def answers(self, teacher: TrainedModel, name: str) -> bool:
        """Say whether a teacher can answer for a set: a table has answers for the pool alone."""
        return teacher.table is None or name == "pool"

    def _outputs(self, teacher: TrainedModel, name: str) -> Tensor:
        if teacher.table is not None:
            if not self.answers(teacher, name):
                said = f"it is a table of answers for the pool, and has none for {name} inputs"
                raise TeacherError(f"teacher {teacher.id}: {said}; it cannot be weighed or left out by these")
            answers = teacher.table(len(self.sets[name]))
            teacher.check_outputs(answers.shape[1])
            return answers
        path, count = self._path(teacher, name), len(self.sets[name])
        found = read_cached(path, count, np.float32)
        if found is None:
            self._evaluate(teacher)
            found = read_cached(path, count, np.float32)
            assert found is not None, "it has just been written"
        elif path not in self._shown:
            self.progress(teacher.id, count, count)
            self._shown.add(path)
        teacher.check_outputs(found.shape[1])
        return found

    def _path(self, teacher: TrainedModel, name: str) -> Path:
        inputs, preprocess = self.sets[name].fingerprint, teacher.preprocess or self.student
        if teacher.content is None or (preprocess is None and self.sets[name].encode is not plain):
            return self.scratch / f"{hashlib.sha256(f'{teacher.id} {inputs}'.encode()).hexdigest()[:32]}.npy"
        said = [VERSION, teacher.content, inputs, described(preprocess) if preprocess else None]
        run = self.execution if teacher.moves else Execution()
        if (run.device, run.precision) != ("cpu", "float32"):  # elsewhere the last bits are others
            said += [name_of(torch.device(run.device)), run.precision]
        return self.folder / f"{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]}.npy"

    def _evaluate(self, teacher: TrainedModel) -> None:
        """Open a teacher, and write its outputs for every set that has none yet."""
        with open_teacher(teacher, teacher.preprocess or self.student, self.execution) as predict:
            for name, inputs in self.sets.items():
                path = self._path(teacher, name)
                if read_cached(path, len(inputs), np.float32) is None:
                    self._write(teacher, inputs, predict, path)
                    self._shown.add(path)
        self.evaluated.append(teacher.id)

    def _write(self, teacher: TrainedModel, inputs: RawInputs, predict: Predict, path: Path) -> None:
        done = 0
        self.progress(teacher.id, done, len(inputs))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as temporary:
                for outputs in predict(inputs):
                    if done == 0:
                        teacher.check_outputs(outputs.shape[1])
                        as_logits(teacher, teacher.outputs or kind_of(teacher.id, outputs), outputs)  # refused early
                        whole = open_memmap(temporary, "w+", np.float32, (len(inputs), outputs.shape[1]))
                    if len(bad := (~outputs.isfinite().all(dim=1)).nonzero()):
                        which = f"its logits for input {done + int(bad[0])} are not finite"
                        many = f"({len(bad)} of {len(outputs)} in that batch); leave it out, or repair it"
                        raise TeacherError(f"teacher {teacher.id}: {which} {many}")
                    whole[done : done + len(outputs)] = outputs.numpy()
                    done += len(outputs)
                    self.progress(teacher.id, done, len(inputs))
                whole.flush()
        except OSError as error:
            raise FeddfError(f"cannot cache predictions in {path.parent}: {error.strerror or error}") from error


@contextmanager
def open_teacher(
    teacher: TrainedModel, preprocess: Preprocess | None, execution: Execution = Execution()
) -> Iterator[Predict]:
    """Open a teacher on a device, and give what predicts with it: raw inputs -> outputs on the CPU, in batches."""
    run = execution if teacher.moves else Execution()
    with run.begun() as device, teacher.open(device) as predict:
        forward = in_precision(predict, run.precision)

        def predict_all(raw: RawInputs) -> Iterator[Tensor]:
            with one_line(TeacherError, f"teacher {teacher.id}", ValueError):
                inputs = raw.inputs(preprocess)
            order = torch.arange(len(inputs)).split(BATCH if device == CPU else BATCH_ON_DEVICE)
            for _, chunk in batches(inputs.raw, order, device):
                yield _predict(teacher, forward, inputs.encode(chunk))

        yield predict_all


def _predict(teacher: TrainedModel, predict: PredictBatch, batch: Tensor) -> Tensor:
    asked = f"inputs of shape {tuple(batch.shape)}; does it take others (size, channels, max_tokens)? It says"
    with one_line(TeacherError, f"teacher {teacher.id} cannot predict for {asked}"):
        outputs = predict(batch)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(batch) or outputs.shape[1] < 2:
        given = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        allowed = f"one row of logits an input is needed, for a batch of {len(batch)}"
        raise TeacherError(f"teacher {teacher.id} gives {given}; {allowed}")
    return outputs.detach().to(CPU, torch.float32)


def kind_of(id: str, outputs: Tensor) -> OutputKind:
    """Return what the first of a teacher's outputs look like.

    Rows of no negative numbers that sum to one, as nearly as float16 can, are probabilities. Rows between zero and one
    that do not are those of independent labels, which are refused.
    """
    outputs = outputs[:BATCH]  # as many on every device
    sums, inside = outputs.sum(dim=1), bool(((outputs >= 0) & (outputs <= 1 + ROUNDING)).all())
    if inside and bool(((sums - 1).abs() <= ROUNDING).all()):
        return "probabilities"
    if inside and bool((outputs != outputs[:1]).any()):  # one that says the same to all inputs shows nothing
        wrong = f"they lie between 0 and 1 and sum to {sums.min():.2f} to {sums.max():.2f}"
        remedy = "say outputs = 'logits' if they are"
        raise TeacherError(
            f"teacher {id}: its outputs are several labels, not one of several classes: {wrong}; {remedy}"
        )
    return "logits"


def as_logits(teacher: TrainedModel, kind: OutputKind, outputs: Tensor) -> Tensor:
    """Return a teacher's outputs as logits; probabilities are checked to be some, and count as 1e-12 at least."""
    if kind == "logits":
        return outputs
    if bool((outputs < -1e-4).any()) or bool(((outputs.sum(dim=1) - 1).abs() > 1e-2).any()):
        raise TeacherError(f"teacher {teacher.id}: its outputs are not probabilities; say outputs = 'logits'")
    return outputs.clamp(min=1e-12).log()
