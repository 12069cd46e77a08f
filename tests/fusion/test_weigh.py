from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from feddf.fusion.weigh import by_accuracy, by_certainty, by_class_counts, by_examples, certainty, uniform
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax
from scipy.stats import entropy

from feddf.fusion.ensemble import combine
from feddf.types import Update, Vote

LOGITS = torch.tensor([[3.0, 0.0, 0.0], [0.1, 0.0, 0.0]])


def teacher(name: str, n: int, counts: tuple[int, ...] | None = None) -> Update:
    return Update(name, "mlp", 1, {}, n, class_counts=counts)


def test_uniform_and_n_k() -> None:
    teachers = [teacher("a", 10), teacher("b", 30)]
    assert [weight(LOGITS) for weight in uniform(teachers).values()] == [1.0, 1.0]
    assert [weight(LOGITS) for weight in by_examples(teachers).values()] == [10.0, 30.0]


def test_teachers_without_examples_all_count_alike() -> None:
    weights = by_examples([teacher("a", 0), teacher("b", 0)])
    assert [weight(LOGITS) for weight in weights.values()] == [1.0, 1.0]


@given(arrays(np.float64, (3, 4), elements=st.floats(-20, 20)))
def test_certainty_is_one_over_the_perplexity(logits: np.ndarray) -> None:
    expected = np.exp(-entropy(softmax(logits, axis=1), axis=1))
    np.testing.assert_allclose(certainty(torch.from_numpy(logits))[:, 0], expected, rtol=1e-9)


def test_an_undecided_teacher_counts_less_where_it_is_undecided() -> None:
    sure, unsure = torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 0.1]])
    weights = by_certainty([teacher("sure", 1), teacher("unsure", 1)])
    votes = [Vote(sure, weights["sure"](sure)), Vote(unsure, weights["unsure"](unsure))]
    assert combine(votes)[0, 0] > combine([Vote(sure), Vote(unsure)])[0, 0]


def test_class_counts_weigh_each_logit_by_who_knows_the_class() -> None:
    teachers = [teacher("a", 10, (10, 0, 0)), teacher("b", 30, (0, 30, 0))]
    weights = by_class_counts(teachers, n_classes=3)
    votes = [Vote(logits, weights[name](logits)) for name, logits in zip("ab", LOGITS[:, None], strict=True)]
    expected = torch.tensor([[3.0, 0.0, 0.0]])  # class 0 from a, class 1 from b, class 2, which nobody has, from both
    torch.testing.assert_close(combine(votes), expected.softmax(dim=1))


@pytest.mark.parametrize("counts", [None, (1, 2), (0,) * 7])
def test_a_teacher_that_does_not_disclose_is_taken_to_be_balanced(counts: tuple[int, ...] | None) -> None:
    weights = by_class_counts([teacher("a", 12, (12, 0, 0)), teacher("b", 6, counts)], n_classes=3)
    assert torch.as_tensor(weights["b"](LOGITS)).tolist() == [2.0, 2.0, 2.0]


def test_probabilities_weighed_by_class_still_add_up_to_one() -> None:
    weights = by_class_counts([teacher("a", 10, (9, 1, 0)), teacher("b", 30, (0, 20, 10))], n_classes=3)
    votes = [Vote(LOGITS, weight(LOGITS)) for weight in weights.values()]
    torch.testing.assert_close(combine(votes, average="probabilities").sum(dim=1), torch.ones(2))


def test_accuracy_weighs_and_all_at_zero_count_alike() -> None:
    teachers = [teacher("a", 1), teacher("b", 1)]
    weights = by_accuracy(teachers, examine=lambda _: {"a": 0.2, "b": 0.8})
    assert [weight(LOGITS) for weight in weights.values()] == [0.2, 0.8]
    weights = by_accuracy(teachers, examine=lambda _: {"a": 0.0, "b": 0.0})
    assert [weight(LOGITS) for weight in weights.values()] == [1.0, 1.0]


def test_weights_travel_to_workers() -> None:
    for weigh in (uniform, by_examples, by_certainty):
        weight = pickle.loads(pickle.dumps(weigh([teacher("a", 5)])))["a"]
        assert torch.as_tensor(weight(LOGITS)).isfinite().all()
