"""CIFAR-10 and CIFAR-100 from their authors' python files, read without running anything that they contain.

The files are pickles. A pickle is a program for a small stack machine, and even one that may call nothing but numpy's
own functions can hand these a state that crashes the process. So the program is not run: the few instructions that
such files have are decoded here into plain values, and an array is made from checked bytes at the end.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddf.config.errors import first_line

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass
class _Array:
    """An array of bytes that is being described."""

    shape: tuple[int, ...] = ()
    content: bytes = b""
    fortran: bool = False


@dataclass(frozen=True)
class _Name:
    """A name that the file asks for. It is never looked up."""

    module: str
    name: str


class _Mark:
    """Where a list of values begins on the stack."""


_MARK = _Mark()
_BYTES = ("u1", "|u1", b"u1", b"|u1")


def decoded(content: bytes) -> Any:
    """Return the dicts, lists, numbers, bytes and arrays of bytes in a pickle; raise ``ValueError`` for any other."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        values: list[Any] = []
        while (value := stack.pop()) is not _MARK:  # from the top: a file with many marks must not take quadratic time
            values.append(value)
        return values[::-1]

    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in _VALUES:
            stack.append(_VALUES[name](argument))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[int(argument or 0)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(argument or 0)])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "LIST"):
            values = since_mark()
            stack.append(tuple(values) if name == "TUPLE" else values)
        elif name == "DICT":
            stack.append(_paired(since_mark()))
        elif name == "APPEND":
            last = stack.pop()
            _as(list, stack[-1]).append(last)
        elif name == "APPENDS":
            values = since_mark()
            _as(list, stack[-1]).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            _as(dict, stack[-1]).update(_paired(values))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_named(_as(str, module), _as(str, attribute)))
        elif name == "REDUCE":
            given, asked = stack.pop(), stack.pop()
            stack.append(_made(asked, _as(tuple, given)))
        elif name == "BUILD":
            state = stack.pop()
            _described(stack[-1], state)
        elif name == "STOP":
            return stack[-1]
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the instruction {name}, which no such file needs")
    raise ValueError("it ends too early")


def _text(value: str) -> bytes:
    return value.encode("latin-1")  # python 2's strings are bytes


_VALUES: dict[str, Callable[[Any], Any]] = {
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"), int),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _text),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), bytes),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"), str),
    "GLOBAL": lambda given: _named(*given.split(" ", 1)),
}


def _named(module: str, name: str) -> _Name:
    place = module.replace("numpy._core", "numpy.core")
    if (place, name) not in {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.numeric", "_frombuffer"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }:
        raise ValueError(f"it asks for {module}.{name}")
    return _Name(place, name)


def _made(asked: Any, given: tuple[Any, ...]) -> Any:
    """Return what a call would have made."""
    name = asked.name if isinstance(asked, _Name) else ""
    if name == "_reconstruct":
        return _Array()
    if name == "dtype" and given and given[0] in _BYTES:
        return "u1"
    if name == "encode" and len(given) == 2 and isinstance(given[0], str) and given[1] in ("latin1", b"latin1"):
        return _text(given[0])
    if name == "_frombuffer" and len(given) == 4 and given[1] == "u1":
        array = _Array()
        _described(array, (1, given[2], given[1], given[3] == "F", given[0]))
        return array
    raise ValueError("it has a call that no such file needs")


def _described(array: Any, state: Any) -> None:
    """Take the state of an array in; that of a dtype says nothing that is needed."""
    if array == "u1":
        return
    if not isinstance(array, _Array) or not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("it describes something that is no array")
    _, shape, kind, fortran, content = state
    sizes = shape if isinstance(shape, tuple) else (shape,)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("an array in it has no shape")
    if kind != "u1" or not isinstance(content, bytes) or prod(sizes) != len(content):
        raise ValueError("an array in it is not of as many bytes as its shape says")
    array.shape, array.content, array.fortran = sizes, content, fortran in (True, 1)


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it treats a {type(value).__name__} as a {kind.__name__}")
    return value


def _paired(values: list[Any]) -> dict[Any, Any]:
    """Return a dict; its keys are plain, since to hash a tuple in a million tuples would crash the process."""
    if not all(type(key) in (bytes, str, int) for key in values[::2]):
        raise ValueError("a key in it is neither text nor a number")
    return dict(zip(values[::2], values[1::2], strict=True))


def read(path: Path, label_key: str) -> tuple[Tensor, Tensor]:
    """Return (N×3×32×32 bytes, N labels) of one batch file."""
    try:
        content = _keyed(decoded(path.read_bytes()))
        data, labels = content["data"], content[label_key]
        array = _as(_Array, data)
        flat = np.frombuffer(array.content, np.uint8).reshape(array.shape, order="F" if array.fortran else "C")
        images = torch.from_numpy(flat.reshape(-1, 3, 32, 32).copy())
        numbers = torch.tensor([_as(int, label) for label in _as(list, labels)], dtype=torch.int64)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(f"{path} is not a CIFAR batch file: {first_line(error)}") from error
    if len(images) != len(numbers):
        raise ValueError(f"{path} has {len(images)} images and {len(numbers)} labels")
    return images, numbers


def read_all(paths: list[Path], label_key: str) -> tuple[Tensor, Tensor]:
    """Return the batch files one after the other."""
    batches = [read(path, label_key) for path in paths]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def names(path: Path) -> tuple[str, ...]:
    """Return CIFAR-100's fine class names from its ``meta`` file; none if there is no such file."""
    if not path.is_file():
        return ()
    try:
        content = _keyed(decoded(path.read_bytes()))
        return tuple(_word(name) for name in _as(list, content["fine_label_names"]))
    except Exception as error:
        raise ValueError(f"{path} is not CIFAR's file of class names: {first_line(error)}") from error


def _keyed(content: Any) -> dict[str, Any]:
    return {_word(key): value for key, value in _as(dict, content).items()}


def _word(value: Any) -> str:
    if not isinstance(value, bytes | str | int):
        raise ValueError(f"it has a {type(value).__name__} where a word should be")
    return value.decode() if isinstance(value, bytes) else str(value)
