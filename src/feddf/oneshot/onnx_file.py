"""Teachers in ONNX files, from any framework. They run in onnxruntime (``pip install 'feddf[onnx]'``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddf.config.errors import first_line
from feddf.config.fuse_config import TeacherConfig
from feddf.oneshot.exported import in_batches
from feddf.oneshot.teachers import Ask, TeacherError, TrainedModel, check_sizes, file_hash, file_of, preprocess_of
from feddf.runtime.packages import onnxruntime
from feddf.saved.preprocess import Tokens

TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


def of_onnx(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an ONNX file as a teacher. Its first output are the logits (or probabilities, if ``outputs`` says so).

    It takes one input, images or rows of tokens; a text model may also take an attention mask. It runs on the CPU,
    whatever the device.
    """
    path = file_of(config)
    name = config.name or path.stem
    session = _session(path, name)
    given = session.get_inputs()
    main = next((one for one in given if "mask" not in one.name and "type" not in one.name), given[0])
    if main.type not in TYPES:
        raise TeacherError(f"teacher {name}: its input '{main.name}' is of {main.type}; floats or integers are needed")
    sizes = tuple(size if isinstance(size, int) and size > 0 else None for size in main.shape)
    preprocess = preprocess_of(config)
    others = [one.name for one in given if one.name != main.name]

    @contextmanager
    def opened(device: torch.device) -> Iterator[Ask]:
        running = _session(path, name)

        def ask(inputs: Tensor) -> Tensor:
            feed = {main.name: inputs.numpy().astype(TYPES[main.type])}
            feed |= {other: _beside(other, inputs, preprocess, name) for other in others}
            return torch.from_numpy(np.asarray(running.run(None, feed)[0]))

        fixed = sizes[0]
        yield (lambda inputs: in_batches(ask, inputs, fixed)) if fixed is not None else ask

    files = [path, *sorted(path.parent.glob(f"{path.name}.data"))]  # large weights lie beside the file
    content = file_hash(files)
    teacher = TrainedModel(
        name, opened, (), preprocess, content=content, source=str(path), takes=sizes[1:], moves=False
    )
    check_sizes(teacher, preprocess)
    return [teacher]


def _session(path: Path, name: str) -> Any:
    try:
        library = onnxruntime()
        options = library.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        return library.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except ValueError as error:
        raise TeacherError(f"teacher {name}: {first_line(error)}") from error
    except Exception as error:  # onnxruntime has errors of its own for everything
        raise TeacherError(f"teacher {name}: {path} is not a whole ONNX model: {first_line(error)}") from error


def _beside(input_name: str, inputs: Tensor, preprocess: Any, teacher: str) -> Any:
    """Return a text model's further inputs: the mask of what is no padding, and the (one) kind of each token."""
    if "mask" in input_name and isinstance(preprocess, Tokens):
        return (inputs != preprocess.padding).numpy().astype(np.int64)
    if "type" in input_name:
        return np.zeros(tuple(inputs.shape), dtype=np.int64)
    raise TeacherError(f"teacher {teacher}: it takes a further input '{input_name}', and a classifier takes one")
