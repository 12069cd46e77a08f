"""Teachers' predictions: each teacher is opened once, predicts a batch at a time, and its outputs are cached on disk.

A cached file (:mod:`feddf.fusing.answer_files`) is named by a hash of the teacher's files, of the inputs and of how
they are fed to it: another student, or one more teacher, reuses it. One teacher's predictions are in memory at a time,
so a hundred teachers need no more of it than five; of answers at positions, only those of a few inputs are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf.batches import batches
from feddf.config.errors import FeddfError, one_line
from feddf.data.datasets import plain
from feddf.evaluate import BATCH, BATCH_ON_DEVICE
from feddf.fusing.answer_files import SUFFIX, AnswerFile, Coding, write_answers
from feddf.fusing.inputs import RawInputs
from feddf.fusing.teachers import OutputKind, PredictBatch, TeacherError, TrainedModel
from feddf.losses import log_odds
from feddf.outputs import Outputs, from_description
from feddf.runtime.device import CPU
from feddf.runtime.device import described as name_of
from feddf.runtime.execution import Execution, in_precision
from feddf.saved.model import Images, Preprocess, described

VERSION = 3
"""Counts up when the same teacher and inputs would give other bytes."""

ROUNDING = 2e-3
"""By which a sum of probabilities in float16 may miss one: a few units of its last place, 2⁻¹⁰."""

MOST_PREDICTED = 2**24
"""Numbers that a teacher answers at once, 64 MB: those for 512 masks of 64 × 64 × 8, or for 8 texts of 64 × 30,000."""

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
    _found: dict[Any, Any] = field(default_factory=dict)
    _meanings: dict[str, Outputs] = field(default_factory=dict)

    def logits(self, teacher: TrainedModel, name: str = "pool", rows: Tensor | None = None) -> Tensor:
        """Return a teacher's logits over its own channels for every input of a set, or for some."""
        found = self._answers(teacher, name)
        chosen = found[torch.arange(len(found)) if rows is None else rows]
        return chosen if teacher.table is None else as_logits(teacher, self.kind(teacher), chosen)

    def kind(self, teacher: TrainedModel) -> OutputKind:
        """Return what a teacher's outputs are: as it says, or as its answers to the first set look."""
        found = self._answers(teacher, next(iter(self.sets)))
        return teacher.outputs or ("probabilities" if found.about.given == "probabilities" else "logits")

    def meaning(self, teacher: TrainedModel) -> Outputs:
        """Return what a teacher's outputs mean: as is said or was cached, or as its answers to two inputs show."""
        if teacher.id not in self._meanings:
            self._meanings[teacher.id] = self._meaning(teacher)
        return self._meanings[teacher.id]

    def n_channels(self, teacher: TrainedModel) -> int:
        """Return how many channels a teacher has, which is evaluated if it does not say so."""
        return self.meaning(teacher).channels or self._answers(teacher, next(iter(self.sets))).coding.outputs.channels

    def _meaning(self, teacher: TrainedModel) -> Outputs:
        name, inputs = next(iter(self.sets.items()))
        found = self._cached(teacher, name) if teacher.table is None else self._answers(teacher, name)
        if found is not None:
            return _told(teacher, found)
        if "positions" in teacher.form:  # its file says so; how many channels it has need not be known yet
            return from_description({"kind": "classes", **teacher.form, "channels": len(teacher.classes) or None})
        with open_teacher(teacher, teacher.preprocess or self.student, self.execution) as predict:
            return teacher.meaning(next(predict(inputs.first(2))).shape)

    def answers(self, teacher: TrainedModel, name: str) -> bool:
        """Say whether a teacher can answer for a set: a table has answers for the pool alone."""
        return teacher.table is None or name == "pool"

    def _answers(self, teacher: TrainedModel, name: str) -> Any:
        """Return a teacher's answers for a set, of which some are read at a time."""
        key, count = (self._path(teacher, name) if teacher.table is None else teacher.id), len(self.sets[name])
        if not self.answers(teacher, name):
            said = f"it is a table of answers for the pool, and has none for {name} inputs"
            raise TeacherError(f"teacher {teacher.id}: {said}; it cannot be weighed or left out by these")
        if key not in self._found:
            if teacher.table is not None:
                self._found[key] = teacher.table(count)
            elif (found := self._cached(teacher, name)) is not None:
                self._found[key] = found
                self.progress(teacher.id, count, count)
            else:
                self._evaluate(teacher)
        teacher.check_outputs(_told(teacher, self._found[key]).channels or 0)
        return self._found[key]

    def _cached(self, teacher: TrainedModel, name: str) -> AnswerFile | None:
        """Return a model's stored answers for a set; ``None`` if there are none, or if their file is something else."""
        found = AnswerFile(self._path(teacher, name))
        with suppress(TeacherError):
            if found.path.is_file() and len(found) == len(self.sets[name]):
                return found
        return None

    def _path(self, teacher: TrainedModel, name: str) -> Path:
        inputs, preprocess = self.sets[name].fingerprint, teacher.preprocess or self.student
        if teacher.content is None or (preprocess is None and self.sets[name].encode is not plain):
            return self.scratch / f"{hashlib.sha256(f'{teacher.id} {inputs}'.encode()).hexdigest()[:32]}{SUFFIX}"
        meant = [teacher.outputs, sorted(teacher.form.items())]
        said = [VERSION, teacher.content, inputs, described(preprocess) if preprocess else None, *meant]
        run = self.execution if teacher.moves else Execution()
        if (run.device, run.precision) != ("cpu", "float32"):  # elsewhere the last bits are others
            said += [name_of(torch.device(run.device)), run.precision]
        return self.folder / f"{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]}{SUFFIX}"

    def _evaluate(self, teacher: TrainedModel) -> None:
        """Open a teacher, and write its outputs for every set that has none yet."""
        with open_teacher(teacher, teacher.preprocess or self.student, self.execution) as predict:
            for name, inputs in self.sets.items():
                if self._cached(teacher, name) is None:
                    path = self._path(teacher, name)
                    with one_line(FeddfError, f"cannot cache predictions in {path.parent}", OSError):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        self.write(teacher, predict, inputs, path)
                    self._found[path] = self._cached(teacher, name)
        self.evaluated.append(teacher.id)

    def write(
        self, teacher: TrainedModel, predict: Predict, inputs: RawInputs, path: Path,
        coding: Callable[[Outputs], Coding] | None = None, **about: Any,
    ) -> float:  # fmt: skip
        """Write a teacher's logits for some inputs as they come, and return what rounding has changed at most.

        They are whole unless a function of what they mean says how they are stored; large ones are in half precision,
        and of many channels the largest.
        """
        self.progress(teacher.id, 0, len(inputs))
        batches = predict(inputs)
        first = next(batches)
        outputs = teacher.meaning(first.shape)
        teacher.check_outputs(outputs.channels or 0)
        due = self._meanings.get(teacher.id, outputs)
        if (outputs.title, outputs.channels) != (due.title, due.channels or outputs.channels):
            raise TeacherError(f"teacher {teacher.id}: it answers with {outputs.title}, and {due.title} are expected")
        earlier = self._cached(teacher, next(iter(self.sets)))  # what outputs are is decided by the first set
        given = teacher.outputs or (earlier.about.given if earlier else kind_of(teacher.id, first, outputs.kind))
        stored = coding(outputs) if coding else Coding.of(outputs, 16 if outputs.is_large else 32)
        about = {"given": given, "names": [str(number) for number in range(outputs.channels or 0)], **about}
        logits = self._logits(teacher, given, chain([first], batches), len(inputs))
        return write_answers(path, logits, len(inputs), stored, about)

    def _logits(self, teacher: TrainedModel, kind: str, batches: Iterable[Tensor], total: int) -> Iterator[Tensor]:
        done = 0
        for outputs in batches:
            if len(bad := (~outputs.isfinite().flatten(1).all(dim=1)).nonzero()):
                which = f"its logits for input {done + int(bad[0])} are not finite"
                many = f"({len(bad)} of {len(outputs)} in that batch); leave it out, or repair it"
                raise TeacherError(f"teacher {teacher.id}: {which} {many}")
            yield as_logits(teacher, kind, outputs)
            done += len(outputs)
            self.progress(teacher.id, done, total)


