"""Nothing that a node sends is believed: neither what it says it is, nor what it says it learned."""

from __future__ import annotations

import io
import re
import threading
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from feddf.config import ClientsConfig
from feddf.flower import announce
from feddf.flower.transport import ClientRegistry, MessageQueue, exchange
from feddf.flower.wire import from_arrays, from_payload, job_message, reply_from, to_arrays
from feddf.fusion.weights import class_counts
from feddf.models.binary import BinaryState
from feddf.outputs import classes
from feddf.rounds import collect
from feddf.types import Client, Failure, Job, Part, Reply, Resources, TensorForm, Update
from flower.local_grid import LocalGrid, Node

STATE = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(4)}
JOB = Job(Client("client", "net"), 3, STATE, 7)


def reply(arrays: ArrayRecord | None = None, **metrics: Any) -> Message:
    LocalGrid({})  # tells Flower which run this is
    asked = Message(RecordDict(), 1, "train")
    content: dict[str, Any] = {"arrays": arrays if arrays is not None else to_arrays(STATE)}
    content["metrics"] = MetricRecord({"num-examples": 5, **metrics})
    return Message(RecordDict(content), reply_to=asked)


def raw(content: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array("float32", (2, 3), stype, content)


def saved(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def archive() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("w.npy", b"\0" * 100)
    return stream.getvalue()


def lying_header(kind: str = "<f4") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": (2**40,)})
    return stream.getvalue()


W = np.zeros((2, 3), np.float32)
N = Array(np.array(4))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"w": raw(archive()), "n": N}, "magic"),
        ({"w": raw(saved(np.array([{}]), allow_pickle=True)), "n": N}, "object"),
        ({"w": raw(lying_header()), "n": N}, "1099511627776"),
        ({"w": raw(saved(W)[:-4]), "n": N}, "buffer is smaller"),
        ({"w": raw(b""), "n": N}, "magic"),
        ({"w": raw(saved(np.zeros(5000, np.float32))), "n": N}, r"\(5000,\)"),
        ({"w": raw(saved(W) + bytes(5000)), "n": N}, "bytes, more than its header says"),
        ({"w": Array(W.astype(np.float64)), "n": N}, "float64"),
        ({"w": Array(W.astype(">f4")), "n": N}, ">f4"),
        ({"w": Array(W.T.copy()), "n": N}, r"\(3, 2\)"),
        ({"w": raw(saved(W), "torch.pickle"), "n": N}, "serialized as"),
        ({"w": Array(W)}, "keys differ"),
        ({"w": Array(W), "n": N, "more": N}, "keys differ"),
    ],
)
def test_arrays_of_another_form_are_refused_before_they_are_read(record: dict[str, Array], said: str) -> None:
    outcome = reply_from(reply(ArrayRecord(record)), JOB)
    assert isinstance(outcome, Failure)
    assert outcome.client_id == "client"
    assert outcome.reason.startswith("its reply could not be read")
    assert re.search(said, outcome.reason), outcome.reason


SIGNS, SCALES = np.array([0b10110000], np.uint8), np.array([0.5, 2.0], np.float32)


def binarized(signs: Any = SIGNS, scales: Any = SCALES, **more: Any) -> Message:
    record = {"w.signs": signs, "w.scales": scales, "n": np.array(4), **more}
    return reply(ArrayRecord({key: Array(one) for key, one in record.items() if one is not None}))


def test_binarized_weights_arrive_packed_and_are_read_as_they_were() -> None:
    outcome = reply_from(binarized(), JOB)
    assert isinstance(outcome, Reply)
    assert isinstance(outcome.state, BinaryState)
    assert list(outcome.state) == list(STATE)
    assert outcome.state["w"].tolist() == [[0.5, -0.5, 0.5], [2.0, -2.0, -2.0]]
    assert isinstance(at_the_gate(binarized(), parts=()), Update)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (lambda: binarized(signs=np.zeros(2, np.uint8)), r"w\.signs is uint8 \(2,\)"),
        (lambda: binarized(signs=np.zeros(1, np.int8)), r"w\.signs is int8"),
        (lambda: binarized(scales=np.ones(3, np.float32)), r"w\.scales is float32 \(3,\)"),
        (lambda: binarized(scales=np.ones(2)), r"w\.scales is float64"),
        (lambda: binarized(scales=None), r"missing \['w\.scales'\]"),
        (lambda: binarized(w=W), r"unexpected \['w\.scales', 'w\.signs'\]"),
        (lambda: binarized(scales=np.array([0.5, np.nan], np.float32)), "w has values that are not finite"),
        (lambda: binarized(scales=np.array([0.5, 1e9], np.float32)), "w has a value of 1e"),
    ],
)
def test_binarized_weights_of_another_form_are_refused(message: Callable[[], Message], said: str) -> None:
    reason = at_the_gate(message(), parts=())
    assert isinstance(reason, str)
    assert re.search(said, reason), reason


