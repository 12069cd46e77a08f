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
from feddf.fusion.distill import kl_divergence
from feddf.fusion.ensemble import Question, answer, ask, avg_logits, combine, question
from feddf.types import Job, Refusal, Update, Vote

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
    (asked,) = ask(in_process, partial(answer, prototypes=tiny.prototypes, inputs=tiny.pool), [question(update)])
    torch.testing.assert_close(asked.logits, alone)


def test_teachers_with_logits_that_are_not_finite_are_refused_together(tiny: Tiny) -> None:
    updates = updates_of(tiny)
    for number in (1, 3):  # MLPs
        huge = {**updates[number].state, "layers.5.bias": torch.full((3,), torch.inf)}
        updates[number] = Update(updates[number].client_id, "mlp", 1, huge, 20)
    function = partial(answer, prototypes=tiny.prototypes, inputs=tiny.pool)
    with pytest.raises(Refusal) as refusal:
        list(ask(in_process, function, [question(update) for update in updates]))
    assert [failure.client_id for failure in refusal.value.failures] == ["c1", "c3"]
    assert "not finite" in refusal.value.failures[0].reason


def test_a_teacher_that_cannot_be_loaded_is_refused(tiny: Tiny) -> None:
    updates = updates_of(tiny)[:2]
    broken = Update("c0", "cnn", 1, {"nothing": torch.ones(1)}, 20)
    questions = [question(broken), question(updates[1])]
    with pytest.raises(Refusal, match="c0: its model could not be asked"):
        list(ask(in_process, partial(answer, prototypes=tiny.prototypes, inputs=tiny.pool), questions))


def test_a_model_made_by_the_server_is_left_out_when_it_is_unfit_and_nobody_is_refused(tiny: Tiny) -> None:
    questions = [question(update) for update in updates_of(tiny)[:2]]
    made = Question("sample 0", "mlp", {**questions[1].state, "layers.5.bias": torch.full((3,), torch.nan)}, made=True)
    function = partial(answer, prototypes=tiny.prototypes, inputs=tiny.pool)
    assert [reply.client_id for reply in ask(in_process, function, [*questions, made])] == ["c0", "c1"]


def test_a_model_made_by_the_server_has_the_pools_batchnorm_statistics(tiny: Tiny) -> None:
    update = updates_of(tiny)[0]
    spoiled = {**update.state, "features.1.running_mean": torch.full((4,), 50.0)}
    function = partial(answer, prototypes=tiny.prototypes, inputs=tiny.pool)
    made = [function(Question("s", "cnn", state, made=True)).logits for state in (update.state, spoiled)]
    torch.testing.assert_close(*made)
    assert not torch.allclose(function(Question("s", "cnn", spoiled)).logits, made[0])


opinions = arrays(np.float64, (3, 4, 5), elements=st.floats(-30, 30))
weights = arrays(np.float64, 3, elements=st.floats(0.1, 5))


@given(opinions, weights, st.floats(0.5, 8))
def test_weights_and_temperature_enter_as_the_formula_says(z: np.ndarray, w: np.ndarray, temperature: float) -> None:
    votes = [Vote(torch.from_numpy(logits), float(weight)) for logits, weight in zip(z, w, strict=True)]
    mean = np.average(z, axis=0, weights=w) / temperature
    np.testing.assert_allclose(combine(votes, temperature=temperature), softmax(mean, axis=1), atol=1e-6)
    expected = np.average(softmax(z / temperature, axis=2), axis=0, weights=w)
    actual = combine(votes, average="probabilities", temperature=temperature)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@given(opinions, weights)
def test_averaging_losses_has_the_gradient_of_averaged_probabilities(z: np.ndarray, w: np.ndarray) -> None:
    """Σ w_k KL(p_k ‖ q) / Σ w_k, differentiated by autograd, against the loss to the one target that stands for it."""
    student = torch.linspace(-1, 1, 20).reshape(4, 5).requires_grad_()
    losses = sum(
        float(weight) * kl_divergence(torch.from_numpy(softmax(logits, axis=1)).float(), student)
        for logits, weight in zip(z, w, strict=True)
    )
    (expected,) = torch.autograd.grad(losses / float(w.sum()), student)
    votes = [Vote(torch.from_numpy(logits), float(weight)) for logits, weight in zip(z, w, strict=True)]
    (actual,) = torch.autograd.grad(kl_divergence(combine(votes, average="losses"), student), student)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_in_averaged_probabilities_one_loud_teacher_is_one_voice() -> None:
    quiet = [torch.tensor([[2.0, 0.0]])] * 3
    loud = torch.tensor([[0.0, 2000.0]])
    votes = [Vote(logits) for logits in (*quiet, loud)]
    assert combine(votes).argmax() == 1
    assert combine(votes, average="probabilities").argmax() == 0
