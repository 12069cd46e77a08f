"""The gate against hostile and broken updates: each is refused with its reason, and nothing raises."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_tiny
from feddf.admit import LARGEST, MOST_CLASSES, MOST_EXAMPLES, MOST_METRICS, MOST_STEPS, admit
from feddf.models.cnn import CNN
from feddf.states import initial
from feddf.types import Client, Failure, Job, Prototype, Update

TINY = make_tiny()
JOBS = {c.id: Job(c, 3, TINY.server.models[c.prototype], 1) for c in TINY.federation.clients[:4]}
GOOD = TINY.local(JOBS["c0"])


def changed(key: str, tensor: Any) -> Update:
    return replace(GOOD, state={**GOOD.state, key: tensor})


def spoilt(key: str, value: float) -> Update:
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
    "wrong shape": (changed("classifier.bias", torch.zeros(4)), "has shape (4,), and its prototype (3,)"),
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
    "class counts that do not add up": (replace(GOOD, class_counts=(5, 5, 5)), "do not add up to its n_k = 20"),
    "negative class counts": (replace(GOOD, class_counts=(-5, 5, 20)), "do not add up"),
    "class counts of text": (replace(GOOD, class_counts=("a", 5, 5)), "do not add up"),
    "class counts as a list": (replace(GOOD, class_counts=[20, 0]), "not one number for each"),
    "too many class counts": (replace(GOOD, class_counts=(20, *[0] * 200_000)), "not one number for each"),
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


def test_an_honest_update_passes() -> None:
    assert admit(GOOD, JOBS) is None


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
    assert failure is not None
    assert "not an update" in failure.reason


def test_a_remote_clients_count_is_bounded_but_not_known() -> None:
    remote = {"c0": replace(JOBS["c0"], client=Client("c0", "cnn"))}
    assert admit(replace(GOOD, n_examples=12345), remote) is None
    failure = admit(replace(GOOD, n_examples=0), remote)
    assert failure is not None
    assert "n_k = 0" in failure.reason


@pytest.mark.parametrize("options", [{"width": 8}, {"width": 16}])
def test_a_last_layer_times_a_million_is_refused_on_real_sizes(options: dict[str, int]) -> None:
    prototype = Prototype("cnn", partial(CNN, (1, 28, 28), 10, **options))
    job = Job(Client("a", "cnn"), 1, initial(prototype, 0), 0)
    scaled = {key: tensor * 1e6 if key.startswith("classifier") else tensor for key, tensor in job.state.items()}
    failure = admit(Update("a", "cnn", 1, scaled, 5), {"a": job})
    assert failure is not None
    assert "most that is believed" in failure.reason


@given(st.sampled_from(sorted(GOOD.state)), st.floats(), st.data())
def test_only_sane_numbers_get_through(key: str, value: float, data: st.DataObject) -> None:
    tensor = GOOD.state[key].clone()
    if not tensor.is_floating_point():
        return
    stored = torch.tensor(value, dtype=torch.float64).to(torch.float32)
    tensor.view(-1)[data.draw(st.integers(0, tensor.numel() - 1))] = stored
    sane = abs(float(stored)) <= LARGEST and not (key.endswith("running_var") and stored < 0)
    assert (admit(changed(key, tensor), JOBS) is None) == sane


def test_the_limits_themselves_are_allowed() -> None:
    """What is just within the limits passes; what is just beyond does not."""
    counter = "features.1.num_batches_tracked"
    stranger = {**JOBS, "c0": replace(JOBS["c0"], client=replace(JOBS["c0"].client, indices=None))}
    allowed = [
        changed(counter, torch.tensor(MOST_STEPS)),
        changed(counter, torch.tensor(0)),
        replace(GOOD, class_counts=(20, 0)),
        replace(GOOD, class_counts=(20, *[0] * (MOST_CLASSES - 1))),
        replace(GOOD, metrics={f"m{k}": 0.0 for k in range(MOST_METRICS)}),
        replace(GOOD, n_examples=MOST_EXAMPLES),
    ]
    assert [admit(update, stranger) for update in allowed] == [None] * len(allowed)
    beyond = [
        changed(counter, torch.tensor(MOST_STEPS + 1)),
        replace(GOOD, class_counts=(20,)),
        replace(GOOD, class_counts=(20, *[0] * MOST_CLASSES)),
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
        ("a string", Failure("unknown", "not an update but a str")),
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
            replace(GOOD, class_counts=7),
            Failure("c0", "its class counts are 7, not one number for each of 2 to 100000 classes"),
        ),
    ],
)
def test_a_refusal_names_the_client_and_what_was_wrong(update: Any, expected: Failure) -> None:
    assert admit(update, JOBS) == expected


def test_as_many_keys_as_the_prototype_but_others() -> None:
    renamed = {f"other.{key}": tensor for key, tensor in GOOD.state.items()}
    failure = admit(replace(GOOD, state=renamed), JOBS)
    assert failure is not None
    names = ["classifier.bias", "classifier.weight", "features.0.weight"]
    others = [f"other.{name}" for name in names]
    assert failure.reason == f"keys differ from the prototype's: missing {names}, unexpected {others}"
