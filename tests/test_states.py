from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddf.models.small import MLP
from feddf.seeds import derive, seed_torch
from feddf.states import all_finite, copy, digest, drift, init_state, is_statistic, n_bytes, state_of, weighted_mean
from feddf.types import Prototype

numbers = st.floats(-100, 100, width=32)
rows = st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=6)


@given(rows, st.data())
def test_mean_agrees_with_numpy(values: list[list[float]], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 1000), min_size=len(values), max_size=len(values)))
    mean = weighted_mean([{"w": torch.tensor(row)} for row in values], weights)["w"]
    expected = np.average(np.array(values, dtype=np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-6)


@given(st.lists(numbers, min_size=1, max_size=5), st.lists(st.integers(1, 10**6), min_size=1, max_size=9))
def test_equal_states_come_back_unchanged(values: list[float], weights: list[int]) -> None:
    state = {"w": torch.tensor(values), "running_var": torch.tensor(values).abs(), "count": torch.tensor(7)}
    mean = weighted_mean([state] * len(weights), weights)
    assert all(torch.equal(mean[key], state[key]) for key in state)


def test_buffers_are_averaged_and_counters_take_the_largest() -> None:
    a = {"running_mean": torch.tensor([0.0]), "num_batches_tracked": torch.tensor(3)}
    b = {"running_mean": torch.tensor([4.0]), "num_batches_tracked": torch.tensor(9)}
    mean = weighted_mean([a, b], [3, 1])
    assert mean["running_mean"].item() == 1.0
    assert mean["num_batches_tracked"].item() == weighted_mean([b, a], [1, 3])["num_batches_tracked"].item() == 9
    assert mean["num_batches_tracked"].dtype == torch.int64


def test_weight_zero_leaves_a_state_out() -> None:
    a, b = {"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}
    assert weighted_mean([a, b], [2, 0])["w"].item() == 1.0


@pytest.mark.parametrize("weights", [[0, 0], [0.0, 0.0]])
def test_no_weight_at_all_is_an_error(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive total weight"):
        weighted_mean([{"w": torch.ones(1)}] * 2, weights)


def test_digest_sees_every_bit_name_dtype_and_shape() -> None:
    state = {"w": torch.ones(2, 2)}
    flipped = {"w": state["w"].clone()}
    flipped["w"][0, 0] = float(np.nextafter(np.float32(1), np.float32(2)))
    others = [
        *(flipped, {"v": state["w"]}, {"w": state["w"].double()}, {"w": state["w"].reshape(4)}),
        {"w": state["w"].view(torch.int32)},  # the same bytes
    ]
    assert len({digest({"m": other}) for other in [state, *others]}) == 6
    assert digest({"m": state}) == digest({"m": {"w": torch.ones(2, 2)}})


def test_copy_has_its_own_plain_storage() -> None:
    original = {"w": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)}
    copied = copy(original)
    original["w"].zero_()
    assert copied["w"].is_contiguous()
    assert copied["w"].sum() == 96


def test_the_sum_is_rounded_once_and_keeps_the_type() -> None:
    """In float32, 1e8 + 1 − 1e8 is 0; float16 has no 1e8 at all, yet its mean is a float16."""
    states = [{"w": torch.tensor([value])} for value in (1e8, 1.0, -1e8)]
    assert weighted_mean(states, [1, 1, 1])["w"].item() == np.float32(1 / 3)
    halves = [{"w": torch.tensor([value], dtype=torch.float16)} for value in (1.0, 2.0)]
    assert weighted_mean(halves, [1, 1])["w"].dtype == torch.float16


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0]])
def test_every_state_needs_a_weight(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="zip"):
        weighted_mean([{"w": torch.ones(1)}] * 2, weights)


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    def build() -> MLP:
        return MLP((2,), 3, width=4)

    first = init_state(Prototype("a", build), 0)
    with seed_torch(derive(0, "init", "a")):
        expected = build().state_dict()
    assert digest({"": first}) == digest({"": expected})
    others = [init_state(Prototype("a", build), 1), init_state(Prototype("b", build), 0)]
    assert len({digest({"": state}) for state in [first, *others]}) == 3


def test_statistics_are_known_by_their_names() -> None:
    batchnorm = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    assert {name for name in batchnorm if is_statistic(name)} == {
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }


def test_size_and_finiteness() -> None:
    state = {"w": torch.ones(3, dtype=torch.float64), "count": torch.tensor(7)}
    assert n_bytes(state) == 32
    assert all_finite(state)
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not all_finite({**state, "v": torch.tensor([1.0, bad])})


@given(st.integers(0, 99))
def test_drift_is_the_relative_distance_over_all_parameters(seed: int) -> None:
    random = np.random.default_rng(seed)
    mine, center = ({"w": random.normal(size=(2, 3)), "b": random.normal(size=3)} for _ in range(2))
    flat = [np.concatenate([state["w"].ravel(), state["b"]]) for state in (mine, center)]
    expected = np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])
    states = [{key: torch.tensor(value) for key, value in state.items()} for state in (mine, center)]
    extra = [{**state, "running_mean": torch.tensor([n])} for n, state in enumerate(states)]
    assert drift(*states) == drift(*extra) == pytest.approx(expected, abs=1e-5)


def test_a_drift_without_a_value_is_none() -> None:
    center = {"w": torch.ones(2)}
    for state in ({}, {"w": torch.ones(3)}, {"w": torch.tensor([1.0, float("inf")])}):
        assert drift(state, center) is None
    assert drift({}, {}) is None


def test_reading_off_keeps_an_order_and_shares_nothing() -> None:
    model = torch.nn.Linear(1, 1)
    read = state_of(model, {"bias": torch.empty(0), "weight": torch.empty(0)})
    assert list(read) == ["bias", "weight"]
    before = read["weight"].item()
    model.weight.data.add_(1)
    assert read["weight"].item() == before
