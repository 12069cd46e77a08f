"""The gate against hostile and broken updates: each is refused with its reason, and nothing raises."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_tiny, update_of
from feddf.admit import LARGEST, MOST_EXAMPLES, MOST_METRICS, MOST_STEPS, admit, different_keys
from feddf.fusion.weights import CLASS_COUNTS, class_counts
from feddf.models.small import CNN
from feddf.states import init_state
from feddf.types import Client, Failure, Job, Part, Prototype, Reply, TensorForm, Update

TINY = make_tiny()
JOBS = {c.id: Job(c, 3, TINY.server.models[c.prototype], 1) for c in TINY.federation.clients[:4]}
GOOD = TINY.local(JOBS["c0"])


def changed(key: str, tensor: Any) -> Reply:
    return replace(GOOD, state={**GOOD.state, key: tensor})


def spoilt(key: str, value: float) -> Reply:
    tensor = GOOD.state[key].clone()
    tensor.view(-1)[0] = value
    return changed(key, tensor)


CONV, VAR = "features.0.weight", "features.1.running_var"
HOSTILE = {
    "nan": (spoilt(CONV, math.nan), "not finite"),
    "infinity": (spoilt(CONV, math.inf), "not finite"),
    "minus infinity": (spoilt(CONV, -math.inf), "not finite"),
    "nan in a buffer": (spoilt(VAR, math.nan), "not finite"),
    "negative variance": (spoilt(VAR, -1e-3), "negative variance"),
    "huge variance": (spoilt(VAR, 1e30), "most that is believed"),
    "scaled last layer": (changed("classifier.weight", GOOD.state["classifier.weight"] * 1e6), "most that is believed"),
    "missing key": (replace(GOOD, state={k: v for k, v in GOOD.state.items() if k != CONV}), f"missing ['{CONV}']"),
    "extra key": (changed("extra", torch.ones(1)), "unexpected ['extra']"),
    "many keys": (replace(GOOD, state={str(i): torch.ones(1) for i in range(2000)}), "keys differ"),
    "wrong shape": (changed("classifier.bias", torch.zeros(4)), "has shape (4,), not (3,)"),
    "broadcastable shape": (changed("classifier.bias", torch.zeros(1)), "has shape (1,)"),
    "empty shape": (changed("classifier.bias", torch.zeros(0, 10**12)), "has shape (0, 1000000000000)"),
    "float64": (changed("classifier.bias", torch.zeros(3).double()), "torch.float64"),
    "complex": (changed("classifier.bias", torch.zeros(3, dtype=torch.complex64)), "torch.complex64"),
    "sparse": (changed("classifier.bias", torch.zeros(3).to_sparse()), "not a dense tensor"),
    "list": (changed("classifier.bias", [0.0] * 3), "not a dense tensor"),
    "no state": (replace(GOOD, state=None), "not a mapping"),
    "n_k negative": (replace(GOOD, n_examples=-1), "n_k = -1"),
    "n_k nan": (replace(GOOD, n_examples=math.nan), "n_k = nan"),
    "n_k huge": (replace(GOOD, n_examples=10**30), "n_k = 1000"),
    "n_k text": (replace(GOOD, n_examples="many"), "n_k = 'many'"),
    "n_k boolean": (replace(GOOD, n_examples=True), "n_k = True"),
    "n_k float": (replace(GOOD, n_examples=20.0), "n_k = 20.0"),
    "n_k beyond printing": (replace(GOOD, n_examples=10**5000), "n_k = a int"),
    "round beyond printing": (replace(GOOD, round=10**5000), "stale: it belongs to round a int"),
    "round as a tensor": (replace(GOOD, round=torch.tensor([1, 2])), "stale"),
    "prototype as a tensor": (replace(GOOD, prototype=torch.tensor([1, 2])), "is not the client's"),
    "tensor without values": (
        changed("classifier.bias", torch.empty(3, device="meta")),
        "not a dense tensor in memory",
    ),
    "tensor with a gradient": (changed("classifier.bias", torch.zeros(3, requires_grad=True)), "carries a gradient"),
    "counter": (changed("features.1.num_batches_tracked", torch.tensor(2**62)), "counts 4.61e+18"),
    "negative counter": (changed("features.1.num_batches_tracked", torch.tensor(-5)), "counts -5"),
    "metric beyond floats": (replace(GOOD, metrics={"loss": 10**400}), "could not be checked: OverflowError"),
    "n_k claimed": (replace(GOOD, n_examples=2000), "the client holds 20 examples"),
    "n_k zero": (replace(GOOD, n_examples=0), "the client holds 20 examples"),
    "stale": (replace(GOOD, round=2), "stale: it belongs to round 2, and this is round 3"),
    "not sampled": (replace(GOOD, client_id="c5"), "'c5' was not sampled"),
    "unknown client": (replace(GOOD, client_id="../../etc/passwd"), "was not sampled"),
    "id that is no text": (replace(GOOD, client_id=["c0"]), "was not sampled"),
    "other prototype": (replace(GOOD, prototype="mlp"), "prototype 'mlp' is not the client's"),
    "posing as another": (replace(GOOD, client_id="c1"), "prototype 'cnn' is not the client's"),
    "metric with a newline": (replace(GOOD, metrics={"loss\nround": 1.0}), "metric name"),
    "metric with a path": (replace(GOOD, metrics={"../x": 1.0}), "metric name"),
    "metric nan": (replace(GOOD, metrics={"loss": math.nan}), "not a finite number"),
    "metric text": (replace(GOOD, metrics={"loss": "low"}), "not a finite number"),
    "metrics list": (replace(GOOD, metrics=[1]), "not a mapping"),
}


def test_an_honest_reply_passes_and_becomes_an_update() -> None:
    assert admit(GOOD, JOBS) == update_of(GOOD)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_update_is_refused_with_its_reason(name: str) -> None:
    update, reason = HOSTILE[name]
    failure = admit(update, JOBS)
    assert isinstance(failure, Failure)
    assert reason in failure.reason
    assert "\n" not in failure.reason


@pytest.mark.parametrize("thing", [None, b"bytes", {"client_id": "c0"}, object()])
def test_what_is_no_update_is_refused(thing: object) -> None:
    failure = admit(thing, JOBS)
    assert isinstance(failure, Failure)
    assert "not a reply" in failure.reason


def test_a_remote_clients_count_is_bounded_but_not_known() -> None:
    remote = {"c0": replace(JOBS["c0"], client=Client("c0", "cnn"))}
    assert isinstance(admit(replace(GOOD, n_examples=12345), remote), Update)
    failure = admit(replace(GOOD, n_examples=0), remote)
    assert isinstance(failure, Failure)
    assert "n_k = 0" in failure.reason


@pytest.mark.parametrize("options", [{"width": 8}, {"width": 16}])
def test_a_last_layer_times_a_million_is_refused_on_real_sizes(options: dict[str, int]) -> None:
    prototype = Prototype("cnn", partial(CNN, (1, 28, 28), 10, **options))
    job = Job(Client("a", "cnn"), 1, init_state(prototype, 0), 0)
    scaled = {key: tensor * 1e6 if key.startswith("classifier") else tensor for key, tensor in job.state.items()}
    failure = admit(Reply("a", "cnn", 1, scaled, 5), {"a": job})
    assert isinstance(failure, Failure)
    assert "most that is believed" in failure.reason


@given(st.sampled_from(sorted(GOOD.state)), st.floats(), st.data())
def test_only_sane_numbers_get_through(key: str, value: float, data: st.DataObject) -> None:
    tensor = GOOD.state[key].clone()
    if not tensor.is_floating_point():
        return
    stored = torch.tensor(value, dtype=torch.float64).to(torch.float32)
    tensor.view(-1)[data.draw(st.integers(0, tensor.numel() - 1))] = stored
    sane = abs(float(stored)) <= LARGEST and not (key.endswith("running_var") and stored < 0)
    assert isinstance(admit(changed(key, tensor), JOBS), Update) == sane


def test_very_many_keys_are_refused_by_their_number() -> None:
    """Not by looking through them: the names are never asked for."""

    class Many(Collection[str]):
        def __len__(self) -> int:
            return 200_000

        def __contains__(self, name: object) -> bool:
            raise AssertionError("looked through")

        def __iter__(self) -> Iterator[str]:
            raise AssertionError("looked through")

    complaint = different_keys(Many(), {"w": torch.ones(1)})
    assert complaint == "keys differ from the prototype's: it has 1, and the update 200000"


def test_the_limits_themselves_are_allowed() -> None:
    """What is just within the limits passes; what is just beyond does not."""
    counter = "features.1.num_batches_tracked"
    stranger = {**JOBS, "c0": replace(JOBS["c0"], client=replace(JOBS["c0"].client, indices=None))}
    allowed = [
        changed(counter, torch.tensor(MOST_STEPS)),
        changed(counter, torch.tensor(0)),
        replace(GOOD, metrics={f"m{k}": 0.0 for k in range(MOST_METRICS)}),
        replace(GOOD, n_examples=MOST_EXAMPLES),
    ]
    assert all(isinstance(admit(update, stranger), Update) for update in allowed)
    beyond = [
        changed(counter, torch.tensor(MOST_STEPS + 1)),
        replace(GOOD, metrics={f"m{k}": 0.0 for k in range(MOST_METRICS + 1)}),
        replace(GOOD, n_examples=MOST_EXAMPLES + 1),
        replace(GOOD, n_examples=0),
    ]
    assert all(isinstance(admit(update, stranger), Failure) for update in beyond)


def test_an_empty_tensor_hides_nothing_behind_it() -> None:
    manifest = {"empty": torch.zeros(0), "w": torch.zeros(1)}
    job = replace(JOBS["c0"], state=manifest)
    poisoned = replace(GOOD, state={"empty": torch.zeros(0), "w": torch.tensor([math.nan])})
    assert admit(poisoned, {"c0": job}) == Failure("c0", "w has values that are not finite")


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("a string", Failure("unknown", "not a reply but a str")),
        (replace(GOOD, client_id="c9"), Failure("unknown", "client 'c9' was not sampled this round")),
        (replace(GOOD, client_id="c" * 99), Failure("unknown", f"client '{'c' * 59} was not sampled this round")),
        (replace(GOOD, state=[]), Failure("c0", "its state is a list, not a mapping")),
        (spoilt(CONV, -2e4), Failure("c0", f"{CONV} has a value of 2e+04, and 1e+04 is the most that is believed")),
        (
            replace(GOOD, metrics={"a b": 1}),
            Failure("c0", "metric name 'a b' is not made of letters, digits, '_', '.' and '-'"),
        ),
        (replace(GOOD, metrics={"a": "x"}), Failure("c0", "metric a is 'x', not a finite number")),
        (
            replace(GOOD, payload={"news": {"a": torch.ones(1)}}),
            Failure("c0", "its payload is ['news'], and it was asked for nothing"),
        ),
    ],
)
def test_a_refusal_names_the_client_and_what_was_wrong(update: Any, expected: Failure) -> None:
    assert admit(update, JOBS) == expected


def test_as_many_keys_as_the_prototype_but_others() -> None:
    renamed = {f"other.{key}": tensor for key, tensor in GOOD.state.items()}
    failure = admit(replace(GOOD, state=renamed), JOBS)
    assert isinstance(failure, Failure)
    names = ["classifier.bias", "classifier.weight", "features.0.weight"]
    others = [f"other.{name}" for name in names]
    assert failure.reason == f"keys differ from the prototype's: missing {names}, unexpected {others}"


# Payloads


def asked_for(job: Job) -> dict[str, dict[str, TensorForm]]:
    return {"news": {"a": TensorForm((2, None), torch.float32, -1.0, 1.0), "n": TensorForm((), torch.int64, 0, 9)}}


def even(reply: Reply) -> str | None:
    return None if int(reply.payload["news"]["n"]) % 2 == 0 else "its n is odd"


NEWS = Part(form=asked_for, complaint=even)
TOLD = {"a": torch.zeros(2, 3), "n": torch.tensor(4)}


def telling(**changes: Any) -> Reply:
    return replace(GOOD, payload={"news": {**TOLD, **changes}})


def test_a_payload_of_the_form_that_was_asked_for_passes() -> None:
    update = admit(telling(), JOBS, [NEWS])
    assert isinstance(update, Update)
    assert update.payload["news"] == TOLD
    assert isinstance(admit(telling(a=torch.ones(2, 0)), JOBS, [NEWS]), Update)


WRONG_PAYLOADS: dict[str, tuple[Reply, str]] = {
    "none": (GOOD, "asked for news"),
    "another": (replace(GOOD, payload={"olds": TOLD}), "asked for news"),
    "one more": (replace(GOOD, payload={"news": TOLD, "more": {}}), "asked for news"),
    "no mapping": (replace(GOOD, payload=[1]), "asked for news"),
    "no state": (replace(GOOD, payload={"news": 3}), "does not have the tensors a, n"),
    "a tensor missing": (replace(GOOD, payload={"news": {"a": TOLD["a"]}}), "does not have the tensors a, n"),
    "a tensor more": (telling(b=torch.ones(1)), "does not have the tensors a, n"),
    "a list": (telling(a=[[0.0]]), "not a dense tensor"),
    "float64": (telling(a=torch.zeros(2, 3).double()), "torch.float64"),
    "a gradient": (telling(a=torch.zeros(2, 3, requires_grad=True)), "carries a gradient"),
    "another shape": (telling(a=torch.zeros(3, 3)), "has shape (3, 3)"),
    "fewer dimensions": (telling(a=torch.zeros(2)), "has shape (2,)"),
    "nan": (telling(a=torch.full((2, 1), math.nan)), "has values from nan"),
    "too large": (telling(a=torch.full((2, 1), 1.5)), "has values from 1.5 to 1.5, not -1 to 1"),
    "too small": (telling(n=torch.tensor(-1)), "has values from -1"),
    "infinite": (telling(a=torch.full((2, 1), -math.inf)), "has values from -inf"),
    "what the part complains of": (telling(n=torch.tensor(3)), "its n is odd"),
}


@pytest.mark.parametrize("name", WRONG_PAYLOADS)
def test_any_other_payload_is_refused(name: str) -> None:
    reply, reason = WRONG_PAYLOADS[name]
    failure = admit(reply, JOBS, [NEWS])
    assert isinstance(failure, Failure)
    assert reason in failure.reason


def test_a_form_may_depend_on_what_the_client_was_asked() -> None:
    def as_sent(job: Job) -> dict[str, dict[str, TensorForm]]:
        forms = {key: TensorForm(tuple(one.shape), one.dtype, -LARGEST, LARGEST) for key, one in job.state.items()}
        return {"back": forms}

    reply = replace(GOOD, payload={"back": dict(JOBS["c0"].state)})
    assert isinstance(admit(reply, JOBS, [Part(form=as_sent)]), Update)


def test_weights_that_nobody_asked_for_are_refused() -> None:
    silent = [Part(weights_up=False)]
    assert isinstance(admit(replace(GOOD, state={}), JOBS, silent), Update)
    failure = admit(GOOD, JOBS, silent)
    assert isinstance(failure, Failure)
    assert "sent weights" in failure.reason


def test_class_counts_have_the_servers_classes_and_add_up() -> None:
    part = class_counts(TINY.resources)
    counts = torch.tensor([GOOD.n_examples - 1, 1, 0])

    def counting(told: torch.Tensor) -> Update | Failure:
        return admit(replace(GOOD, payload={CLASS_COUNTS: {"counts": told}}), JOBS, [part])

    assert isinstance(counting(counts), Update)
    for wrong, reason in ((counts + 1, "add up"), (torch.cat([counts, counts[2:]]), "shape (4,)"), (-counts, "values")):
        failure = counting(wrong)
        assert isinstance(failure, Failure)
        assert reason in failure.reason


def test_what_a_client_wants_to_keep_is_none_of_the_servers_business() -> None:
    assert admit(replace(GOOD, kept={"own": {"x": torch.ones(1)}}), JOBS) == update_of(GOOD)
