"""What travels, in Flower's own records, under the names that Flower's own strategies use.

Down: the weights as ``arrays``, and what a client is told as ``config``. Up: one array record, and one metric record
that holds ``num-examples``. Either way a second array record, ``payload``, has what a method sends beside the weights;
where weights do not travel there is no first one. A client's record is not trusted: an array is read only after its
header has been compared with what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.lib import format as npy

from feddf.admit import METRIC_NAME, MOST_METRICS, different_keys, form_of, weights_due
from feddf.config.errors import reason
from feddf.models.binary import BinaryState, Bits, wire
from feddf.types import Client, Failure, Form, Job, Part, Payload, Reply, State

ARRAYS, PAYLOAD, CONFIG, METRICS = "arrays", "payload", "config", "metrics"
COUNT = "num-examples"


def to_arrays(state: State) -> ArrayRecord:
    """Return the state as Flower sends it; binarized weights as signs and scales."""
    return ArrayRecord({key: Array(tensor.detach().contiguous().numpy()) for key, tensor in wire(state).items()})


def from_arrays(arrays: ArrayRecord, manifest: State) -> State:
    """Return the state in a record, in the manifest's order; raise ``ValueError`` where it is not of that form.

    A weight may also come binarized: a bit for each value, and a scale for each filter.
    """
    binarized = [key for key in manifest if key not in arrays and f"{key}.signs" in arrays]
    forms: dict[str, tuple[Sequence[int], torch.dtype]] = {
        key: (tensor.shape, tensor.dtype) for key, tensor in manifest.items() if key not in binarized
    }
    for key in binarized:
        tensor = manifest[key]
        forms[f"{key}.signs"] = (-(-tensor.numel() // 8),), torch.uint8
        forms[f"{key}.scales"] = tensor.shape[:1], tensor.dtype
    if complaint := different_keys(arrays.keys(), forms):
        raise ValueError(complaint)
    found = {key: _read_tensor(key, arrays[key], *form) for key, form in forms.items()}
    if not binarized:
        return found
    bits = {key: Bits(found.pop(f"{key}.signs"), found.pop(f"{key}.scales"), manifest[key].shape) for key in binarized}
    return BinaryState(found, bits, list(manifest))


def _records(state: State, payload: Payload) -> dict[str, ArrayRecord]:
    """Return what travels as arrays: the weights and the payload, each as a record of its own unless it is empty."""
    return {name: to_arrays(one) for name, one in ((ARRAYS, state), (PAYLOAD, flat(payload))) if one}


def flat(states: Mapping[str, State]) -> State:
    """Return several states as one, whose tensors are called ``name/key``."""
    return {f"{name}/{key}": tensor for name, state in states.items() for key, tensor in state.items()}


def from_payload(records: Mapping[str, ArrayRecord], form: Form | None = None) -> Payload:
    """Return the payload in a message; raise ``ValueError`` where it is not of the form that was asked for.

    Without a form it may be any: a client takes what its server sends.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for place, array in records.get(PAYLOAD, ArrayRecord()).items():
        name, _, key = place.partition("/")
        if form is None:
            tensor = _read_tensor(place, array)
        elif expected := form.get(name, {}).get(key):
            tensor = _read_tensor(place, array, expected.shape, expected.dtype)
        else:
            raise ValueError(f"its payload has '{printable(place)[:60]}', which was not asked for")
        found.setdefault(name, {})[key] = tensor
    return found


def _read_tensor(
    key: str, array: Array, sizes: Sequence[int | None] | None = None, kind: torch.dtype | None = None
) -> torch.Tensor:
    """Return the tensor in an array, whose header is compared with what is expected before anything is made of it."""
    if array.stype != "numpy.ndarray":
        raise ValueError(f"{key} is serialized as {array.stype!r:.60}, not as 'numpy.ndarray'")
    stream = BytesIO(array.data)
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{key} is in version {version} of the .npy format, not 1.0 or 2.0")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)  # not np.load, which would open archives and make room for any shape
    if sizes is not None:
        wanted = torch.empty(0, dtype=kind).numpy().dtype
        fits = len(shape) == len(sizes) and all(size in (None, n) for n, size in zip(shape, sizes, strict=True))
        if not fits or dtype != wanted:
            raise ValueError(f"{key} is {dtype} {shape}, and its prototype's {wanted} {tuple(sizes)}")
    count = math.prod(shape)
    if len(array.data) > stream.tell() + count * dtype.itemsize:
        raise ValueError(f"{key} has {len(array.data)} bytes, more than its header says")
    flat = np.frombuffer(array.data, dtype, count=count, offset=stream.tell())
    return torch.from_numpy(flat.reshape(shape, order="F" if fortran else "C").copy(order="C"))


