"""Teachers in files: weights of feddf's architectures, programs of ``torch.export`` (.pt2), and ONNX from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddf.config.errors import FeddfError, first_line
from feddf.config.fuse_config import TeacherConfig
from feddf.config.names import MODELS
from feddf.evaluate import evaluation_mode, fold_batchnorm
from feddf.fusing.teachers import (
    PredictBatch,
    Sizes,
    TeacherError,
    TrainedModel,
    check_sizes,
    file_hash,
    file_of,
    preprocess_of,
)
from feddf.runtime.atomic import check_program
from feddf.runtime.device import CPU
from feddf.runtime.packages import onnxruntime, silence
from feddf.saved.model import ModelSpec, fitting
from feddf.saved.model_folder import at_home, read_weights, specs
from feddf.saved.preprocess import Preprocess, Tokens
from feddf.types import State


def of_feddf(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return the models of a folder that feddf wrote: all prototypes of a run, or the one that is named."""
    path = Path(config.path).expanduser()
    found = specs(path, trust=trust)
    if config.prototype is not None and config.prototype not in found:
        raise TeacherError(f"teacher {path}: no prototype '{config.prototype}'; it has {', '.join(found)}")
    own = config.name or path.resolve().name
    return [
        _of_weights(
            weights,
            replace(spec, preprocess=preprocess_of(config, spec.preprocess)),
            f"{own}-{name}" if len(found) > 1 else own,
            path,
        )
        for name, (spec, weights) in found.items()
        if config.prototype in (None, name)
    ]


def of_safetensors(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return weights of an architecture that the configuration names."""
    path = Path(config.path).expanduser()
    if config.model is None:
        allowed = f"say which architecture its weights are of, with model = ... ({', '.join(MODELS)})"
        raise TeacherError(f"teacher {path}: {allowed}")
    if not config.size and config.tokenizer is None:
        raise TeacherError(
            f"teacher {path}: say how large its images are, with size = 32 for instance (or a tokenizer)"
        )
    preprocess = preprocess_of(config)
    assert preprocess is not None, "it has a size or a tokenizer"
    spec = ModelSpec(config.model, preprocess.shape, config.classes, preprocess, config.options)
    return [_of_weights(file_of(config), spec, config.name or path.stem)]


def _of_weights(path: Path, spec: ModelSpec, id: str, folder: Path | None = None) -> TrainedModel:
    """Return weights of an architecture of feddf's as a teacher; outside a folder they say how many outputs it has."""
    if not path.is_file():
        raise TeacherError(f"teacher {id}: there are no weights {path}")
    home = folder or path.parent
    here, _ = at_home(spec, {}, home)

    def state() -> State:
        return at_home(spec, read_weights(path), home)[1]

    @contextmanager
    def open_weights(device: torch.device) -> Iterator[PredictBatch]:
        weights = state()
        try:
            found = here if folder else _with_outputs(here, weights)
            module = found.prototype.load(weights, device)
        except FeddfError:
            raise
        except Exception as error:
            raise TeacherError(
                f"teacher {id}: {path} does not fit the model '{spec.model}': {fitting(error)}"
            ) from error
        with evaluation_mode(module):
            yield fold_batchnorm(module)

    content = file_hash([path], repr((spec.model, sorted(spec.options.items()), spec.shape)))
    return TrainedModel(
        id, open_weights, spec.classes, here.preprocess, content=content, source=str(path), spec=here, state=state
    )


def _with_outputs(spec: ModelSpec, state: State) -> ModelSpec:
    """Return a description with as many classes as the weights have outputs; if no number fits, loading will say so."""
    shapes = {key: tensor.shape for key, tensor in state.items()}
    counts = sorted({len(tensor) for tensor in state.values() if tensor.ndim in (1, 2)})
    for count in sorted(counts, key=lambda one: one != len(spec.classes)):  # what the user says is tried first
        tried = replace(spec, classes=tuple(str(number) for number in range(count)))
        try:
            with torch.random.fork_rng(devices=[]):
                found = tried.prototype.build().state_dict()
        except Exception:
            break
        if {key: tensor.shape for key, tensor in found.items()} == shapes:
            return tried
    return spec if spec.classes else replace(spec, classes=("0", "1"))


# Programs, which say themselves which sizes they take

Load = Callable[[torch.device], tuple[Sizes, PredictBatch]]
"""Reads a file and returns the sizes of a batch that it takes, and what predicts with it."""


def _of_program(
    config: TeacherConfig, path: Path, load: Load, files: Sequence[Path], preprocess: Preprocess | None, moves: bool
) -> TrainedModel:
    """Return a program as a teacher.

    Where nothing says how it is fed, its sizes must be known before the pool is made: then, and only then, its file is
    read before it predicts. It is not kept open until then, so that one teacher is in memory at a time.
    """
    name = config.name or path.stem

    @contextmanager
    def open_program(device: torch.device) -> Iterator[PredictBatch]:
        sizes, predict = load(device)
        check_sizes(name, sizes[1:], preprocess)
        with torch.inference_mode():
            yield predict if sizes[0] is None else partial(_in_batches, predict, sizes[0])

    takes = load(CPU)[0][1:] if preprocess is None else ()
    return TrainedModel(
        name, open_program, (), preprocess, content=file_hash(files), source=str(path), takes=takes, moves=moves
    )


def _in_batches(predict: PredictBatch, size: int, inputs: Tensor) -> Tensor:
    """Predict in batches of one size; the last one is filled up with copies, whose outputs are left out."""
    outputs = []
    for part in inputs.split(size):
        missing = size - len(part)
        whole = torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) if missing else part
        outputs.append(predict(whole)[: len(part)])
    return torch.cat(outputs)


