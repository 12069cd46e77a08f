from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax
from torch import Tensor

from conftest import Tiny
from feddf.engines import in_process
from feddf.fusion.ensemble import answer, ask, avg_logits
from feddf.types import Job, Refusal, Update

teachers = st.integers(1, 5).flatmap(lambda n: arrays(np.float32, (n, 4, 3), elements=st.floats(-50, 50, width=32)))


@given(teachers)
def test_is_the_softmax_of_the_mean_logits(logits: np.ndarray) -> None:
    probabilities = avg_logits(torch.from_numpy(logits))
    np.testing.assert_allclose(probabilities, softmax(logits.astype(np.float64).mean(axis=0), axis=1), atol=1e-6)


def test_one_teacher_alone_is_its_own_ensemble() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(avg_logits([logits]), logits.softmax(dim=1))


def test_the_sum_does_not_lose_small_teachers_beside_large_ones() -> None:
    large, small = torch.tensor([[1e8, 0.0]]), torch.tensor([[3.0, 0.0]])
    torch.testing.assert_close(avg_logits([large, small, -large]), torch.tensor([[1.0, 0.0]]).softmax(dim=1))


def test_no_teacher_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one teacher"):
        avg_logits([])


def test_teachers_stream_through_one_at_a_time() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def stream() -> Iterator[Tensor]:
        for number in range(50):
            assert sum(reference() is not None for reference in alive) <= 1
            tensor = torch.full((4, 3), float(number))
            alive.append(weakref.ref(tensor))
            yield tensor
            del tensor

    avg_logits(stream())
    assert len(alive) == 50


def updates_of(tiny: Tiny) -> list[Update]:
    return [tiny.local(Job(c, 1, tiny.server.models[c.prototype], 7)) for c in tiny.federation.clients[:4]]


def test_answers_come_from_eval_mode_whatever_the_batch(tiny: Tiny) -> None:
    """BatchNorm in train mode would make an answer depend on the others in its batch, and ruin the teacher."""
    update = updates_of(tiny)[0]
    model = tiny.prototypes["cnn"].load(update.state)
    with torch.no_grad():
        alone = torch.cat([model(tiny.pool.batch(torch.tensor([i]))) for i in range(len(tiny.pool))])
    (asked,) = ask(in_process, partial(answer, prototypes=tiny.prototypes, inputs=tiny.pool), [update])
    torch.testing.assert_close(asked, alone)


def test_teachers_with_logits_that_are_not_finite_are_refused_together(tiny: Tiny) -> None:
    updates = updates_of(tiny)
    for number in (1, 3):  # MLPs
        huge = {**updates[number].state, "layers.5.bias": torch.full((3,), torch.inf)}
        updates[number] = Update(updates[number].client_id, "mlp", 1, huge, 20)
    function = partial(answer, prototypes=tiny.prototypes, inputs=tiny.pool)
    with pytest.raises(Refusal) as refusal:
        avg_logits(ask(in_process, function, updates))
    assert [failure.client_id for failure in refusal.value.failures] == ["c1", "c3"]
    assert "not finite" in refusal.value.failures[0].reason


def test_a_teacher_that_cannot_be_loaded_is_refused(tiny: Tiny) -> None:
    updates = updates_of(tiny)[:2]
    broken = Update("c0", "cnn", 1, {"nothing": torch.ones(1)}, 20)
    with pytest.raises(Refusal, match="c0: its model could not be asked"):
        list(ask(in_process, partial(answer, prototypes=tiny.prototypes, inputs=tiny.pool), [broken, updates[1]]))
