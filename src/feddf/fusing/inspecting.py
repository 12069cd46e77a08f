"""What a teacher is, before anything is learned from it: how it is fed, what its outputs are, how good and how fast."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from feddf.data.datasets import measured
from feddf.fusing.classes import columns_of
from feddf.fusing.feeding import ASSUMED, HAND, Feeding, assumed
from feddf.fusing.inputs import Labeled, RawInputs
from feddf.fusing.predictions import kind_of, open_teacher
from feddf.fusing.teachers import TeacherError, TrainedModel
from feddf.runtime.execution import Execution
from feddf.saved.model import Features, Images
from feddf.seeds import torch_generator

SAMPLE = 512
"""Labeled examples by which normalizations are compared: two standard errors of an accuracy are 4.4 points at most."""

NORMALIZATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mean 0, std 1": ((0.0,), (1.0,)),
    "mean 0.5, std 0.5": ((0.5,), (0.5,)),
    "bytes of 0 to 255 (mean 0, std 1/255)": ((0.0,), (1 / 255,)),
    "MNIST's (mean 0.1307, std 0.3081)": ((0.1307,), (0.3081,)),
    "ImageNet's (mean [0.485, 0.456, 0.406], std [0.229, 0.224, 0.225])": (
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
    ),
}


@dataclass(frozen=True)
class Inspection:
    """What was found out about a teacher; ``seconds`` are those of 1,000 inputs, ``size`` the bytes of its weights."""

    name: str
    source: str
    takes: str
    feeding: Feeding
    outputs: str
    n_outputs: int
    classes: tuple[str, ...]
    accuracy: float | None
    hint: str
    seconds: float
    size: int

    def described(self) -> dict[str, Any]:
        """Return it as JSON."""
        values = {name: value for name, value in asdict(self).items() if name != "feeding"}
        return {**values, **self.feeding.described()}


def inspect_teacher(
    teacher: TrainedModel,
    labeled: Labeled | None = None,
    raw: RawInputs | None = None,
    execution: Execution = Execution(),
) -> Inspection:
    """Return what a teacher says to a few inputs: labeled ones, others, or such as it takes, made up."""
    rows = raw.rows if raw else labeled.raw.rows if labeled else None
    tabular = "numbers" in teacher.feeding.values and (rows is None or (isinstance(rows, Tensor) and rows.ndim == 2))
    own = teacher.feeding.settled(tabular)
    if isinstance(rows, Tensor) and rows.ndim == 4:
        own = own.otherwise(Feeding.said("pool", channels=rows.shape[1], size=tuple(rows.shape[2:])))
    feeding = assumed(own)
    if feeding.preprocess is None:
        question = "its file does not say how large its images are; say it with size = 32, or give --labeled data"
        raise TeacherError(f"teacher {teacher.id}: {question}")
    teacher = replace(teacher, feeding=feeding)
    few = labeled.first(SAMPLE) if labeled else None
    inputs = few.raw if few else (raw or made_up(feeding)).part(64)
    begun = time.perf_counter()
    outputs = answers(teacher, inputs, execution)
    taken = time.perf_counter() - begun
    kind = teacher.outputs or kind_of(teacher.id, outputs)
    said = f"{kind} ({HAND})" if teacher.outputs else f"{kind} (by its answers)"
    teacher.check_outputs(outputs.shape[1])
    columns = _columns(teacher, few, outputs.shape[1])
    accuracy = None if few is None or columns is None else _accuracy(outputs, columns, few.labels)
    hint = better_normalization(teacher, few, columns, execution) if few and columns is not None else ""
    return Inspection(
        teacher.id, teacher.source, teacher.takes or _shape(feeding), feeding, said, outputs.shape[1], teacher.classes,
        accuracy, hint, 1000 * taken / len(inputs), teacher.size,
    )  # fmt: skip


def _shape(feeding: Feeding) -> str:
    fed = feeding.preprocess
    return f"N×{'×'.join(map(str, fed.shape))}" if fed else "inputs as they are given"


def _columns(teacher: TrainedModel, labeled: Labeled | None, count: int) -> Tensor | None:
    """Return the label that each output stands for; ``None`` where class lists do not say."""
    if labeled is None:
        return None
    if not teacher.classes:
        return torch.arange(count) if count == max(labeled.n_classes, len(labeled.names)) else None
    found = columns_of(teacher.classes, labeled.names)
    return found if bool((found >= 0).any()) else None


def made_up(feeding: Feeding) -> RawInputs:
    """Return inputs that a model takes and that mean nothing: they show the form of its outputs."""
    fed, generator = feeding.preprocess, torch_generator(0)
    if isinstance(fed, Images):
        return RawInputs(torch.randint(0, 256, (64, *fed.shape), generator=generator, dtype=torch.uint8))
    if isinstance(fed, Features):
        return RawInputs(torch.randn((64, *fed.shape), generator=generator))
    return RawInputs(("a text", "another text", "and one that is somewhat longer than the others"))


def answers(teacher: TrainedModel, inputs: RawInputs, execution: Execution = Execution()) -> Tensor:
    """Return a teacher's outputs for some inputs, fed as it says."""
    with open_teacher(teacher, teacher.preprocess, execution) as predict:
        return torch.cat(list(predict(inputs)))


