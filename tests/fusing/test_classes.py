"""Class lists: who knows what, and what becomes of a class that a teacher does not know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from feddf.evaluate import logits
from feddf.fusing.classes import union
from feddf.fusing.ensemble import ClassMapping, agree_on_classes
from feddf.fusing.teachers import TeacherError, TrainedModel, of_module
from feddf.fusion.ensemble import avg_logits, avg_probabilities
from feddf.fusion.weights import certainty
from feddf.types import Target, WeightedLogits


def mappings(*lists: list[int], classes: int) -> list[ClassMapping]:
    return [ClassMapping(torch.tensor(columns), classes) for columns in lists]


@pytest.mark.parametrize("target", [avg_logits, avg_probabilities])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_where_all_know_all_it_is_the_ensemble_of_the_paper(target: Target, temperature: float) -> None:
    torch.manual_seed(0)
    answers = [10 * torch.randn(8, 4) for _ in range(3)]
    found = target(
        [mapping.vote(z, 1.0) for mapping, z in zip(mappings(*[[0, 1, 2, 3]] * 3, classes=4), answers, strict=True)],
        temperature,
    )
    assert torch.allclose(found, target([WeightedLogits(z) for z in answers], temperature), atol=1e-6)


@pytest.mark.parametrize("target", [avg_logits, avg_probabilities])
def test_a_class_that_one_teacher_knows_is_its_own_affair(target: Target) -> None:
    """The closed form: for every class the mean over those that know it; one again in sum."""
    torch.manual_seed(1)
    first, last = torch.randn(5, 3), torch.randn(5, 2)
    one, other = mappings([0, 1, 2], [2, 3], classes=4)
    found = target([one.vote(first, 2.0), other.vote(last, 1.0)])
    if target is avg_logits:
        a, b = first - first.mean(1, keepdim=True), last - last.mean(1, keepdim=True)
        mean = torch.stack([a[:, 0], a[:, 1], (2 * a[:, 2] + b[:, 0]) / 3, b[:, 1]], dim=1)
        expected = mean.softmax(dim=1)
    else:
        a, b = first.softmax(1), last.softmax(1)
        mean = torch.stack([a[:, 0], a[:, 1], (2 * a[:, 2] + b[:, 0]) / 3, b[:, 1]], dim=1)
        expected = mean / mean.sum(1, keepdim=True)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("target", [avg_logits, avg_probabilities])
def test_the_order_of_a_list_and_a_constant_in_the_logits_do_not_matter(target: Target) -> None:
    torch.manual_seed(2)
    own = torch.randn(6, 3)
    straight, turned = mappings([0, 1, 2], [2, 1, 0], classes=4)
    (rest,) = mappings([1, 3], classes=4)
    other = rest.vote(torch.randn(6, 2), 1.0)
    one = target([straight.vote(own, 1.0), other])
    assert torch.allclose(one, target([turned.vote(own.flip(1) + 70, 1.0), other]), atol=1e-5)


def test_a_teacher_that_is_sure_of_its_own_wins_over_one_that_guesses() -> None:
    """An input of class 0, which the second teacher does not know: it must not drag the student to its classes."""
    knows, guesses = mappings([0, 1, 2], [2, 3], classes=4)
    sure, unsure = torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([[0.3, 1.0]])
    for target in (avg_logits, avg_probabilities):
        assert int(target([knows.vote(sure, 1.0), guesses.vote(unsure, 1.0)]).argmax()) == 0
    for target in (avg_logits, avg_probabilities):  # two disjoint lists
        one, other = mappings([0, 1], [2, 3], classes=4)
        assert int(target([one.vote(sure[:, :2], 1.0), other.vote(unsure, 1.0)]).argmax()) == 0


def test_weights_by_certainty_see_a_teachers_own_classes_only() -> None:
    own = torch.randn(5, 2)
    (mapping,) = mappings([1, 3], classes=5)
    weight = mapping.vote(own, certainty).weight
    assert isinstance(weight, Tensor)
    assert torch.allclose(weight[:, [1, 3]], certainty(own).expand(-1, 2), atol=1e-9)
    assert weight[:, [0, 2, 4]].abs().max() < 1e-20


def teacher(name: str, *classes: str) -> TrainedModel:
    return of_module(nn.Identity(), name, classes=classes)


def never(model: TrainedModel) -> int:
    raise AssertionError("a teacher must not be evaluated where class lists say all")


def test_lists_are_matched_by_name() -> None:
    found, classes = agree_on_classes([teacher("a", "cat", "dog"), teacher("b", "Dog ", "frog")], [], never)
    assert classes == ("cat", "dog", "frog")
    assert [one.classes for one in found] == [("cat", "dog"), ("Dog ", "frog")]
    assert union([["a"], ["b", "A"]]) == ("a", "b")


def test_without_any_list_outputs_are_numbers() -> None:
    found, classes = agree_on_classes([teacher("a"), teacher("b")], [], lambda model: 3)
    assert classes == ("0", "1", "2") == found[1].classes


MISTAKES = {
    "the student cannot express all classes: teacher a knows 'y'": ([teacher("a", "x", "y")], ["x", "z"]),
    "no teacher knows the class 'z'": ([teacher("a", "x", "y")], ["x", "y", "z"]),
}


@pytest.mark.parametrize("expected", MISTAKES)
def test_lists_that_do_not_fit_are_one_line(expected: str) -> None:
    with pytest.raises(TeacherError) as caught:
        agree_on_classes(*MISTAKES[expected], never)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_as_many_outputs_as_classes_are_needed() -> None:
    (listed,), _ = agree_on_classes([teacher("b")], ["x", "y", "z"], never)
    for one, count in ((listed, 2), (teacher("a", "x", "y"), 3)):
        with pytest.raises(TeacherError, match=rf"teacher {one.id}: it has {count} outputs, .* classes = \[...\]"):
            one.check_outputs(count)
    listed.check_outputs(3)
    teacher("c").check_outputs(7)  # its classes are not known yet


def test_digits_of_two_overlapping_lists() -> None:
    """Real digits: teachers of 0 to 6 and of 4 to 9 together know all ten, and better than each alone."""
    from feddf.config import DataConfig
    from feddf.data.datasets import digits
    from feddf.models.small import MLP

    data = digits(DataConfig(name="digits"))
    votes, alone = [], []
    for seed, columns in enumerate((list(range(7)), list(range(4, 10)))):
        torch.manual_seed(seed)
        chosen = torch.isin(data.train.labels, torch.tensor(columns)).nonzero().flatten()
        inputs, labels = data.train.inputs.batch(chosen), data.train.labels[chosen] - columns[0]
        model = MLP(data.shape, len(columns), width=32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        (mapping,) = mappings(columns, classes=10)
        own = logits(model, data.test.inputs)
        votes.append(mapping.vote(own, 1.0))
        alone.append(float((mapping.logits(own).argmax(1) == data.test.labels).double().mean()))
    for target in (avg_logits, avg_probabilities):
        together = float((target(votes).argmax(1) == data.test.labels).double().mean())
        assert together > max(alone) + 0.15
