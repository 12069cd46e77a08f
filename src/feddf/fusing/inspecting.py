"""What a teacher is, before anything is learned from it: how it is fed, what its outputs are, how good and how fast."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from feddf.data.datasets import measured
from feddf.fusing.classes import columns_of
from feddf.fusing.feeding import ASSUMED, POOL, Feeding, assumed, numbers
from feddf.fusing.inputs import Labeled, RawInputs
from feddf.fusing.predictions import kind_of, open_teacher
from feddf.fusing.teachers import TeacherError, TrainedModel
from feddf.runtime.execution import Execution
from feddf.saved.model import Images, Tokens
from feddf.seeds import torch_generator

SAMPLE = 512  # labeled examples that compare normalizations: two standard errors of an accuracy are at most 4.4 points

NORMALIZATIONS = [
    ((0.0,), (1.0,)), ((0.5,), (0.5,)), ((0.0,), (1 / 255,)), ((0.1307,), (0.3081,)),
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
]  # fmt: skip
"""The usual means and deviations: values of 0 to 1, −1 to 1 and 0 to 255, MNIST's and ImageNet's."""


def inspect_teacher(
    teacher: TrainedModel, labeled: Labeled | None = None, raw: RawInputs | None = None
) -> dict[str, Any]:
    """Return, as JSON, what a teacher says to a few inputs (labeled, others, or made up), or of what a table is."""
    about: dict[str, Any] = {"name": teacher.id, "source": teacher.source, "takes": teacher.takes}
    about |= {"outputs_said_by": "its format or by hand" if teacher.outputs else "its answers"}
    about |= {"classes": teacher.classes, "bytes": teacher.size}
    if teacher.table is not None:
        about |= {"outputs": teacher.outputs, "n_outputs": len(teacher.classes), **teacher.feeding.described()}
        about["form"] = {"kind": "classes", "channels": len(teacher.classes), **teacher.form}
        return about | {"seconds_for_1000": 0.0, "warning": ""}
    rows = raw.rows if raw else labeled.raw.rows if labeled else None
    images = isinstance(rows, Tensor) and rows.ndim == 4
    own = teacher.feeding.settled(tabular=not images)
    if isinstance(rows, Tensor) and images:
        own = own.otherwise(Feeding.said(POOL, channels=rows.shape[1], size=tuple(rows.shape[2:])))
    teacher = replace(teacher, feeding=assumed(own))
    if teacher.preprocess is None:
        question = "its file does not say how large its images are; say it with size = 32, or give --labeled data"
        raise TeacherError(f"teacher {teacher.id}: {question}")
    few = labeled.some(SAMPLE) if labeled else None
    inputs = few.raw if few else (raw or made_up(teacher)).first(64)
    with open_teacher(teacher, teacher.preprocess) as predict:
        for _ in range(2):  # a library's first answers take long: only the second pass counts
            begun = time.perf_counter()
            outputs = torch.cat(list(predict(inputs)))
        seconds = time.perf_counter() - begun
    meaning = teacher.meaning(outputs.shape)
    kind = teacher.outputs or kind_of(teacher.id, outputs, meaning.kind)
    columns = _columns(teacher, few, outputs.shape[1]) if meaning.counts_classes else None
    teacher.check_outputs(meaning.channels or 0)
    found = about | {"outputs": kind, "n_outputs": meaning.channels, "form": meaning.describe()}
    found |= {**teacher.feeding.described(), "seconds_for_1000": 1000 * seconds / len(inputs)}
    if few is not None and columns is not None:
        found |= {"accuracy": _accuracy(outputs, columns, few.labels), "of_examples": len(few.labels)}
    return {**found, "warning": warning_of(teacher, few, columns)}


def _columns(teacher: TrainedModel, labeled: Labeled | None, count: int) -> Tensor | None:
    """Return the label that each output stands for; ``None`` where class lists do not say."""
    if labeled is None:
        return None
    if not teacher.classes:
        return torch.arange(count) if count == max(labeled.n_classes, len(labeled.names)) else None
    found = columns_of(teacher.classes, labeled.names)
    return found if bool((found >= 0).any()) else None


def made_up(teacher: TrainedModel) -> RawInputs:
    """Return inputs that a teacher takes and that mean nothing: they show the form of its outputs."""
    fed, generator = teacher.preprocess, torch_generator(0)
    if fed is None or isinstance(fed, Tokens):
        return RawInputs(("a text", "another text", "and one that is somewhat longer than the others"))
    if isinstance(fed, Images):
        return RawInputs(torch.randint(0, 256, (64, *fed.shape), generator=generator, dtype=torch.uint8))
    return RawInputs(torch.randn((64, *fed.shape), generator=generator))


def answers(teacher: TrainedModel, inputs: RawInputs, execution: Execution = Execution()) -> Tensor:
    """Return a teacher's outputs for some inputs, fed as it says."""
    with open_teacher(teacher, teacher.preprocess, execution) as predict:
        return torch.cat(list(predict(inputs)))


def _accuracy(outputs: Tensor, columns: Tensor, labels: Tensor) -> float:
    return float((columns[outputs.argmax(dim=1)] == labels).double().mean())


def better_normalization(teacher: TrainedModel, labeled: Labeled, columns: Tensor) -> str:
    """Return which of the usual normalizations makes a teacher better than the assumed one; nothing if none does.

    ``columns`` are the labels that its outputs stand for. Better is by two standard errors at least. The teacher is fed
    as before: what is tried is named, and chosen by hand.
    """
    few, rows, channels = labeled.some(SAMPLE), labeled.raw.rows, teacher.feeding.get("channels")
    if not isinstance(rows, Tensor):
        return ""
    own, found = measured(rows), dict[str, float]()
    now = _accuracy(answers(teacher, few.raw), columns, few.labels)
    for mean, std in [*NORMALIZATIONS, (own.mean, own.std)]:
        if len(mean) in (1, channels):
            tried = Feeding({**teacher.feeding.values, **Feeding.said(ASSUMED, mean=mean, std=std).values})
            outputs = answers(replace(teacher, feeding=tried), few.raw)
            found[f"mean {numbers(mean)}, std {numbers(std)}"] = _accuracy(outputs, columns, few.labels)
    best = max(found, key=lambda name: found[name])
    if found[best] - now <= 2 * (0.25 / len(few.labels)) ** 0.5:
        return ""
    said = f"with {best} it would have {100 * found[best]:.1f} % instead of {100 * now:.1f} %"
    return f"{said} of {len(few.labels)} labeled examples; say so with mean and std"


def warning_of(teacher: TrainedModel, labeled: Labeled | None, columns: Tensor | None) -> str:
    """Return the warning about a teacher whose normalization is assumed; nothing if it is known."""
    if not teacher.feeding.is_assumed:
        return ""
    hint = better_normalization(teacher, labeled, columns) if labeled and columns is not None else ""
    said = f"teacher {teacher.id}: nothing says how its inputs are normalized; it is fed {teacher.feeding.line}"
    return f"{said}; {hint or 'say it with mean and std if that is wrong'}"
