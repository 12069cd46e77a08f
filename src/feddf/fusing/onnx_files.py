"""ONNX files as teachers: what a file says of itself, and how it predicts.

A file is looked into once, without its weights being set up: it says the sizes and the type of its input, and perhaps
(scikit-learn's, XGBoost's, Ultralytics') its classes and how its input is scaled.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddf.config.errors import one_line
from feddf.fusing.beside import About, listed
from feddf.fusing.feeding import FILE, Feeding, Sizes, of_range, of_sizes, shown_sizes
from feddf.fusing.teachers import PredictBatch, TeacherError
from feddf.runtime.packages import onnx, onnxruntime
from feddf.saved.model import Tokens

LONGEST = 600.0  # seconds for an ONNX file to be loaded, and for a batch: it may hold a loop without end
FLOATS, INTEGERS = ("float16", "float32", "float64"), ("int64", "int32", "uint8")


@dataclass(frozen=True)
class Graph:
    """The inputs of a file (the main one first), which output is read, the keys of one that is a map, and the rest.

    ``flat`` says whether that output is known to have one row for each input, and no positions.
    """

    inputs: tuple[str, ...]
    sizes: Sizes
    type: str
    output: str
    keys: tuple[Any, ...] | None
    about: About
    flat: bool

    @property
    def takes(self) -> str:
        """The form of its main input."""
        return f"{shown_sizes(self.sizes)} of {self.type}"


def read_graph(path: Path, name: str) -> Graph:
    """Return what a file says, without the weights that lie beside it."""
    damaged = f"teacher {name}: {path} is not a whole ONNX model"
    with one_line(TeacherError, damaged), one_line(TeacherError, f"teacher {name}", ValueError):
        model = onnx().load(str(path), load_external_data=False)
        graph = model.graph
        weights = {one.name for one in graph.initializer}
        given = [one for one in graph.input if one.name not in weights]
        if not given:
            raise ValueError("it takes no input, and a classifier takes one")
        main = next((one for one in given if "mask" not in one.name and "type" not in one.name), given[0])
        tensor = main.type.tensor_type
        type = str(onnx().helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        sizes = tuple(size.dim_value if size.dim_value > 0 else None for size in tensor.shape.dim)
        labels = _labels(graph)
        output, keys = _output(graph.output, labels)
        said = _metadata({one.key: one.value for one in model.metadata_props})
        scaled = of_range(0, 255) if type == "uint8" else _scale(graph)
        if type not in (*FLOATS, *INTEGERS):
            raise ValueError(f"its input '{main.name}' is of {type}; floats or integers are needed")
    feeding = said.feeding.otherwise(of_sizes(sizes[1:], integers=type in ("int64", "int32"))).otherwise(scaled)
    names = (main.name, *(one.name for one in given if one.name != main.name))
    classes = said.classes or (() if labels == tuple(range(len(labels))) else listed(labels))
    ranks = {one.name: len(one.type.tensor_type.shape.dim) for one in graph.output}
    return Graph(names, sizes, type, output, keys, About(feeding, classes), keys is not None or ranks[output] == 2)


def _attributes(graph: Any, *names: str) -> Iterator[Any]:
    """Yield the values of the attributes of some names, of all nodes."""
    for node in graph.node:
        yield from (onnx().helper.get_attribute_value(one) for one in node.attribute if one.name in names)


def _labels(graph: Any) -> tuple[Any, ...]:
    """Return the classes that a node of scikit-learn's or XGBoost's names, texts or whole numbers."""
    names = ("classlabels_strings", "classlabels_int64s", "classlabels_ints")
    found = next((values for values in _attributes(graph, *names) if values), ())
    return tuple(one.decode() if isinstance(one, bytes) else one for one in found)


def _output(outputs: Sequence[Any], labels: tuple[Any, ...]) -> tuple[str, tuple[Any, ...] | None]:
    """Return which output has a row for each input: the first of floats, or a map from labels (of a zipmap)."""
    for one in outputs:
        kind = onnx().helper.tensor_dtype_to_np_dtype(one.type.tensor_type.elem_type or 1)
        if one.type.HasField("tensor_type") and str(kind) in FLOATS:
            return one.name, None
    maps = [one.name for one in outputs if one.type.HasField("sequence_type")]
    if not maps:
        raise ValueError(f"it has no output of logits or probabilities, but {', '.join(one.name for one in outputs)}")
    return maps[0], labels


def _metadata(values: dict[str, str]) -> About:
    """Return what a file's metadata say, in the words that others use (Ultralytics: ``names``)."""
    parsed = {name: _literal(text) for name, text in values.items()}
    names = next((parsed[name] for name in ("names", "classes", "labels") if name in parsed), ())
    mean, std = ([float(one) for one in parsed.get(name, ())] for name in ("mean", "std"))
    return About(Feeding.said(FILE, mean=mean, std=std), listed(names))


def _literal(text: str) -> Any:
    """Return a list or a table that was written as text; words with commas between them are a list."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        found = [part.strip() for part in text.split(",")]
    return found if isinstance(found, list | tuple | dict) else [found]


def _scale(graph: Any) -> Feeding:
    """Return whether the thresholds of trees, or the means of a scaler, are those of bytes or of values up to one."""
    found = [np.asarray(values, float) for values in _attributes(graph, "nodes_values", "offset")]
    if not found or min(one.min() for one in found) < 0:
        return Feeding()
    most = max(one.max() for one in found)
    return of_range(0, 255) if most > 16 else of_range(0, 1) if most <= 1 else Feeding()


def load_onnx(
    graph: Graph, path: Path, name: str, tokenizer: str | None, device: torch.device
) -> tuple[Sizes, PredictBatch]:
    """Return the sizes of a batch, and what predicts with a file, on the CPU whatever the device."""
    damaged = f"teacher {name}: {path} is not a whole ONNX model"
    with one_line(TeacherError, damaged), one_line(TeacherError, f"teacher {name}", ValueError):
        return graph.sizes, partial(_predict, open_session(path), graph, name, tokenizer)


def open_session(path: Path) -> Any:
    """Return what runs a file, on the CPU."""
    options = onnxruntime().SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    cancel = getattr(options, "set_load_cancellation_flag", bool)  # older versions have none
    with _limited(partial(cancel, True)):
        return onnxruntime().InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _predict(session: Any, graph: Graph, name: str, tokenizer: str | None, inputs: Tensor) -> Tensor:
    """A text model's further inputs are the mask of what is no padding, and the (one) kind of each token."""
    values: NDArray[Any] = inputs.numpy()
    main, *others = graph.inputs
    feed = {main: (np.rint(values) if graph.type == "uint8" else values).astype(graph.type)}
    for other in others:
        if "mask" in other and tokenizer is not None:
            feed[other] = Tokens(tokenizer, inputs.shape[1]).mask(inputs).numpy()
        elif "type" in other:
            feed[other] = np.zeros(tuple(inputs.shape), dtype=np.int64)
        else:
            raise TeacherError(f"teacher {name}: it takes a further input '{other}', and a classifier takes one")
    options = onnxruntime().RunOptions()
    with _limited(partial(setattr, options, "terminate", True)):  # checked between operators, also inside a loop
        (found,) = session.run([graph.output], feed, options)
    if graph.keys is not None:
        keys = graph.keys or tuple(found[0])
        found = [[row[key] for key in keys] for row in found]
    return torch.from_numpy(np.asarray(found, dtype=np.float32))


@contextmanager
def _limited(stop: Callable[[], Any]) -> Iterator[None]:
    """Call ``stop`` where a block takes longer than :data:`LONGEST`."""
    timer = threading.Timer(LONGEST, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
