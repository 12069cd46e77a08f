"""Teachers that were exported by torch: ``torch.export.save(torch.export.export(model, (inputs,)), "model.pt2")``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass

from feddf.config.errors import first_line
from feddf.config.fuse_config import TeacherConfig
from feddf.oneshot.teachers import Ask, TeacherError, TrainedModel, check_sizes, file_hash, file_of, preprocess_of
from feddf.runtime.device import CPU
from feddf.runtime.origin import check_program
from feddf.runtime.packages import silence


def of_program(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an exported program as a teacher: it holds its code and its weights, and needs no class of the user's."""
    path = file_of(config)
    check_program(path, trust)
    name = config.name or path.stem
    sizes = _input_sizes(_read(path, name), path)

    @contextmanager
    def opened(device: torch.device) -> Iterator[Ask]:
        program = _read(path, name)
        module = (program if device == CPU else move_to_device_pass(program, device)).module()
        fixed = sizes[0]

        def ask(inputs: Tensor) -> Tensor:
            if fixed is None or len(inputs) == fixed:
                return first(module(inputs))
            return in_batches(lambda part: first(module(part)), inputs, fixed)

        with torch.inference_mode():
            yield ask

    content = file_hash([path])
    teacher = TrainedModel(name, opened, (), preprocess_of(config), content=content, source=str(path), takes=sizes[1:])
    check_sizes(teacher, teacher.preprocess)
    return [teacher]


def _read(path: Path, name: str) -> Any:
    try:
        with silence():
            return torch.export.load(path)
    except Exception as error:  # a damaged archive can fail in any way
        raise TeacherError(
            f"teacher {name}: {path} is not a whole program of torch.export: {first_line(error)}"
        ) from error


def _input_sizes(program: Any, path: Path) -> tuple[int | None, ...]:
    """Return the sizes of the program's input, ``None`` for those that may vary."""
    names = program.graph_signature.user_inputs
    if len(names) != 1:
        raise TeacherError(f"teacher {path}: it takes {len(names)} inputs, and a classifier takes one")
    node = next(node for node in program.graph.nodes if node.name == names[0])
    return tuple(size if isinstance(size, int) else None for size in node.meta["val"].shape)


def first(outputs: Any) -> Tensor:
    """Return the first of several outputs: the logits, as most models that return more have it."""
    found = outputs[0] if isinstance(outputs, tuple | list) else outputs
    assert isinstance(found, Tensor), f"an output of type {type(found).__name__}"
    return found


def in_batches(ask: Ask, inputs: Tensor, size: int) -> Tensor:
    """Ask in batches of one size; the last one is filled up with copies, whose answers are left out."""
    answers = []
    for part in inputs.split(size):
        missing = size - len(part)
        whole = torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) if missing else part
        answers.append(ask(whole)[: len(part)])
    return torch.cat(answers)
