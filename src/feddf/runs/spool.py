"""Finished clients' updates, kept on disk until their round is safe.

Interrupting a round loses no client that has finished, and a cohort of thousands does not sit in memory: an
update's tensors are read from its file when they are needed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from feddf.models.binary import BinaryState, Bits, wire
from feddf.runtime.atomic import new_file, real_folder
from feddf.states import digest
from feddf.types import Failure, Job, Payload, State, Update


class DiskSpool:
    """The updates of one round, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, job: Job, update: Update) -> Update | Failure:
        """Write an admitted update to disk and return it with its tensors left there."""
        try:
            real_folder(self.folder)
            return _written(_path(self.folder, job), job, update)
        except OSError:
            raise  # a full disk is the server's trouble
        except Exception as error:  # an update that cannot be written down is its client's
            return Failure(job.id, f"it could not be kept: {type(error).__name__}")

    def recall(self, job: Job) -> Update | None:
        """Return the update that answers exactly this job, if a whole one is on disk."""
        path = _path(self.folder, job)
        if not path.is_file():  # nor a pipe, which would be waited for
            return None
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["feddf"])
            update = _on_disk(path, about)
            whole = about["job"] == _name(job) and _checksum(about, update) == about["digest"]
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
            return None
        return update if whole else None

    def clear(self) -> None:
        """Remove the updates of a round that is safe."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _written(path: Path, job: Job, update: Update) -> Update:
    about = {
        "client_id": update.client_id,
        "prototype": update.prototype,
        "round": update.round,
        "n_examples": update.n_examples,
        "metrics": dict(update.metrics),
        "job": _name(job),
    }
    if isinstance(update.state, BinaryState):
        about["packed"] = {key: bits.shape for key, bits in update.state.bits.items()}
        about["order"] = list(update.state)
    sent = {
        **{_place("state", key): tensor for key, tensor in wire(update.state).items()},
        **{_place("payload", name, key): one for name, state in update.payload.items() for key, one in state.items()},
    }
    about["digest"] = _checksum(about, update)
    tensors = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in sent.items()}
    with new_file(path) as temporary:
        temporary.write_bytes(safetensors.torch.save(tensors, {"feddf": json.dumps(about)}))
    return _on_disk(path, about)


def _place(*names: str) -> str:
    """Return the name of a tensor in a file: what it belongs to, and its own name."""
    return json.dumps(names)


def _named(state: State, payload: Payload) -> dict[str, State]:
    """Return weights and a payload under names that cannot be each other's."""
    return {"weights": state, **{f"payload {name}": one for name, one in payload.items()}}


def _checksum(about: Mapping[str, Any], update: Update) -> str:
    """Return a SHA-256 over the tensors and all that is said about them, n_k and the metrics included."""
    said = json.dumps({key: value for key, value in about.items() if key != "digest"}, sort_keys=True)
    return hashlib.sha256(f"{said} {digest(_named(update.state, update.payload))}".encode()).hexdigest()


def _on_disk(path: Path, about: dict[str, Any]) -> Update:
    identity = about["client_id"], about["prototype"], about["round"]
    tensors = StateOnDisk(path)
    names = {key[1] for key in tensors.places if key[0] == "payload"}
    payload = {name: tensors.below("payload", name) for name in sorted(names)}
    state = _unpacked(tensors.below("state"), about)
    return Update(*identity, state, about["n_examples"], about["metrics"], payload)


def _unpacked(tensors: State, about: dict[str, Any]) -> State:
    """Return the state in a file; a packed one is small, and stays packed in memory."""
    if "packed" not in about:
        return tensors
    bits = {
        key: Bits(tensors[f"{key}.signs"], tensors[f"{key}.scales"], tuple(shape))
        for key, shape in about["packed"].items()
    }
    plain = {key: tensors[key] for key in about["order"] if key not in bits}
    return BinaryState(plain, bits, about["order"])


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Safetensors' names."""


class StateOnDisk(Mapping[str, Tensor]):
    """A state whose tensors are read from its file when they are asked for, and kept by nobody."""

    def __init__(self, path: Path, places: Mapping[tuple[str, ...], Any] | None = None, first: int = 0) -> None:
        self._path, self._first, self.places = path, first, dict(places or {})
        if places is None:
            with path.open("rb") as file:  # a safetensors file: the header's length, the header, all tensors' bytes
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            self._first = 8 + length
            self.places = {tuple(json.loads(name)): at for name, at in header.items() if name != "__metadata__"}

    def below(self, *names: str) -> StateOnDisk:
        """Return the state under some names."""
        mine = {place[len(names) :]: at for place, at in self.places.items() if place[: len(names)] == names}
        return StateOnDisk(self._path, mine, self._first)

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[(name,)]
        begin, end = place["data_offsets"]
        content = bytearray(end - begin)
        with self._path.open("rb") as file:  # five times as fast as to open it as what it is
            file.seek(self._first + begin)
            if file.readinto(content) != len(content):
                raise OSError(f"{self._path} ends before the last value of {name}")
        dtype, shape = _DTYPES[place["dtype"]], place["shape"]
        return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)

    def __iter__(self) -> Iterator[str]:
        return (place[0] for place in self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # what travels is the state, not the name of a file


def _name(job: Job) -> str:
    """Return what the answer depends on: the seed stands for client and round, the digest for what was sent."""
    return f"{job.seed} {job.counted} {digest(_named(job.state, job.payload))}"


def _path(folder: Path, job: Job) -> Path:
    return folder / f"round-{job.round:04d}-{safe_name(job.id)}-{job.seed:016x}.safetensors"


def safe_name(client: str) -> str:
    """Return a client's name as a part of a file's name."""
    return "".join(character if character.isalnum() or character in "-_" else "_" for character in client)[:80]
