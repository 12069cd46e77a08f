"""CIFAR-10 and CIFAR-100 from their authors' python files, read without running anything that they contain.

The files are pickles. A pickle is a program for a small stack machine, and an ``Unpickler`` runs it even if it looks up
no name: a dict's key of 300,000 nested tuples ends the process, one of 2^60 shared tuples is hashed for ever, a memo's
index takes gigabytes (``tests/data/test_hostile_files.py``). One that may call numpy's functions can crash in them. So
the few instructions that such files have are decoded here into plain values, and an array is made of checked bytes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddf.config.errors import first_line

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class _Array:
    """An array of bytes; it has its values when it has been described."""

    values: NDArray[np.uint8]


def decode(content: bytes) -> Any:
    """Return the dicts, lists, numbers, bytes and arrays of bytes in a pickle; raise ``ValueError`` for any other."""
    stack: list[Any] = []
    below_marks: list[list[Any]] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case name if name in _VALUES:
                stack.append(_VALUES[name](argument))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                below_marks.append(stack)
                stack = []
            case "TUPLE" | "APPENDS" | "SETITEMS" as name:
                values, stack = stack, below_marks.pop()
                _gather(name, values, stack)
            case "TUPLE1" | "TUPLE2" | "TUPLE3" | "APPEND" | "SETITEM" as name:
                first = -{"TUPLE2": 2, "TUPLE3": 3, "SETITEM": 2}.get(name, 1)
                values, stack[first:] = stack[first:], []
                _gather(name, values, stack)
            case "STACK_GLOBAL":
                attribute, module = _as(str, stack.pop()), _as(str, stack.pop())
                stack.append(_name(f"{module} {attribute}"))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_call(function, _as(tuple, arguments)))
            case "BUILD":
                state = stack.pop()
                _describe(stack[-1], state)
            case "STOP":
                return stack[-1]
            case name if name not in ("PROTO", "FRAME"):
                raise ValueError(f"it has the instruction {name}, which no such file needs")
    raise ValueError("it ends too early")


def _gather(name: str, values: list[Any], stack: list[Any]) -> None:
    """Put values onto the stack as a tuple, or into the list or dict on top; its keys are plain: no tuple is hashed."""
    if name.startswith("TUPLE"):
        stack.append(tuple(values))
    elif name.startswith("APPEND"):
        _as(list, stack[-1]).extend(values)
    elif all(type(key) in (bytes, str, int) for key in values[::2]):
        _as(dict, stack[-1]).update(zip(values[::2], values[1::2], strict=True))
    else:
        raise ValueError("a key in it is neither text nor a number")


def _name(asked: str) -> str:
    """Return a name that the file asks for. It is never looked up."""
    place = asked.replace("numpy._core", "numpy.core")
    if place not in ("numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype", "_codecs encode"):
        raise ValueError(f"it asks for {asked[:200].replace(' ', '.')}")
    return place.split()[-1]


_VALUES: dict[str, Callable[[Any], Any]] = {
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), int),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), partial(bytes, encoding="latin-1")),  # python 2's strings
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), bytes),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), str),
    "GLOBAL": _name,
}


def _call(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Return what a call would have made."""
    match function, arguments:
        case "_reconstruct", _:
            return _Array()
        case "dtype", ("u1" | "|u1" | b"u1" | b"|u1", *_):
            return "u1"
        case "encode", (str(text), "latin1" | b"latin1"):
            return text.encode("latin-1")
    raise ValueError("it has a call that no such file needs")


def _describe(array: Any, state: Any) -> None:
    """Take the state of an array in; that of a dtype says nothing that is needed."""
    if type(array) is str and array == "u1":
        return
    if not isinstance(array, _Array) or not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("it describes something that is no array")
    _, shape, kind, fortran, content = state
    if kind != "u1" or not all(type(size) is int and size >= 0 for size in _as(tuple, shape)):
        raise ValueError("an array in it is not of bytes, or has no shape")
    flat = np.frombuffer(_as(bytes, content), np.uint8)
    array.values = flat.reshape(shape, order="F" if fortran in (True, 1) else "C")


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it treats a {type(value).__name__} as a {kind.__name__}")
    return value


def _content(path: Path) -> dict[str, Any]:
    return {_word(key): value for key, value in _as(dict, decode(path.read_bytes())).items()}


def _word(value: Any) -> str:
    return str(value.decode() if type(value) is bytes else _as(str, value))


def read(path: Path, label_key: str) -> tuple[Tensor, Tensor]:
    """Return (N×3×32×32 bytes, N labels) of one batch file."""
    try:
        content = _content(path)
        images = torch.from_numpy(_as(_Array, content["data"]).values.reshape(-1, 3, 32, 32).copy())
        numbers = torch.tensor([_as(int, label) for label in _as(list, content[label_key])], dtype=torch.int64)
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(f"{path} is not a CIFAR batch file: {first_line(error)}") from error
    if len(images) != len(numbers):
        raise ValueError(f"{path} has {len(images)} images and {len(numbers)} labels")
    return images, numbers


def names(path: Path) -> tuple[str, ...]:
    """Return CIFAR-100's fine class names from its ``meta`` file; none if there is no such file."""
    if not path.is_file():
        return ()
    try:
        return tuple(_word(name) for name in _as(list, _content(path)["fine_label_names"]))
    except Exception as error:
        raise ValueError(f"{path} is not CIFAR's file of class names: {first_line(error)}") from error