def _accuracy(outputs: Tensor, columns: Tensor, labels: Tensor) -> float:
    return float((columns[outputs.argmax(dim=1)] == labels).double().mean())


def better_normalization(
    teacher: TrainedModel, labeled: Labeled, columns: Tensor, execution: Execution = Execution()
) -> str:
    """Return which of the usual normalizations makes a teacher better than the assumed one; nothing if none does.

    ``columns`` are the labels that its outputs stand for. Better is by two standard errors at least. The teacher is fed
    as before: what is tried is named, and chosen by hand.
    """
    few, rows = labeled.first(SAMPLE), labeled.raw.rows
    if not teacher.feeding.is_assumed or not isinstance(rows, Tensor):
        return ""
    pixels = measured(rows)
    own = f"the data's (mean {_shown(pixels.mean)}, std {_shown(pixels.std)})"
    found = {
        name: _accuracy(answers(fed, few.raw, execution), columns, few.labels)
        for name, fed in _fed_otherwise(teacher, {**NORMALIZATIONS, own: (pixels.mean, pixels.std)}).items()
    }
    now = _accuracy(answers(teacher, few.raw, execution), columns, few.labels)
    best = max(found, key=lambda name: found[name])
    if found[best] - now <= 2 * (0.25 / len(few.labels)) ** 0.5:
        return ""
    said = f"with {best} it would have {100 * found[best]:.1f} % instead of {100 * now:.1f} %"
    return f"{said} of {len(few.labels)} labeled examples; say so with mean and std"


def _shown(values: tuple[float, ...]) -> str:
    return f"{values[0]:.4f}" if len(values) == 1 else "[" + ", ".join(f"{value:.4f}" for value in values) + "]"


def _fed_otherwise(
    teacher: TrainedModel, tried: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
) -> dict[str, TrainedModel]:
    """Return a teacher in all normalizations that fit its channels and can change what it sees."""
    found = {}
    for name, (mean, std) in tried.items():
        said = Feeding({**teacher.feeding.values, **Feeding.said(ASSUMED, mean=mean, std=std).values})
        try:
            if said.preprocess != teacher.preprocess:
                found[name] = replace(teacher, feeding=said)
        except ValueError:  # of another number of channels
            continue
    return found


def warning_of(teacher: TrainedModel, hint: str = "") -> str:
    """Return the warning about a teacher that is fed as nobody said; nothing if somebody did."""
    if not teacher.feeding.is_assumed:
        return ""
    said = f"teacher {teacher.id}: nothing says how its inputs are normalized; it is fed {teacher.feeding.line}"
    return f"{said}; {hint}" if hint else f"{said}; say it with mean and std if that is wrong"
