"""What clients leave on disk: finished updates, until their round is safe; and the states that they keep over rounds.

Interrupting a round loses no client that has finished, and a cohort of thousands does not sit in memory: an
update's tensors are read from its file when they are needed.

A client cannot know whether its update was fused. So a job names the last round that counted, the client goes on from
the version of that round, and keeps it until the next one counts. In a simulation the files lie in the run's folder and
an engine around the others reads and writes them; a real client has them at its own place.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from feddf.config.foreign import parse_json
from feddf.models.binary import BinaryState, Bits, wire
from feddf.runs.store import by_path, nested
from feddf.runtime.atomic import new_file, read_checked, real_folder, write_checked
from feddf.states import digest
from feddf.types import Engine, Failure, Job, Payload, Reply, State, Update

LOST = "lost_state"  # the metric of a client that began anew because the state that it had kept is lost
_FIELDS = "client_id", "prototype", "round", "n_examples", "metrics"  # what an update says besides its tensors


@dataclass(frozen=True)
class DiskSpool:
    """The updates of one round, in a folder; where they are ``durable`` they outlast a crash of the machine."""

    folder: Path
    durable: bool = False
    _sent: dict[int, tuple[State, str]] = field(default_factory=dict, compare=False, repr=False)

    def keep(self, job: Job, update: Update) -> Update | Failure:
        """Write an admitted update to disk and return it with its tensors left there."""
        try:
            real_folder(self.folder)
            return _write(self._path(job), self._name(job), update, self.durable)
        except OSError:
            raise  # a full disk is the server's trouble
        except Exception as error:  # an update that cannot be written down is its client's
            return Failure(job.id, f"it could not be kept: {type(error).__name__}")

    def recall(self, job: Job) -> Update | None:
        """Return the update that answers exactly this job, if a whole one is on disk."""
        path = self._path(job)
        if not path.is_file():  # nor a pipe, which would be waited for
            return None
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = parse_json(file.metadata()["feddf"])
            update = _on_disk(path, about)
            whole = about["job"] == self._name(job) and _checksum(about, update) == about["digest"]
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
            return None
        return update if whole else None

    def clear(self) -> None:
        """Remove the updates of a round that is safe."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._sent.clear()  # it holds the weights that were sent

    def _name(self, job: Job) -> str:
        """Return what the answer depends on: the seed stands for client and round, the digests for what was sent."""
        if id(job.state) not in self._sent:  # most clients of a round are sent the same
            self._sent[id(job.state)] = job.state, digest({"weights": job.state})
        return f"{job.seed} {job.counted} {self._sent[id(job.state)][1]} {digest(job.payload)}"

    def _path(self, job: Job) -> Path:
        return self.folder / f"round-{job.round:04d}-{_safe_name(job.id)}-{job.seed:016x}.safetensors"


def _write(path: Path, job: str, update: Update, durable: bool) -> Update:
    about = {name: getattr(update, name) for name in _FIELDS}
    about |= {"metrics": dict(update.metrics), "job": job}
    if isinstance(update.state, BinaryState):
        about["packed"] = {key: bits.shape for key, bits in update.state.bits.items()}
        about["order"] = list(update.state)
    about["digest"] = _checksum(about, update)
    sent = by_path({"state": wire(update.state), "payload": update.payload})
    alone = len({tensor.untyped_storage().data_ptr() for tensor in sent.values()}) == len(sent)
    tensors = sent if alone else {key: tensor.clone() for key, tensor in sent.items()}  # of one storage: refused
    with new_file(path, durable) as temporary:
        try:  # a quarter of what it takes to put the file together in memory
            safetensors.torch.save_file(tensors, temporary, {"feddf": json.dumps(about)})
        except safetensors.SafetensorError as error:  # the tensors' form was right
            raise OSError(f"{path}: {error}") from error
    return _on_disk(path, about)


def _on_disk(path: Path, about: Mapping[str, Any]) -> Update:
    """Return the update in a file; a packed state is small, and stays packed in memory."""
    state: State = StateOnDisk(path, "state")
    if "packed" in about:
        found, shapes = dict(state), about["packed"]
        bits = {key: Bits(found.pop(f"{key}.signs"), found.pop(f"{key}.scales"), tuple(shapes[key])) for key in shapes}
        state = BinaryState(found, bits, about["order"])
    payload = {name: StateOnDisk(path, "payload", name) for name in sorted(set(StateOnDisk(path, "payload")))}
    return Update(**{name: about[name] for name in _FIELDS}, state=state, payload=payload)


