"""CIFAR-10 and CIFAR-100 from their authors' python files, read without running anything that they contain.

The files are pickles. A pickle is a program for a small stack machine, and an ``Unpickler`` runs it even if it looks up
no name: a dict's key of 300,000 nested tuples ends the process, one of 2^60 shared tuples is hashed for ever, a memo's
index takes gigabytes (``tests/data/test_hostile_files.py``). One that may call numpy's functions can crash in them. So
no instruction is carried out here. What is needed stands among the program's constants: all pixels are one of them, and
labels and names are those that follow their key.
"""

from __future__ import annotations

import pickletools
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddf.config.errors import one_line

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ROW = 3 * 32 * 32  # bytes of an image

_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1")
_TEXTS = (
    "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "GLOBAL",
)  # fmt: skip


def constants(content: bytes) -> list[str | int]:
    """Return the texts (bytes are texts in Latin 1) and the numbers that a pickle names, in their order."""
    found: list[str | int] = []
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _NUMBERS:
            found.append(argument or 0)
        elif opcode.name in ("NEWTRUE", "NEWFALSE"):
            found.append(int(opcode.name == "NEWTRUE"))
        elif opcode.name in _TEXTS and argument != "latin1":  # in which Python 3 says that its texts are bytes
            found.append(argument.decode("latin-1") if isinstance(argument, bytes) else str(argument))
    return found


def read(path: Path, label_key: str) -> tuple[Tensor, Tensor]:
    """Return (N×3×32×32 bytes, N labels) of one batch file."""
    with one_line(ValueError, f"{path} is not a CIFAR batch file"):
        found = constants(path.read_bytes())
        pixels = max((one for one in found if isinstance(one, str)), key=len, default="")
        if len(pixels) < ROW or label_key not in found:
            raise ValueError(f"it has no images, or no '{label_key}'")
        by_column = next((one for one in reversed(found[: found.index(pixels)]) if isinstance(one, int)), 0)
        flat = np.frombuffer(pixels.encode("latin-1"), np.uint8)
        images = flat.reshape(ROW, -1).T if by_column else flat.reshape(-1, ROW)
        labels = list(takewhile(lambda one: isinstance(one, int), found[found.index(label_key) + 1 :]))
        if len(images) != len(labels):
            raise ValueError(f"it has {len(images)} images and {len(labels)} labels")
        return torch.from_numpy(images.reshape(-1, 3, 32, 32).copy()), torch.tensor(labels)


def names(path: Path) -> tuple[str, ...]:
    """Return CIFAR-100's fine class names from its ``meta`` file; none if there is no such file."""
    if not path.is_file():
        return ()
    with one_line(ValueError, f"{path} is not CIFAR's file of class names"):
        found = constants(path.read_bytes())
        first = found.index("fine_label_names") + 1
        return tuple(str(name) for name in found[first : first + 100])