@given(
    arrays_of.arrays(
        dtype=st.sampled_from([np.float32, np.float64, np.int64, np.uint8]),
        shape=arrays_of.array_shapes(min_dims=0, max_dims=4, max_side=4),
    )
)
def test_what_is_sent_is_what_arrives(array: Any) -> None:
    state = {"x": torch.from_numpy(array.copy()), "turned": torch.from_numpy(array.copy()).contiguous()}
    if state["x"].ndim == 4:
        state["turned"] = state["x"].contiguous(memory_format=torch.channels_last)
    arrived = from_arrays(to_arrays(state), state)
    for key, tensor in state.items():
        assert arrived[key].dtype == tensor.dtype
        assert arrived[key].numpy().tobytes() == tensor.contiguous().numpy().tobytes()


def test_fortran_order_is_read_as_it_is_meant() -> None:
    array = raw(saved(np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))))
    assert torch.equal(from_arrays(ArrayRecord({"w": array, "n": N}), STATE)["w"], STATE["w"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content.pop("metrics"), "0 of the one metric record"),
        (lambda content: content.pop("arrays"), "0 of the one array record"),
        (lambda content: content.update(more=ArrayRecord()), "2 of the one array record"),
        (lambda content: content.update(metrics=MetricRecord({"loss": 1.0})), "no 'num-examples'"),
        (lambda content: content.update(metrics=MetricRecord({"num-examples": 2.5})), "no 'num-examples'"),
    ],
)
def test_replies_without_their_parts_are_refused(change: Callable[[RecordDict], Any], said: str) -> None:
    message = reply()
    change(message.content)
    outcome = reply_from(message, JOB)
    assert isinstance(outcome, Failure)
    assert said in outcome.reason


def test_metrics_are_numbers_and_class_counts_come_apart_and_through_the_gate() -> None:
    outcome = reply_from(telling(**{"loss": 0.5, "history": [0.1], "train/loss": 0.25}), JOB, COUNTED)
    assert isinstance(outcome, Reply)
    assert (outcome.n_examples, dict(outcome.metrics)) == (5, {"loss": 0.5})
    assert counts_in(outcome) == [2, 3]
    assert (outcome.round, outcome.prototype) == (3, "net")
    update = at_the_gate(telling())
    assert isinstance(update, Update)
    assert counts_in(update) == [2, 3]


# Beside the weights


COUNTED = (class_counts(Resources({}, outputs=classes(2))),)
COUNTS = "class counts/counts"


def telling(counts: Any = (2, 3), name: str = COUNTS, **metrics: Any) -> Message:
    """A reply with class counts: numbers, or an array as it is."""
    message = reply(**metrics)
    array = counts if isinstance(counts, Array) else Array(np.array(counts))
    message.content["payload"] = ArrayRecord({name: array})
    return message


def counts_in(outcome: Reply | Update) -> list[int]:
    assert outcome.payload.keys() == {"class counts"}
    assert outcome.payload["class counts"].keys() == {"counts"}
    counts = outcome.payload["class counts"]["counts"]
    assert counts.dtype == torch.int64
    return counts.tolist()


def at_the_gate(message: Message, parts: Sequence[Part] = COUNTED) -> Update | str:
    """What becomes of a reply on its whole way to a round: an update, or the reason why there is none."""
    outcome = reply_from(message, JOB, parts)
    updates, failures = collect(lambda function, jobs: iter([outcome]), lambda job: None, [JOB], parts=parts)  # type: ignore[arg-type, return-value]
    if updates:
        return updates[0]
    (failure,) = failures
    assert failure.client_id == "client"
    return failure.reason


