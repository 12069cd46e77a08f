from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax
from scipy.stats import entropy
from torch import Tensor

from conftest import stripes
from feddf.evaluate import Teacher
from feddf.fusion.ensemble import avg_logits, avg_probabilities
from feddf.fusion.weights import (
    CLASS_COUNTS,
    by_accuracy,
    by_certainty,
    by_class_counts,
    by_examples,
    certainty,
    uniform,
)
from feddf.runtime.execution import Execution
from feddf.types import Inputs, Resources, Weight, WeightedLogits

LOGITS = torch.tensor([[3.0, 0.0, 0.0], [0.1, 0.0, 0.0]])
RESOURCES = Resources({}, validation=stripes(6, 0))  # of three classes


def unasked(inputs: Inputs, execution: Execution) -> Tensor:
    raise AssertionError("a teacher was asked for weights that do not depend on its answers")


def teacher(name: str, n: int, counts: tuple[int, ...] | None = None) -> Teacher:
    payload = {} if counts is None else {CLASS_COUNTS: {"counts": torch.tensor(counts)}}
    return Teacher(name, unasked, n_examples=n, payload=payload)


def never(teachers: Sequence[Teacher]) -> Mapping[str, float]:
    raise AssertionError("accuracies were measured for weights that do not need them")


def vote(logits: Tensor, weight: Weight) -> WeightedLogits:
    return WeightedLogits(logits, weight(logits) if callable(weight) else weight)


def test_uniform_and_n_k() -> None:
    teachers = [teacher("a", 10), teacher("b", 30)]
    assert uniform(teachers, RESOURCES, never) == {"a": 1.0, "b": 1.0}
    assert by_examples(teachers, RESOURCES, never) == {"a": 10.0, "b": 30.0}


def test_teachers_without_examples_all_count_alike() -> None:
    assert by_examples([teacher("a", 0), teacher("b", 0)], RESOURCES, never) == {"a": 1.0, "b": 1.0}


@given(arrays(np.float64, (3, 4), elements=st.floats(-20, 20)))
def test_certainty_is_one_over_the_perplexity(logits: np.ndarray) -> None:
    expected = np.exp(-entropy(softmax(logits, axis=1), axis=1))
    np.testing.assert_allclose(certainty(torch.from_numpy(logits))[:, 0], expected, rtol=1e-9)


def test_an_undecided_teacher_counts_less_where_it_is_undecided() -> None:
    sure, unsure = torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 0.1]])
    weights = by_certainty([teacher("sure", 1), teacher("unsure", 1)], RESOURCES, never)
    votes = [vote(sure, weights["sure"]), vote(unsure, weights["unsure"])]
    assert avg_logits(votes)[0, 0] > avg_logits([WeightedLogits(sure), WeightedLogits(unsure)])[0, 0]


def test_class_counts_weigh_each_logit_by_who_knows_the_class() -> None:
    teachers = [teacher("a", 10, (10, 0, 0)), teacher("b", 30, (0, 30, 0))]
    weights = by_class_counts(teachers, RESOURCES, never)
    votes = [vote(logits, weights[name]) for name, logits in zip("ab", LOGITS[:, None], strict=True)]
    expected = torch.tensor([[3.0, 0.0, 0.0]])  # class 0 from a, class 1 from b, class 2, which nobody has, from both
    torch.testing.assert_close(avg_logits(votes), expected.softmax(dim=1))


@pytest.mark.parametrize("counts", [None, (1, 2), (0,) * 7])
def test_a_teacher_that_does_not_disclose_is_taken_to_be_balanced(counts: tuple[int, ...] | None) -> None:
    weights = by_class_counts([teacher("a", 12, (12, 0, 0)), teacher("b", 6, counts)], RESOURCES, never)
    assert torch.as_tensor(weights["b"]).tolist() == [2.0, 2.0, 2.0]


def test_without_validation_data_the_number_of_classes_is_what_most_teachers_disclose() -> None:
    teachers = [teacher("a", 12, (12, 0, 0)), teacher("b", 4, (1, 3, 0)), teacher("c", 6, (1, 2, 1, 2))]
    weights = by_class_counts(teachers, Resources({}), never)
    assert torch.as_tensor(weights["b"]).tolist() == [1.0, 3.0, 0.0]
    assert torch.as_tensor(weights["c"]).tolist() == [2.0, 2.0, 2.0]


def test_without_validation_data_a_lone_discloser_does_not_say_how_many_classes_there_are() -> None:
    silent, first = [teacher("a", 6), teacher("b", 12)], teacher("c", 4, (1, 3, 0))
    assert by_class_counts([*silent, first], Resources({}), never) == {"a": 6.0, "b": 12.0, "c": 4.0}
    most = [*silent, first, teacher("d", 3, (1, 1, 1)), teacher("e", 3, (1, 1, 1))]
    assert torch.as_tensor(by_class_counts(most, Resources({}), never)["a"]).tolist() == [2.0, 2.0, 2.0]


def test_probabilities_weighed_by_class_still_add_up_to_one() -> None:
    weights = by_class_counts([teacher("a", 10, (9, 1, 0)), teacher("b", 30, (0, 20, 10))], RESOURCES, never)
    votes = [vote(LOGITS, weight) for weight in weights.values()]
    torch.testing.assert_close(avg_probabilities(votes).sum(dim=1), torch.ones(2))


def test_accuracy_weighs_and_all_at_zero_count_alike() -> None:
    teachers = [teacher("a", 1), teacher("b", 1)]
    assert by_accuracy(teachers, RESOURCES, lambda _: {"a": 0.2, "b": 0.8}) == {"a": 0.2, "b": 0.8}
    assert by_accuracy(teachers, RESOURCES, lambda _: {"a": 0.0, "b": 0.0}) == {"a": 1.0, "b": 1.0}


def test_weights_travel_to_workers() -> None:
    teachers = [teacher("a", 5, (3, 2, 0))]
    found = [weigh(teachers, RESOURCES, never) for weigh in (uniform, by_examples, by_certainty, by_class_counts)]
    for weights in (*found, by_accuracy(teachers, RESOURCES, lambda _: {"a": 0.2})):
        weight = vote(LOGITS, pickle.loads(pickle.dumps(weights))["a"]).weight
        assert torch.as_tensor(weight).isfinite().all()


def test_class_counts_are_exact_and_a_class_that_nobody_has_counts_alike() -> None:
    weights = by_class_counts([teacher("a", 4, (1, 3, 0)), teacher("b", 5, (0, 5, 0))], RESOURCES, never)
    rows = torch.stack([torch.as_tensor(weights[name]) for name in "ab"])
    assert rows.dtype == torch.float64
    assert rows.tolist() == [[1, 3, 1], [0, 5, 1]]


def test_the_servers_own_data_say_how_many_classes_there_are() -> None:
    liars = [teacher(name, 6, (3, 3)) for name in "bcd"]
    weights = by_class_counts([teacher("a", 4, (1, 3, 0)), *liars], RESOURCES, never)
    assert torch.as_tensor(weights["a"]).tolist() == [1.0, 3.0, 0.0]
    assert torch.as_tensor(weights["b"]).tolist() == [2.0, 2.0, 2.0]


def test_accuracies_are_asked_for_these_teachers() -> None:
    asked: list[list[str]] = []

    def accuracies(teachers: Sequence[Teacher]) -> dict[str, float]:
        asked.append([one.id for one in teachers])
        return {one.id: 0.5 for one in teachers}

    by_accuracy([teacher("a", 1), teacher("b", 1)], RESOURCES, accuracies)
    assert asked == [["a", "b"]]