def of_program(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an exported program as a teacher: it holds its code and its weights, and needs no class of the user's."""
    path = file_of(config)
    check_program(path, trust)
    load = partial(_load_program, path, config.name or path.stem)
    return [_of_program(config, path, load, [path], preprocess_of(config), moves=True)]


def _load_program(path: Path, name: str, device: torch.device) -> tuple[Sizes, PredictBatch]:
    from torch.export.passes import move_to_device_pass

    try:
        with silence():
            program: Any = torch.export.load(path)
    except Exception as error:  # a damaged archive can fail in any way
        raise TeacherError(
            f"teacher {name}: {path} is not a whole program of torch.export: {first_line(error)}"
        ) from error
    inputs = program.graph_signature.user_inputs
    if len(inputs) != 1:
        raise TeacherError(f"teacher {path}: it takes {len(inputs)} inputs, and a classifier takes one")
    node = next(node for node in program.graph.nodes if node.name == inputs[0])
    sizes = tuple(size if isinstance(size, int) else None for size in node.meta["val"].shape)
    module = (program if device == CPU else move_to_device_pass(program, device)).module()
    return sizes, lambda batch: _first(module(batch))


def _first(outputs: Any) -> Tensor:
    """Return the first of several outputs: the logits, as most models that return more have it."""
    found = outputs[0] if isinstance(outputs, tuple | list) else outputs
    assert isinstance(found, Tensor), f"an output of type {type(found).__name__}"
    return found


ONNX_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


def of_onnx(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an ONNX file as a teacher. Its first output are the logits (or probabilities, if ``outputs`` says so).

    It takes one input, images or rows of tokens; a text model may also take an attention mask. It runs in onnxruntime
    (``pip install 'feddf[onnx]'``) on the CPU, whatever the device.
    """
    path, preprocess = file_of(config), preprocess_of(config)
    files = [path, *sorted(path.parent.glob(f"{path.name}.data"))]  # large weights lie beside the file
    load = partial(_load_onnx, path, config.name or path.stem, preprocess)
    return [_of_program(config, path, load, files, preprocess, moves=False)]


def _load_onnx(
    path: Path, name: str, preprocess: Preprocess | None, device: torch.device
) -> tuple[Sizes, PredictBatch]:
    session = _session(path, name)
    given = session.get_inputs()
    main = next((one for one in given if "mask" not in one.name and "type" not in one.name), given[0])
    if main.type not in ONNX_TYPES:
        raise TeacherError(f"teacher {name}: its input '{main.name}' is of {main.type}; floats or integers are needed")
    others = [one.name for one in given if one.name != main.name]

    def predict(inputs: Tensor) -> Tensor:
        feed = {main.name: inputs.numpy().astype(ONNX_TYPES[main.type])}
        feed |= {other: _further_input(other, inputs, preprocess, name) for other in others}
        return torch.from_numpy(np.asarray(session.run(None, feed)[0]))

    return tuple(size if isinstance(size, int) and size > 0 else None for size in main.shape), predict


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


def _further_input(input_name: str, inputs: Tensor, preprocess: Preprocess | None, teacher: str) -> Any:
    """Return a text model's further inputs: the mask of what is no padding, and the (one) kind of each token."""
    if "mask" in input_name and isinstance(preprocess, Tokens):
        return (inputs != preprocess.padding).numpy().astype(np.int64)
    if "type" in input_name:
        return np.zeros(tuple(inputs.shape), dtype=np.int64)
    raise TeacherError(f"teacher {teacher}: it takes a further input '{input_name}', and a classifier takes one")