PAYLOADS: dict[str, tuple[Callable[[], Message], str]] = {
    "another name": (lambda: telling(name="gradients/w"), "'gradients/w', which was not asked for"),
    "another tensor": (lambda: telling(name="class counts/more"), "'class counts/more', which was not asked for"),
    "no name": (lambda: telling(name=""), "'', which was not asked for"),
    "a name that harms": (lambda: telling(name="\x1b[2J" + 999 * "x"), r"'\?\[2Jx{56}', which was"),
    "too many": (lambda: telling((2, 2, 1)), r"int64 \(3,\), and .*int64 \(2,\)"),
    "too few": (lambda: telling((5,)), r"int64 \(1,\), and"),
    "a matrix": (lambda: telling(((2, 3),)), r"int64 \(1, 2\), and"),
    "one number": (lambda: telling(5), r"int64 \(\), and"),
    "floats": (lambda: telling((2.0, 3.0)), "float64"),
    "another width": (lambda: telling(Array(np.array([2, 3], np.int32))), "int32"),
    "other bytes": (lambda: telling(Array(np.array([2, 3], ">i8"))), ">i8"),
    "objects": (lambda: telling(raw(saved(np.array([{}, {}]), allow_pickle=True))), "object"),
    "a pickle": (lambda: telling(raw(saved(np.array([2, 3])), "torch.pickle")), "serialized as"),
    "an archive": (lambda: telling(raw(archive())), "magic"),
    "nothing": (lambda: telling(raw(b"")), "magic"),
    "a lie about its size": (lambda: telling(raw(lying_header())), "1099511627776"),
    "cut off": (lambda: telling(raw(saved(np.array([2, 3]))[:-4])), "buffer is smaller"),
    "below zero": (lambda: telling((-1, 6)), r"values from -1 to 6, not 0 to 1e\+09"),
    "huge": (lambda: telling((2**62, 3)), r"values from 3 to 4.61e\+18, not 0 to 1e\+09"),
    "an overflow that adds up": (lambda: telling((2**63 - 1, -(2**63) + 6)), "not 0 to 1e"),
    "another sum": (lambda: telling((2, 2)), "do not add up to its n_k = 5"),
    "none": (lambda: reply(), "its payload is .*asked for class counts"),
}


@pytest.mark.parametrize("case", PAYLOADS)
def test_what_comes_beside_the_weights_is_what_was_asked_for(case: str) -> None:
    message, said = PAYLOADS[case]
    reason = at_the_gate(message())
    assert isinstance(reason, str)
    assert re.search(said, reason), reason
    assert reason.isprintable()
    assert len(reason) <= 300


def test_a_part_of_a_payload_is_not_enough() -> None:
    two = TensorForm((2,), torch.int64, 0, 9)
    asked = (Part(form=lambda job: {"pair": {"a": two, "b": two}}), *COUNTED)
    message = telling()
    assert "payload is" in str(at_the_gate(message, asked))
    message.content["payload"]["pair/a"] = Array(np.array([1, 2]))
    assert "'pair' does not have the tensors a, b" in str(at_the_gate(message, asked))
    message.content["payload"]["pair/b"] = Array(np.array([3, 4]))
    update = at_the_gate(message, asked)
    assert isinstance(update, Update)
    assert update.payload["pair"]["b"].tolist() == [3, 4]


@pytest.mark.parametrize("name", [COUNTS, "", "w", "payload", "/"])
def test_a_payload_that_nobody_asked_for_is_refused(name: str) -> None:
    assert "which was not asked for" in str(at_the_gate(telling(name=name), parts=()))


def test_a_second_record_of_weights_is_no_payload() -> None:
    message = telling()
    message.content["payload-2"] = to_arrays(STATE)
    assert "2 of the one array record" in str(at_the_gate(message))


def test_where_the_server_does_not_know_the_classes_the_client_does_and_its_bytes_are_counted() -> None:
    open_ended = (class_counts(Resources({})),)
    update = at_the_gate(telling((1, 1, 1, 2)), open_ended)
    assert isinstance(update, Update)
    assert counts_in(update) == [1, 1, 1, 2]
    assert "buffer is smaller" in str(at_the_gate(telling(raw(lying_header("<i8") + bytes(64))), open_ended))
    assert "float64" in str(at_the_gate(telling((2.0, 3.0)), open_ended))
    assert "(1, 2), and" in str(at_the_gate(telling(((2, 3),)), open_ended))


