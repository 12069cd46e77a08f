"""Files of answers: what a model says about every input of an agreed pool, in the place of the model.

An ``.answers`` file is a safetensors file. Classes are log probabilities, labels log odds, in 16 or 8 bits; values are
32-bit floats. With more than a thousand channels only the largest are stored: what they leave of one belongs to the
others in equal parts. The metadata say what the channels are, which pool the answers are for (a hash), of which model
(a hash, and when) and what rounding has changed. Files are written and read a batch at a time, whatever their size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from safetensors import safe_open
from torch import Tensor

from feddf.config.errors import one_line
from feddf.config.foreign import parse_json, validated
from feddf.fusing.teachers import TeacherError
from feddf.outputs import MOST_CHANNELS, Outputs, from_description
from feddf.runtime.atomic import new_file
from feddf.scores import CHANNELS

FORMAT = "feddf answers 1"
SUFFIX = ".answers"
LARGEST = 64  # channels that are stored of more than MOST_CHANNELS
MOST_NAMES = 1 << 18  # a vocabulary has so many; a small file could name millions
SPAN = {16: 60.0, 8: 20.0}  # the largest log odds, and minus the least log probability; e⁻²⁰ is 2·10⁻⁹
_TYPES = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I32": np.int32}


class About(BaseModel):
    """What the metadata of a file say."""

    outputs: dict[str, Any]
    names: tuple[str, ...] = Field(max_length=MOST_NAMES)
    count: int
    bits: Literal[8, 16, 32]
    largest: int | None = None
    pool: str = ""
    model: str = ""
    name: str = ""
    made: str = ""
    lost: float = 0.0
    given: str = ""  # what the model itself returned: logits or probabilities


@dataclass(frozen=True)
class Coding:
    """How raw outputs are stored: in how many bits, and how many channels of each position."""

    outputs: Outputs
    bits: int
    largest: int | None = None

    @classmethod
    def of(cls, outputs: Outputs, bits: int = 16, largest: int | None = None) -> Coding:
        """Return the coding that fits some outputs: values have a unit, and classes may be many."""
        if outputs.has_units:
            return cls(outputs, 32)
        many = outputs.one_is_right and (outputs.channels or 0) > MOST_CHANNELS
        wanted = largest or (LARGEST if many else None)
        return cls(outputs, bits, wanted if wanted and wanted < (outputs.channels or 0) else None)

    def tensors(self, n: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return type and shape of each stored tensor."""
        outputs = self.outputs
        shape = (n, self.largest or (outputs.channels or 0) * outputs.numbers, *outputs.positions)
        found = {"answers": ({32: "F32", 16: "F16", 8: "U8"}[self.bits], shape)}
        return {**found, "channels": ("I32", shape)} if self.largest else found

    def encode(self, raw: Tensor) -> dict[str, NDArray[Any]]:
        """Return what is stored of raw outputs."""
        if self.bits == 32:
            return {"answers": raw.float().numpy()}
        logs, span = self.outputs.raw(self.outputs.probabilities(raw.double())), SPAN[self.bits]
        found: dict[str, NDArray[Any]] = {}
        if self.largest:
            logs, channels = logs.topk(self.largest, dim=CHANNELS)
            found["channels"] = channels.to(torch.int32).numpy()
        logs = logs.clamp(-span, span)
        rounded = logs.half() if self.bits == 16 else ((logs + span) / self._step).round().to(torch.uint8)
        return {"answers": rounded.numpy(), **found}

    @property
    def _step(self) -> float:
        """Of log probabilities, which are at most 0, or of log odds, in 8 bits."""
        return SPAN[8] / (255 if self.outputs.one_is_right else 127.5)

    def decode(self, stored: Mapping[str, NDArray[Any]]) -> Tensor:
        """Return raw outputs that stand for what is stored."""
        found = torch.from_numpy(np.ascontiguousarray(stored["answers"])).float()
        if self.bits == 8:
            found = found * self._step - SPAN[8]
        if not self.largest:
            return found
        channels, count = torch.from_numpy(np.ascontiguousarray(stored["channels"])).long(), self.outputs.channels or 0
        rest = (1 - found.exp().sum(dim=CHANNELS, keepdim=True)).clamp_min(1e-12) / (count - self.largest)
        whole = rest.log().expand(len(found), count, *self.outputs.positions).clone()
        return whole.scatter_(CHANNELS, channels.clamp(0, count - 1), found)