def _told(teacher: TrainedModel, found: Any) -> Outputs:
    """Return what a teacher's answers mean: as their file says, or as those of a table look."""
    return found.coding.outputs if teacher.table is None else teacher.meaning(found[torch.arange(1)].shape)


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
            size = len(teacher.classes) * prod(positions_of(preprocess, inputs.batch(torch.arange(1))))
            usual = BATCH if device == CPU else BATCH_ON_DEVICE
            order = torch.arange(len(inputs)).split(max(1, min(usual, MOST_PREDICTED // max(1, size))))
            for _, chunk in batches(inputs.raw, order, device):
                batch = inputs.encode(chunk)
                found = _predict(teacher, forward, batch)
                yield in_order(found, positions_of(preprocess, batch), len(teacher.classes))

        yield predict_all


def _predict(teacher: TrainedModel, predict: PredictBatch, batch: Tensor) -> Tensor:
    asked = f"inputs of shape {tuple(batch.shape)}; does it take others (size, channels, max_tokens)? It says"
    with one_line(TeacherError, f"teacher {teacher.id} cannot predict for {asked}"):
        outputs = predict(batch)
    fewest = 1 if teacher.form.get("kind", "classes") != "classes" else 2
    if not isinstance(outputs, Tensor) or outputs.ndim < 2 or len(outputs) != len(batch) or outputs.shape[1] < fewest:
        given = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        allowed = f"one row of logits an input is needed, for a batch of {len(batch)}"
        hint = "; say kind = 'labels' or 'values' if one is right" * (isinstance(outputs, Tensor) and fewest == 2)
        raise TeacherError(f"teacher {teacher.id} gives {given}; {allowed}{hint}")
    return outputs.detach().to(CPU, torch.float32)


def positions_of(preprocess: Preprocess | None, batch: Tensor) -> tuple[int, ...]:
    """Return the positions of one input: the pixels of an image, or the tokens of a text."""
    if isinstance(preprocess, Images):
        return preprocess.shape[1:] if preprocess.layout != "flat" else ()
    return tuple(batch.shape[2:]) if batch.ndim > 2 else tuple(batch.shape[1:]) * (not batch.is_floating_point())


def in_order(outputs: Tensor, places: tuple[int, ...], count: int) -> Tensor:
    """Return outputs as n × channels × positions: channels may come last, and masks may be smaller than their images.

    Smaller ones (SegFormer's are a quarter as large) are enlarged bilinearly, as their makers do.
    """
    first, last = tuple(outputs.shape[2:]), tuple(outputs.shape[1:-1])
    if len(first) != len(places) or first == places:
        return outputs
    if last == places or outputs.shape[-1] == count != outputs.shape[1]:
        outputs = outputs.movedim(-1, 1)
    if len(places) == 2 and tuple(outputs.shape[2:]) != places:
        return F.interpolate(outputs, size=places, mode="bilinear", align_corners=False)
    return outputs


def kind_of(id: str, outputs: Tensor, kind: str = "classes") -> OutputKind:
    """Return what the first of a teacher's outputs look like.

    Classes that are no negative numbers and sum to one, as nearly as float16 can, are probabilities, and so are labels
    between zero and one. Classes between zero and one that do not sum to one are labels, and refused.
    """
    outputs = outputs[:BATCH]  # as many on every device
    sums, inside = outputs.sum(dim=1), bool(((outputs >= 0) & (outputs <= 1 + ROUNDING)).all())
    varied = bool((outputs != outputs[:1]).any())  # one that says the same to all inputs shows nothing
    if kind != "classes":
        return "probabilities" if kind == "labels" and inside and varied else "logits"
    if inside and bool(((sums - 1).abs() <= ROUNDING).all()):
        return "probabilities"
    if inside and varied:
        wrong = f"they lie between 0 and 1 and sum to {sums.min():.2f} to {sums.max():.2f}"
        remedy = "say kind = 'labels', or outputs = 'logits' if they are"
        raise TeacherError(
            f"teacher {id}: its outputs are several labels, not one of several classes: {wrong}; {remedy}"
        )
    return "logits"


def as_logits(teacher: TrainedModel, kind: str, outputs: Tensor) -> Tensor:
    """Return a teacher's outputs as logits; probabilities are checked to be some, and count as 1e-12 at least."""
    if kind == "logits":
        return outputs
    several = teacher.form.get("kind", "classes") != "classes"
    wrong = outputs > 1 + 1e-4 if several else (outputs.sum(dim=1) - 1).abs() > 1e-2
    if bool((outputs < -1e-4).any()) or bool(wrong.any()):
        raise TeacherError(f"teacher {teacher.id}: its outputs are not probabilities; say outputs = 'logits'")
    return log_odds(outputs) if several else outputs.clamp(min=1e-12).log()