def packed(models: Mapping[str, State]) -> ArrayRecord:
    """Return the weights of one prototype under their own names, or of several as ``prototype/name``."""
    return to_arrays(next(iter(models.values())) if len(models) == 1 else flat(models))


def unpacked(arrays: ArrayRecord, manifest: Mapping[str, State]) -> dict[str, State]:
    """Return the weights of each prototype in what :func:`packed` gave."""
    if len(manifest) == 1:
        return {name: from_arrays(arrays, state) for name, state in manifest.items()}
    found = from_arrays(arrays, flat(manifest))
    return {name: {key: found[f"{name}/{key}"] for key in state} for name, state in manifest.items()}


def job_message(job: Job, node: int, config: Mapping[str, Any], *, kind: str, ttl: float) -> Message:
    """Return the message that asks a node to do a job."""
    about: dict[str, Any] = {"server-round": job.round, "client": job.id, "prototype": job.client.prototype}
    told = ConfigRecord({**config, **about, "seed": job.seed, "counted": job.counted})
    content = RecordDict({CONFIG: told, **_records(job.state, job.payload)})
    return Message(content, node, kind, ttl=ttl, group_id=str(job.round))


def job_from(message: Message, prototype: str, n_examples: int) -> Job:
    """Return the job in a message, at the client, which takes what its server sends."""
    config: Any = message.content[CONFIG]
    client = Client(str(config["client"]), prototype, torch.arange(n_examples))
    records = message.content.array_records
    state = {key: _read_tensor(key, array) for key, array in records.get(ARRAYS, ArrayRecord()).items()}
    known = client, int(config["server-round"]), state, int(config["seed"])
    return Job(*known, from_payload(records), int(config.get("counted", 0)))


def reply_content(reply: Reply) -> RecordDict:
    """Return what a client sends."""
    metrics = MetricRecord({COUNT: reply.n_examples, **reply.metrics})
    return RecordDict({METRICS: metrics, **_records(reply.state, reply.payload)})


def reply_from(message: Message | Exception, job: Job, parts: Sequence[Part] = ()) -> Reply | Failure:
    """Return what a client answered to its job, or why that cannot be read. The job's weights are the manifest."""
    try:
        if isinstance(message, Exception):
            raise message
        if message.has_error():
            return Failure(job.id, complaint_of(message))
        records = dict(message.content.array_records)
        payload = from_payload(records, form_of(job, parts))
        records.pop(PAYLOAD, None)
        state: State = {}
        if weights_due(parts):
            state = from_arrays(_only(records, "array record"), job.state)
        elif records:
            raise ValueError("it sent weights, which were not asked for")
        count, metrics = _counted(_only(message.content.metric_records, "metric record"))
    except Exception as error:  # whatever a hostile record does when it is looked at, the round goes on
        return Failure(job.id, printable(f"its reply could not be read: {reason(error)}"))
    return Reply(job.id, job.client.prototype, job.round, state, count, metrics, payload)


def complaint_of(reply: Message) -> str:
    """Return the last line of a reply's error: the exception itself, where Flower sends a whole traceback."""
    lines = [line.strip() for line in str(reply.error.reason or "").splitlines() if line.strip()]
    return printable(f"Flower's error {reply.error.code}: {(lines or ['no reason given'])[-1]}")


def printable(text: str) -> str:
    """Return a text that may be a client's so that it harms no log and no terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:300])


def _counted(metrics: MetricRecord) -> tuple[int, dict[str, float]]:
    """Return the number of examples, and the metrics that can be logged.

    Lists, and names that the gate would refuse, are left out: they are no reason to refuse the weights.
    """
    count = metrics.get(COUNT)
    if isinstance(count, float) and count.is_integer():  # some clients count in floats
        count = int(count)
    if not isinstance(count, int):
        raise ValueError(f"its metrics have no '{COUNT}', the number of examples that it was trained on")
    named = [(name, value) for name, value in metrics.items() if name != COUNT and METRIC_NAME.fullmatch(name)]
    return count, dict([(name, value) for name, value in named if isinstance(value, int | float)][:MOST_METRICS])


def _only(records: Mapping[str, Any], kind: str) -> Any:
    if len(records) != 1:
        raise ValueError(f"it holds {len(records)} of the one {kind} that is needed")
    return next(iter(records.values()))