@dataclass(frozen=True)
class AnswerFile:
    """Stored answers, of which some are read at a time."""

    path: Path

    def _refusing(self) -> AbstractContextManager[None]:
        return one_line(TeacherError, f"{self.path} holds no answers that can be used")

    @cached_property
    def about(self) -> About:
        """What the metadata say, once they fit what is stored."""
        with self._refusing(), safe_open(self.path, framework="numpy") as file:
            said = file.metadata() or {}
            if said.get("format") != FORMAT:
                raise ValueError(f"its metadata do not say that it is '{FORMAT}'")
            about: About = validated(About, parse_json(said["about"]))
            outputs = from_description(about.outputs)
            coding = Coding(outputs, about.bits, about.largest)
            due = coding.tensors(about.count)
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            found = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
            whole = all(prod(shape) > 0 for _, shape in due.values())
            if found != due or len(about.names) != outputs.channels or not whole:
                raise ValueError(f"it has {found}, and says that it has {due} with {len(about.names)} names")
        return about

    @cached_property
    def coding(self) -> Coding:
        """How answers are stored, and what they mean."""
        return Coding(from_description(self.about.outputs), self.about.bits, self.about.largest)

    @property
    def _stored(self) -> Mapping[str, NDArray[Any]]:
        return {name: one for name, one in _mapped(self.path, "r").items() if name in self.coding.tensors(1)}

    def __len__(self) -> int:
        return self.about.count

    def __getitem__(self, indices: Tensor) -> Tensor:
        chosen = indices.numpy()
        return self.coding.decode({name: one[chosen] for name, one in self._stored.items()})

    def check(self) -> None:
        """Raise :class:`TeacherError` where an answer is not finite or no log probability, or a channel is none."""
        outputs = self.coding.outputs
        count = outputs.channels or 0
        with self._refusing():
            for part in torch.arange(len(self)).split(outputs.at_once(256)):
                stored = {name: one[part.numpy()] for name, one in self._stored.items()}
                if self.coding.largest and not 0 <= stored["channels"].min() <= stored["channels"].max() < count:
                    raise ValueError("it names channels that are none")
                raw = self.coding.decode(stored)
                wrong = ~raw.isfinite().flatten(1).all(dim=1)
                if outputs.one_is_right:
                    wrong |= ((raw.exp().sum(dim=CHANNELS) - 1).abs() > 0.05).view(len(part), -1).any(dim=1)
                if bool(wrong.any()):
                    raise ValueError(f"what it says about input {int(part[wrong][0])} are no {outputs.kind}")


def write_answers(path: Path, batches: Iterable[Tensor], n: int, coding: Coding, about: Mapping[str, Any]) -> float:
    """Write raw outputs as they come; return what rounding has changed at most, in probabilities (or values)."""
    outputs, lost, done = coding.outputs, 0.0, 0
    known = {"outputs": outputs.describe(), "count": n, "bits": coding.bits, "largest": coding.largest, **about}
    with new_file(path) as temporary:
        _create(temporary, coding.tensors(n), About(**known))
        for raw in (part for batch in batches for part in batch.split(outputs.at_once(len(batch)))):
            encoded, stored = coding.encode(raw), _mapped(temporary, "r+")  # pages that stay mapped count as memory
            for name, one in encoded.items():
                stored[name][done : done + len(raw)] = one
            off = outputs.probabilities(coding.decode(encoded).double()) - outputs.probabilities(raw.double())
            lost, done = max(lost, float(off.abs().max())), done + len(raw)
        _create(temporary, coding.tensors(n), About(**{**known, "lost": lost}))
    return lost


def _create(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], about: About) -> None:
    """Write the head of a safetensors file, and let it be as long as all of its tensors, which stay as they are."""
    head: dict[str, Any] = {"__metadata__": {"format": FORMAT, "about": about.model_dump_json()}}
    first = 0
    for name, (kind, shape) in tensors.items():
        last = first + prod(shape) * np.dtype(_TYPES[kind]).itemsize
        head[name], first = {"dtype": kind, "shape": shape, "data_offsets": (first, last)}, last
    text = json.dumps(head).encode()
    text = text.ljust(-(-(len(text) + 40) // 4096) * 4096)  # room for a number that is written later
    with path.open("r+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + first)


def _mapped(path: Path, mode: Literal["r", "r+"]) -> dict[str, np.memmap[Any, Any]]:
    """Return the tensors of a safetensors file in their places on disk."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = parse_json(file.read(length))
    places = {name: one for name, one in head.items() if name != "__metadata__"}
    return {
        name: np.memmap(path, _TYPES[one["dtype"]], mode, 8 + length + one["data_offsets"][0], tuple(one["shape"]))
        for name, one in places.items()
    }