def _checksum(about: Mapping[str, Any], update: Update) -> int:
    """Return a checksum of the tensors and all that is said about them: it tells a file that is torn from a whole one.

    What can write into the folder can write any update; so no more than CRC-32 is asked for, a quarter of the cost.
    """
    said = {key: value for key, value in about.items() if key != "digest"}
    found = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    tensors = by_path({"state": wire(update.state), "payload": update.payload})
    for key in sorted(tensors):
        tensor = tensors[key].detach().contiguous()
        found = zlib.crc32(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return found


_DTYPES = {  # by safetensors' names
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class StateOnDisk(Mapping[str, Tensor]):
    """The state under some names in a file; its tensors are read when they are asked for, and not kept."""

    def __init__(self, path: Path, *above: str) -> None:
        self._path = path
        with path.open("rb") as file:  # a safetensors file: the header's length, the header, all tensors' bytes
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length))
        self._first = 8 + length
        places = {tuple(parse_json(name)): at for name, at in header.items() if name != "__metadata__"}
        self._places = {place[len(above) :]: at for place, at in places.items() if place[: len(above)] == above}

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[(name,)]
        begin, end = place["data_offsets"]
        content = torch.empty(end - begin, dtype=torch.uint8)
        if content.numel():
            with self._path.open("rb") as file:  # five times as fast as to open it as what it is
                file.seek(self._first + begin)
                if file.readinto(content.numpy().data) != len(content):
                    raise OSError(f"{self._path} ends before the last value of {name}")
        return content.view(_DTYPES[place["dtype"]]).reshape(place["shape"])

    def __iter__(self) -> Iterator[str]:
        return (place[0] for place in self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # what travels is the state, not the name of a file


@dataclass(frozen=True)
class ClientStates:
    """The states that clients keep, in a folder: a file for each version, the last two of each client.

    ``lost`` says what happens to a client whose state is not there.
    """

    folder: Path
    lost: Literal["anew", "refuse"] = "refuse"

    def engine(self, engine: Engine) -> Engine:
        """Return the clients' engine, with what each has kept given to it, and what it keeps written down."""

        def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any | Failure]:
            asked: dict[str, Job] = {}
            anew: dict[str, dict[str, float]] = {}
            for job in jobs:
                kept = self.read(job)
                if kept is None and self.lost == "refuse":
                    lost = f"the state that it kept in round {job.counted} is lost"
                    yield Failure(job.id, f"{lost}; clients.lost_state = 'anew' lets it begin anew")
                    continue
                asked[job.id] = replace(job, kept=kept or {})
                anew[job.id] = {LOST: 1.0} if kept is None else {}
            for outcome in engine(function, list(asked.values())):
                if isinstance(outcome, Reply) and outcome.client_id in asked:
                    self.write(asked[outcome.client_id], outcome.kept)
                    outcome = replace(outcome, kept={}, metrics={**outcome.metrics, **anew[outcome.client_id]})
                yield outcome

        return run

    def read(self, job: Job) -> Payload | None:
        """Return what the client kept in the last round that counted: nothing before there is one, ``None`` if lost."""
        if not job.counted:
            return {}
        try:
            return nested(safetensors.torch.load(read_checked(self._path(job, job.counted))))
        except (OSError, ValueError, safetensors.SafetensorError):
            return None

    def write(self, job: Job, kept: Payload) -> None:
        """Keep a version, and the one that counts now; older ones go."""
        path = self._path(job, job.round)
        real_folder(self.folder)
        real_folder(path.parent)
        write_checked(path, safetensors.torch.save(by_path(kept)))
        needed = {path.stem, self._path(job, job.counted).stem}
        for old in path.parent.glob("round-*"):
            if old.name.partition(".")[0] not in needed:
                old.unlink(missing_ok=True)

    def forget_others(self, clients: Collection[str]) -> None:
        """Remove the states of clients that are no members any more."""
        members = {_folder(client) for client in clients}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in members:
                shutil.rmtree(path, ignore_errors=True)

    def size(self) -> int:
        """Return the bytes that all states take on disk."""
        return sum(path.stat().st_size for path in self.folder.glob("*/round-*"))

    def _path(self, job: Job, number: int) -> Path:
        return self.folder / _folder(job.id) / f"round-{number:04d}.safetensors"


def _folder(client: str) -> str:
    """Return the name of a client's folder: readable, and of no other client."""
    return f"{_safe_name(client)[:60]}-{hashlib.sha256(client.encode()).hexdigest()[:8]}"


def _safe_name(client: str) -> str:
    """Return a client's name as a part of a file's name."""
    return "".join(character if character.isalnum() or character in "-_" else "_" for character in client)[:80]
