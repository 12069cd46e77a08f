"""Group averages as teachers."""

from __future__ import annotations

import numpy as np
import torch

from feddf.fusion.groups import deal, group_averages
from feddf.types import Update


def update(number: int, prototype: str = "a", examples: int = 1) -> Update:
    state = {"w": torch.full((3,), float(number)), "count": torch.tensor(number)}
    return Update(f"{number:02d}", prototype, 1, state, examples)


def test_every_client_is_in_one_group_and_counts_by_its_examples() -> None:
    updates = [update(number, "ab"[number % 2], 1 + number) for number in range(11)]
    found = group_averages(deal(updates, 3, seed=5))
    assert [one.client_id for one in found] == [f"{p} group-{g}" for p in "ab" for g in (0, 1, 2)]
    for prototype in "ab":
        mine = [one for one in updates if one.prototype == prototype]
        groups = [one for one in found if one.prototype == prototype]
        assert sum(one.n_examples for one in groups) == sum(one.n_examples for one in mine)
        whole = np.average([int(one.client_id) for one in mine], weights=[one.n_examples for one in mine])
        again = np.average([float(one.state["w"][0]) for one in groups], weights=[one.n_examples for one in groups])
        assert abs(whole - again) < 1e-5


def test_a_group_of_one_is_the_client_and_one_group_is_the_average() -> None:
    updates = [update(number, examples=2) for number in range(4)]
    alone = group_averages(deal(updates, 9, seed=0))
    assert sorted(float(one.state["w"][0]) for one in alone) == [0.0, 1.0, 2.0, 3.0]
    (whole,) = group_averages(deal(updates, 1, seed=0))
    assert torch.equal(whole.state["w"], torch.full((3,), 1.5))
    assert int(whole.state["count"]) == 3


def test_groups_change_from_round_to_round_and_are_the_seeds() -> None:
    updates = [update(number) for number in range(12)]

    def values(seed: int) -> list[float]:
        return [float(one.state["w"][0]) for one in group_averages(deal(updates, 4, seed))]

    assert values(1) == values(1)
    assert values(1) != values(2)
    (idle,) = group_averages(deal([update(1, examples=0)], 4, seed=0))
    assert idle.n_examples == 0
    assert torch.equal(idle.state["w"], torch.ones(3))