def test_a_payload_arrives_as_it_was_sent_in_either_direction() -> None:
    payload = {"control": {"a/b": torch.randn(2, 3), "n": torch.tensor(3)}, "class counts": {"counts": torch.arange(4)}}
    job = replace(JOB, payload=payload, counted=2)
    LocalGrid({})
    message = job_message(job, 1, {}, kind="train", ttl=60.0)
    arrived = from_payload(message.content.array_records)
    assert {name: sorted(state) for name, state in arrived.items()} == {name: sorted(s) for name, s in payload.items()}
    for name, state in payload.items():
        for key, tensor in state.items():
            assert arrived[name][key].dtype == tensor.dtype
            assert torch.equal(arrived[name][key], tensor)
    assert message.content["config"]["counted"] == 2
    assert "payload" not in job_message(JOB, 1, {}, kind="train", ttl=60.0).content


def saying(client: Any, prototype: Any) -> ClientApp:
    return announce(ClientApp(), lambda context: prototype, lambda context: client)


def registry_of(grid: LocalGrid, folder: Path, prototypes: list[str]) -> ClientRegistry:
    return ClientRegistry(MessageQueue(grid), folder / "registry.json", prototypes, None, 10_000)


def test_who_may_take_part(tmp_path: Path) -> None:
    nodes = {
        1: Node(saying("a", "small"), {}),
        2: Node(saying("b", "large"), {}),
        3: Node(saying("b", "small"), {}),  # a name that is taken
        4: Node(saying("c", "unheard-of"), {}),
        5: Node(saying("../../etc", "small"), {}),
        6: Node(saying(7, "small"), {}),
        7: Node(ClientApp(), {}),  # says nothing, and there are two architectures
    }
    registry = registry_of(LocalGrid(nodes), tmp_path, ["small", "large"])
    assert registry.connected() == {"a": 1, "b": 2}
    assert [(client.id, client.prototype) for client in registry.clients] == [("a", "small"), ("b", "large")]
    nodes[2].online = False
    assert registry.connected() == {"a": 1, "b": 3}  # the client has a new node, and another architecture
    nodes[2].online = True
    assert registry.connected() == {"a": 1, "b": 3}
    again = registry_of(LocalGrid({}), tmp_path, ["small", "large"])
    assert [(client.id, client.prototype) for client in again.clients] == [("a", "small"), ("b", "small")]
    assert nodes[1].asked == ["query"]  # once, not in every round


def test_only_listed_nodes_take_part_under_the_names_that_the_server_gives(tmp_path: Path) -> None:
    grid = LocalGrid({1: Node(saying("boss", "small"), {}), 2: Node(saying("b", "small"), {})})
    registry = ClientRegistry(MessageQueue(grid), tmp_path / "registry.json", ["small"], {1: "clinic"}, 10_000)
    assert registry.connected() == {"clinic": 1}


def test_a_reply_that_never_arrives_whole_holds_up_no_other_client() -> None:
    outcomes = exchanged_with_stalls(range(1, 6), {3}, deadline=1.0)
    assert sorted(outcome.client_id for outcome in outcomes if isinstance(outcome, Reply)) == ["c1", "c2", "c4", "c5"]
    assert [outcome for outcome in outcomes if isinstance(outcome, Failure)] == [Failure("c3", "no answer within 1 s")]


def echo_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def send_back(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 5})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    return app


def exchanged(grid: LocalGrid, deadline: float = 1.0, patience: float = 0.05) -> list[Any]:
    names = {f"c{number}": number for number in grid.nodes}
    jobs = [Job(Client(name, "net"), 1, STATE, number) for name, number in names.items()]
    send = partial(job_message, config={}, kind="train", ttl=60.0)
    return list(exchange(MessageQueue(grid, patience), jobs, lambda: names, send, reply_from, deadline, 0.0, 0.01))


def exchanged_with_stalls(numbers: range, stalling: Collection[int], deadline: float) -> list[Any]:
    """Flower's pull of a reply whose upload was broken off does not return for minutes."""
    never = threading.Event()

    class Stuck(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))  # which hands each out once, as Flower does
            if any(reply.metadata.src_node_id in stalling for reply in replies):
                never.wait()
            return replies

    outcomes = exchanged(Stuck({number: Node(echo_app(), {}) for number in numbers}), deadline)
    never.set()
    return outcomes


def test_many_who_stall_cost_the_deadline_and_no_more() -> None:
    began = time.monotonic()
    outcomes = exchanged_with_stalls(range(1, 46), range(6, 46), deadline=2.0)
    assert time.monotonic() - began < 10
    assert sorted(one.client_id for one in outcomes if isinstance(one, Reply)) == ["c1", "c2", "c3", "c4", "c5"]
    assert len([one for one in outcomes if isinstance(one, Failure)]) == 40


