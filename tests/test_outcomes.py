from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddf.evaluate import gather, in_order
from feddf.types import Failure


@given(st.permutations([f"c{i}" for i in range(8)]))
def test_any_order_becomes_the_order_asked_for(arrival: list[str]) -> None:
    asked = [f"c{i}" for i in range(8)]
    outcomes = [Failure(name, "") for name in arrival]
    assert [outcome.client_id for outcome in in_order(outcomes, asked)] == asked


def test_nothing_is_held_back_longer_than_needed() -> None:
    given_out: list[str] = []

    def stream():
        for name in ("b", "a", "c"):
            given_out.append(name)
            yield Failure(name, "")

    outcomes = in_order(stream(), ["a", "b", "c"])
    assert next(outcomes).client_id == "a"
    assert given_out == ["b", "a"]
    assert next(outcomes).client_id == "b"
    assert given_out == ["b", "a"]


def test_gather_raises_for_the_servers_own_failures() -> None:
    assert gather(iter([1, 2]), "the distillation of") == [1, 2]
    with pytest.raises(RuntimeError, match="the distillation of mlp failed: no memory"):
        gather([1, Failure("mlp", "no memory")], "the distillation of")
