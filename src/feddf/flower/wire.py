"""What travels, in Flower's own records, under the names that Flower's own strategies use.

Down: the weights as ``arrays``, and orders as ``config``. Up: one array record, and one metric record that holds
``num-examples``. Either way a second array record, ``payload``, has what a method sends beside the weights. Nothing
that a client sends is believed: an array is read only after its header has been compared with what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.lib import format as npy

from feddf.admit import METRIC_NAME, MOST_METRICS, different_keys, form_of
from feddf.config.errors import reason
from feddf.types import Failure, Form, Job, Part, Payload, Reply, State, TensorForm

ARRAYS, PAYLOAD, CONFIG, METRICS = "arrays", "payload", "config", "metrics"
COUNT = "num-examples"
LARGEST_HEADER = 4096
MOST_TENSORS = 100_000

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


def to_payload(payload: Payload) -> dict[str, ArrayRecord]:
    """Return a payload as a record of its own; none for an empty one."""
    named = {f"{name}/{key}": tensor for name, state in payload.items() for key, tensor in state.items()}
    return {PAYLOAD: to_arrays(named)} if named else {}


def from_payload(records: Mapping[str, ArrayRecord], form: Form | None = None) -> Payload:
    """Return the payload in a message; raise ``ValueError`` where it is not of the form that was asked for.

    Without a form it may be any: a client takes what its server sends.
    """
    arrays = records.get(PAYLOAD, ArrayRecord())
    found: dict[str, dict[str, torch.Tensor]] = {}
    for place, array in islice(arrays.items(), MOST_TENSORS):
        name, _, key = place.partition("/")
        expected = form.get(name, {}).get(key) if form is not None else None
        if form is not None and expected is None:
            raise ValueError(f"its payload has '{printable(place)[:60]}', which nobody asked for")
        found.setdefault(name, {})[key] = _any_tensor(place, array, expected)
    return found


def _tensor(key: str, array: Array, expected: torch.Tensor) -> torch.Tensor:
    room = expected.numel() * expected.element_size() + LARGEST_HEADER
    if len(array.data) > room:
        raise ValueError(f"{key} has {len(array.data)} bytes, and its prototype's {room} at the most")
    wanted = TensorForm(tuple(expected.shape), expected.dtype, -math.inf, math.inf)
    return _any_tensor(key, array, wanted)


def _any_tensor(key: str, array: Array, expected: TensorForm | None) -> torch.Tensor:
    """Return the tensor in an array, whose header is compared with what is expected before anything is made of it."""
    if array.stype != "numpy.ndarray":
        raise ValueError(f"{key} is serialised as {array.stype!r:.60}, not as 'numpy.ndarray'")
    stream = BytesIO(array.data)
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{key} is in version {version} of the .npy format, not 1.0 or 2.0")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)  # not np.load, which would open archives and make room for any shape
    if expected is not None:
        wanted = torch.empty(0, dtype=expected.dtype).numpy().dtype
        fits = len(shape) == len(expected.shape) and all(
            size in (None, here) for here, size in zip(shape, expected.shape, strict=True)
        )
        if not fits or dtype != wanted:
            raise ValueError(f"{key} is {dtype} {shape}, and its prototype's {wanted} {expected.shape}")
    if dtype.hasobject:
        raise ValueError(f"{key} holds objects")
    flat = np.frombuffer(array.data, dtype, count=math.prod(shape), offset=stream.tell())
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
            "counted": job.counted,
        }
    )
    content = RecordDict({ARRAYS: to_arrays(job.state), CONFIG: config, **to_payload(job.payload)})
    return Message(content, node, kind, ttl=ttl, group_id=str(job.round))


def update_from(reply: Message, job: Job, parts: Sequence[Part] = ()) -> Reply | Failure:
    """Return what a client answered to its job, or why that cannot be read."""
    if reply.has_error():
        return Failure(job.id, complaint_of(reply))
    try:
        records = dict(reply.content.array_records)
        payload = from_payload(records, form_of(job, parts))
        arrays = _only({name: one for name, one in records.items() if name != PAYLOAD}, "array record")
        count, metrics = counted(_only(reply.content.metric_records, "metric record"))
        state = from_arrays(arrays, job.state)
    except Exception as error:  # whatever a hostile record does when it is looked at, the round goes on
        return unreadable(job, error)
    return Reply(job.id, job.client.prototype, job.round, state, count, metrics, payload)


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


def counted(metrics: MetricRecord) -> tuple[int, dict[str, float]]:
    """Return the number of examples, and the metrics that can be logged.

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
    return count, dict(islice(numbers.items(), MOST_METRICS))


def _only(records: Mapping[str, Record], kind: str) -> Record:
    if len(records) != 1:
        raise ValueError(f"it holds {len(records)} of the one {kind} that is needed")
    return next(iter(records.values()))
