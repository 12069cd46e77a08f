"""What travels, in Flower's own records, under the names that Flower's own strategies use.

Down: the weights as ``arrays``, and orders as ``config``. Up: one array record, and one metric record that holds
``num-examples``. Nothing that a client sends is believed: an array is read only after its header has been compared with
what the prototype has in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.lib import format as npy

from feddf.admit import METRIC_NAME, MOST_METRICS, different_keys
from feddf.config.errors import reason
from feddf.types import Failure, Job, State, Update

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
COUNT, CLASS_COUNTS = "num-examples", "class-counts"
LARGEST_HEADER = 4096

Orders = Mapping[str, Any]
"""What a client is told besides the weights: the entries of a Flower ConfigRecord."""

Record = TypeVar("Record")


def to_arrays(state: State) -> ArrayRecord:
    """Return the state as Flower sends it."""
    return ArrayRecord({key: Array(tensor.detach().contiguous().numpy()) for key, tensor in state.items()})


def from_arrays(arrays: ArrayRecord, manifest: State) -> State:
    """Return the state in a record, in the manifest's order; raise ``ValueError`` where it is not of that form."""
    complaint = different_keys(arrays.keys(), manifest)
    if complaint:
        raise ValueError(complaint)
    return {key: _tensor(key, arrays[key], expected) for key, expected in manifest.items()}


def _tensor(key: str, array: Array, expected: torch.Tensor) -> torch.Tensor:
    if array.stype != "numpy.ndarray":
        raise ValueError(f"{key} is serialised as {array.stype!r:.60}, not as 'numpy.ndarray'")
    room = expected.numel() * expected.element_size() + LARGEST_HEADER
    if len(array.data) > room:
        raise ValueError(f"{key} has {len(array.data)} bytes, and its prototype's {room} at the most")
    stream = BytesIO(array.data)
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{key} is in version {version} of the .npy format, not 1.0 or 2.0")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)  # not np.load, which would open archives and make room for any shape
    wanted = expected.numpy().dtype
    if shape != tuple(expected.shape) or dtype != wanted:
        raise ValueError(f"{key} is {dtype} {shape}, and its prototype's {wanted} {tuple(expected.shape)}")
    flat = np.frombuffer(array.data, dtype, count=expected.numel(), offset=stream.tell())
    return torch.from_numpy(flat.reshape(shape, order="F" if fortran else "C").copy(order="C"))


def packed(models: Mapping[str, State]) -> ArrayRecord:
    """Return the weights of one prototype under their own names, or of several as ``prototype/name``."""
    if len(models) == 1:
        return to_arrays(next(iter(models.values())))
    return to_arrays({f"{name}/{key}": tensor for name, state in models.items() for key, tensor in state.items()})


def unpacked(arrays: ArrayRecord, manifest: Mapping[str, State]) -> dict[str, State]:
    """Return the weights of each prototype in what :func:`packed` gave."""
    if len(manifest) == 1:
        return {name: from_arrays(arrays, state) for name, state in manifest.items()}
    found: dict[str, State] = {}
    for name, state in manifest.items():
        own: dict[str, Array] = {
            key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")
        }
        found[name] = from_arrays(ArrayRecord(own), state)
    return found


def job_message(job: Job, node: int, orders: Orders, *, kind: str, ttl: float) -> Message:
    """Return the message that asks a node to do a job."""
    config = ConfigRecord(
        {
            **orders,
            "server-round": job.round,
            "client": job.client.id,
            "prototype": job.client.prototype,
            "seed": job.seed,
        }
    )
    content = RecordDict({ARRAYS: to_arrays(job.state), CONFIG: config})
    return Message(content, node, kind, ttl=ttl, group_id=str(job.round))


def update_from(reply: Message, job: Job) -> Update | Failure:
    """Return what a client answered to its job, or why that cannot be read."""
    if reply.has_error():
        return Failure(job.id, complaint_of(reply))
    try:
        arrays = _only(reply.content.array_records, "array record")
        count, metrics, counts = counted(_only(reply.content.metric_records, "metric record"))
        state = from_arrays(arrays, job.state)
    except Exception as error:  # whatever a hostile record does when it is looked at, the round goes on
        return unreadable(job, error)
    return Update(job.id, job.client.prototype, job.round, state, count, metrics, counts)


def unreadable(job: Job, error: Exception) -> Failure:
    """Return the failure of a client whose reply could not be read."""
    return Failure(job.id, printable(f"its reply could not be read: {reason(error)}"))


def complaint_of(reply: Message) -> str:
    """Return the last line of a reply's error: the exception itself, where Flower sends a whole traceback."""
    lines = [line.strip() for line in str(reply.error.reason or "").splitlines() if line.strip()]
    return printable(f"Flower's error {reply.error.code}: {(lines or ['no reason given'])[-1]}")


def printable(text: str) -> str:
    """Return a text that may be a client's so that it harms no log and no terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:300])


def counted(metrics: MetricRecord) -> tuple[int, dict[str, float], tuple[int, ...] | None]:
    """Return the number of examples, the metrics that can be logged, and the class counts if disclosed.

    Lists, and names that the gate would refuse, are left out: they are no reason to refuse the weights.
    """
    count = metrics.get(COUNT)
    if isinstance(count, float) and count.is_integer():  # some clients count in floats
        count = int(count)
    if not isinstance(count, int):
        raise ValueError(f"its metrics have no '{COUNT}', the number of examples that it was trained on")
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and name != COUNT and METRIC_NAME.fullmatch(name)
    }
    classes = metrics.get(CLASS_COUNTS)
    counts = tuple(int(value) for value in classes) if isinstance(classes, list) else None
    return count, dict(islice(numbers.items(), MOST_METRICS)), counts


def _only(records: Mapping[str, Record], kind: str) -> Record:
    if len(records) != 1:
        raise ValueError(f"it holds {len(records)} of the one {kind} that is needed")
    return next(iter(records.values()))