def test_a_reply_that_flower_cannot_read_is_its_senders_failure() -> None:
    class Raises(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            if any(reply.metadata.src_node_id == 2 for reply in replies):
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
            return replies

    outcomes = exchanged(Raises({number: Node(echo_app(), {}) for number in (1, 2, 3)}))
    assert [one.client_id for one in outcomes if isinstance(one, Failure)] == ["c2"]
    assert len(outcomes) == 3


def test_an_answer_to_somebody_elses_message_is_refused() -> None:
    grid = LocalGrid({number: Node(echo_app(), {}) for number in (1, 2)})
    first: list[str] = []

    def as_if_for_the_first(message: Message, answer: Message | None) -> Message | None:
        assert answer is not None
        first.append(message.metadata.message_id)
        answer.metadata.__dict__["_reply_to_message_id"] = first[0]
        return answer

    grid.nodes[1].behave = grid.nodes[2].behave = as_if_for_the_first
    outcomes = {one.client_id: one for one in exchanged(grid)}
    assert isinstance(outcomes["c1"], Reply)
    assert "answers another message" in outcomes["c2"].reason


def test_a_superlink_that_is_gone_ends_the_round_with_its_own_error() -> None:
    class Gone(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            raise ConnectionRefusedError("nobody listens")

    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        exchanged(Gone({1: Node(echo_app(), {})}))


def test_late_replies_do_not_pile_up() -> None:
    grid = LocalGrid({1: Node(echo_app(), {})})
    late = threading.Event()
    honest = grid.pull_messages

    def slow(message_ids: Iterable[str]) -> Iterable[Message]:
        late.wait()
        return honest(message_ids)

    grid.pull_messages = slow  # type: ignore[method-assign]
    queue = MessageQueue(grid, patience=0.01)
    sent = [queue.push(job_message(JOB, 1, {}, kind="train", ttl=60.0)) for _ in range(4)]
    asked = [number for number in sent if number is not None]
    assert list(queue.pull(asked)) == []
    queue.forget()
    late.set()
    deadline = time.monotonic() + 10
    while queue._pulling and time.monotonic() < deadline:
        assert list(queue.pull([])) == []
    assert queue._arrived.empty()


def test_what_a_client_says_harms_no_terminal() -> None:
    LocalGrid({})
    message = Message(Error(2, "\x1b[2J\x1b]0;owned\x07ok"), reply_to=Message(RecordDict(), 1, "train"))
    outcome = reply_from(message, JOB)
    assert isinstance(outcome, Failure)
    assert outcome.reason == "Flower's error 2: ?[2J?]0;owned?ok"


def test_a_client_that_restarts_under_a_new_id_gets_its_name_once_the_old_one_is_gone(tmp_path: Path) -> None:
    nodes = {1: Node(saying("a", "small"), {}), 2: Node(saying("a", "small"), {})}
    registry = registry_of(LocalGrid(nodes), tmp_path, ["small"])
    assert registry.connected() == {"a": 1}
    nodes[1].online = False
    assert registry.connected() == {"a": 2}
    nodes[1].online = True
    assert registry.connected() == {"a": 2}


def test_an_announcement_that_was_lost_is_asked_for_again(tmp_path: Path) -> None:
    class Loses(LocalGrid):
        def _pull(self, number: str) -> Message | None:
            return None

    nodes = {1: Node(saying("a", "small"), {})}
    registry = registry_of(Loses(nodes), tmp_path, ["small"])
    assert registry.connected() == registry.connected() == {}
    assert nodes[1].asked == ["query"]
    nodes[1].online = False
    registry.connected()
    nodes[1].online = True
    registry.connected()
    assert nodes[1].asked == ["query", "query"]


def test_a_client_whose_app_does_not_load_is_not_asked_all_the_time(tmp_path: Path) -> None:
    nodes = {1: Node(ClientApp(), {})}
    registry = registry_of(LocalGrid(nodes), tmp_path, ["small", "large"])
    for _ in range(20):
        assert registry.connected() == {}
    assert nodes[1].asked == ["query"]


def test_clients_without_names_are_not_waited_for_when_their_ids_have_changed(tmp_path: Path) -> None:
    for base in (10, 20, 30):
        nodes = {base + number: Node(ClientApp(), {}) for number in range(3)}
        registry = registry_of(LocalGrid(nodes), tmp_path, ["small"])
        registry.gather(ClientsConfig(total=3, quorum=1.0), wait=5.0, poll=0.01)
        assert [client.id for client in registry.clients] == [f"node-{base + number}" for number in range(3)]
