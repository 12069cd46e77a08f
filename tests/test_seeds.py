from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from feddf.seeds import derive, seed_torch

paths = st.lists(st.one_of(st.integers(0, 99), st.text(max_size=4)), max_size=3).map(tuple)


def test_is_the_same_on_every_machine() -> None:
    assert derive(0, "sample", 3) == 4791697873461279810


@given(st.integers(0, 10), paths, st.integers(0, 10), paths)
def test_only_the_same_name_gives_the_same_seed(a: int, p: tuple, b: int, q: tuple) -> None:
    assert (derive(a, *p) == derive(b, *q)) == ((a, *p) == (b, *q))


@given(st.integers(), paths)
def test_fits_a_torch_generator(seed: int, path: tuple) -> None:
    torch.Generator().manual_seed(derive(seed, *path))


def test_seeded_restores_the_global_generator() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    first = torch.rand(1)
    with seed_torch(5):
        inside = torch.rand(3)
    with seed_torch(5):
        assert torch.equal(torch.rand(3), inside)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
