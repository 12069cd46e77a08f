"""How a teacher is fed and from where that is known, which is one value; and what its outputs are."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_teachers import CLASSES, ENCODE, as_folder, models, spec_of
from torch import Tensor, nn

import feddf
from conftest import stripes
from feddf.config import DistillConfig
from feddf.config.fuse_config import TeacherConfig, load_fuse
from feddf.fusing.classes import columns_of, respelled, union
from feddf.fusing.feeding import ASSUMED, FILE, HAND, STUDENT, Feeding, assumed, by_hand, fed_as, of_range, of_sizes
from feddf.fusing.folder import plan
from feddf.fusing.inputs import FeedingWarning, Labeled, RawInputs
from feddf.fusing.inspecting import better_normalization, inspect_teacher, warning_of
from feddf.fusing.predictions import PredictionCache, kind_of
from feddf.fusing.teachers import TeacherError, TrainedModel, of_module, read_teacher
from feddf.saved.model import Features, Images, Tokens, described, from_description

QUICK = DistillConfig(steps=20, batch_size=32, lr=0.01, early_stopping="none")


def test_the_first_voice_that_says_something_is_heard() -> None:
    hand = by_hand(TeacherConfig(path="a", size=16))
    file = Feeding.of(Images((3, 8, 8), (0.1, 0.2, 0.3), (0.5,) * 3, "BGR"), FILE)
    found = hand.otherwise(file)
    assert found.preprocess == Images((3, 16, 16), (0.1, 0.2, 0.3), (0.5,) * 3, "BGR")  # still BGR
    assert (found.who("size"), found.who("order"), found.who("mean")) == (HAND, FILE, FILE)
    assert found.line == ("3×16×16 (by hand), BGR, mean [0.1, 0.2, 0.3], std 0.5, values from -0.6 to 1.8 (file)")


def test_only_the_size_of_a_feddf_folder_said_by_hand_leaves_the_rest_as_its_file_says(tmp_path: Path) -> None:
    bgr = replace(spec_of(), shape=(3, 8, 8), preprocess=Images((3, 8, 8), (0.1,) * 3, (0.2,) * 3, "BGR"))
    model = models()["all"].__class__((3, 8, 8), 3, width=4)
    (teacher,) = read_teacher(TeacherConfig(path=str(as_folder(model, bgr, tmp_path / "a")), size=16))
    assert teacher.preprocess == Images((3, 16, 16), (0.1,) * 3, (0.2,) * 3, "BGR")


@given(st.sampled_from([1, 3]), st.integers(2, 40))
def test_a_flat_input_is_the_one_square_image_of_its_length(channels: int, side: int) -> None:
    found = of_sizes((channels * side * side,)).settled(tabular=False)
    assert (found.get("channels"), found.get("size")) == (channels, (side, side))
    assert of_sizes((channels * side * side,)).settled(tabular=True).preprocess == Features((channels * side * side,))


@given(st.floats(-300, 299), st.floats(1, 300))
def test_a_range_is_where_black_and_white_end_up(low: float, width: float) -> None:
    fed = Feeding.said(FILE, channels=1, size=(1, 1)).otherwise(of_range(low, low + width)).preprocess
    assert fed is not None
    ends = fed(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)).flatten().tolist()
    assert ends == pytest.approx([low, low + width], abs=1e-2)


@pytest.mark.parametrize(
    ("sizes", "shape", "layout"),
    [((1, 28, 28), (1, 28, 28), "NCHW"), ((32, 24, 3), (3, 32, 24), "NHWC"), ((None, 8, 8), (3, 8, 8), "NCHW")],
)
def test_a_files_sizes_say_the_layout(sizes: tuple[int, ...], shape: tuple[int, ...], layout: str) -> None:
    fed = assumed(of_sizes(sizes)).preprocess
    assert isinstance(fed, Images)
    assert (fed.shape, fed.layout) == (shape, layout)
    raw = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    assert fed(raw).shape[1:] == torch.Size([size or 3 for size in sizes])


def test_what_the_student_got_from_elsewhere_is_an_assumption_about_others() -> None:
    file, hand = Feeding.of(ENCODE, FILE), Feeding.of(ENCODE, HAND)
    unknown = of_sizes((1, 16, 16))
    expected = "1×16×16 (file), mean 0.4, std 0.3, values from -1.33 to 2 (assumed as for the student)"
    assert fed_as(unknown, file).line == expected
    assert fed_as(unknown, file).is_assumed
    said = fed_as(unknown, hand)
    assert (said.who("mean"), said.is_assumed) == (STUDENT, False)
    assert fed_as(Feeding(), Feeding()).line == "inputs as they are given"


def test_a_mean_that_does_not_fit_names_the_teacher() -> None:
    hand = by_hand(TeacherConfig(path="b.onnx", mean=(0.1, 0.2)))
    teacher = of_module(nn.Identity(), "b")
    with pytest.raises(TeacherError, match="teacher b: 2 means and 1 deviations do not fit 1 channels"):
        replace(teacher, feeding=hand.otherwise(of_sizes((1, 8, 8)))).fed_like(Feeding())
    whole = by_hand(TeacherConfig(path="b.onnx", size=8, channels=3, mean=(0.1, 0.2), std=(1.0,)))
    with pytest.raises(TeacherError, match="teacher b: 2 means and 3 deviations do not fit 3 channels"):
        replace(teacher, feeding=whole).fed_like(Feeding())
    with pytest.raises(TeacherError, match="teacher b: 2 means"):
        inspect_teacher(replace(teacher, feeding=whole))
    with pytest.raises(TeacherError, match=r"teacher m.safetensors: 2 means"):
        read_teacher(TeacherConfig(path="m.safetensors", model="cnn", size=8, mean=(0.1, 0.2)))


@pytest.mark.parametrize("fed", [ENCODE, Images((3, 4, 5), (0.1,) * 3, (1.0,) * 3, "BGR", "NHWC"), Tokens("x", 8),
                                 Features((3,)), Features((2,), (0.5, 1), (2, 3), ("a", "b"))])  # fmt: skip
def test_a_description_comes_back_and_old_ones_have_no_new_keys(fed: Images | Tokens | Features) -> None:
    assert from_description(described(fed)) == fed
    assert Feeding.of(fed, FILE).preprocess == fed
    assert ("layout" in described(fed)) == (isinstance(fed, Images) and fed.layout != "NCHW")


# What outputs are


@given(st.integers(2, 12), st.floats(0.1, 20))
def test_probabilities_in_float16_are_seen_and_logits_are_not_mistaken(n: int, spread: float) -> None:
    torch.manual_seed(n)
    logits = spread * torch.randn(64, n)
    assert kind_of("a", logits) == "logits"
    assert kind_of("a", logits.log_softmax(1)) == "logits"
    assert kind_of("a", logits.half().softmax(1).float()) == "probabilities"
    with pytest.raises(TeacherError, match="teacher a: its outputs are several labels, not one of several classes"):
        kind_of("a", logits.sigmoid())


class Sure(nn.Module):
    def __init__(self, end: str) -> None:
        super().__init__()
        self.inner, self.end = models()["all"], end

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.inner(inputs)
        return outputs.softmax(1) if self.end == "softmax" else outputs.sigmoid()


def test_a_softmax_at_the_end_costs_nothing_and_what_is_said_by_hand_wins(tmp_path: Path) -> None:
    def ensemble(*teachers: object) -> Tensor:
        found = feddf.fuse(teachers, feddf.StudentSpec("cnn", ENCODE), stripes(96, 3).inputs, test=stripes(60, 4),  # type: ignore[arg-type]
                           distill=QUICK)  # fmt: skip
        assert [one["outputs"] for one in found.report.teachers] == [kinds.pop(0)]
        return torch.tensor(found.report.sets["test"]["ensemble"].ece)

    kinds = ["logits", "probabilities", "logits"]
    plain = ensemble(models()["all"])
    assert torch.allclose(ensemble(Sure("softmax")), plain, atol=1e-4)
    assert ensemble(of_module(Sure("softmax"), "a", outputs="logits")) > plain + 0.1
    with pytest.raises(TeacherError, match="several labels"):
        ensemble(Sure("sigmoid"))


def test_cached_outputs_mean_what_is_said_now(tmp_path: Path) -> None:
    """What an earlier fusion took for probabilities is not in the file of what is now said to be logits."""
    teacher = replace(of_module(Sure("softmax"), "a"), content="a file")
    cache = PredictionCache(tmp_path, tmp_path, {"pool": RawInputs(stripes(9, 3).inputs.raw)}, ENCODE)  # type: ignore[arg-type]
    seen, said = cache.logits(teacher), cache.logits(replace(teacher, outputs="logits"))
    assert torch.allclose(seen.exp(), said)
    assert cache.evaluated == ["a", "a"]


# Normalizations that are tried


def fed_with(mean: float, std: float, who: str) -> TrainedModel:
    found = Feeding.said(FILE, channels=1, size=(8, 8)).otherwise(Feeding.said(who, mean=(mean,), std=(std,)))
    return replace(of_module(models()["all"], "a"), feeding=found)


def test_the_better_normalization_is_named_and_not_taken() -> None:
    examples = stripes(90, 12)
    labeled = Labeled(RawInputs(examples.inputs.raw), examples.labels, 3, CLASSES)  # type: ignore[arg-type]
    shifted = fed_with(20.0, 0.3, ASSUMED)
    hint = better_normalization(shifted, labeled, torch.arange(3))
    assert "it would have" in hint
    assert warning_of(fed_with(20.0, 0.3, HAND), labeled, torch.arange(3)) == ""
    assert better_normalization(fed_with(0.4, 0.3, ASSUMED), labeled, torch.arange(3)) == ""
    found = inspect_teacher(shifted, labeled)
    assert hint in found["warning"]
    assert found["said_by"]["mean"] == ASSUMED
    assert found["preprocessing"]["mean"] == (20.0,)
    assert found["accuracy"] < 0.9


def test_the_test_labels_are_never_looked_at_for_it(tmp_path: Path) -> None:
    def told(**labeled: object) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = feddf.fuse([fed_with(20.0, 0.3, ASSUMED)], feddf.StudentSpec("cnn", ENCODE), stripes(60, 3).inputs,
                               distill=QUICK, **labeled)  # type: ignore[arg-type]  # fmt: skip
        assert [str(one.message) for one in caught] == found.report.notes["warnings"]
        return list(found.report.notes["warnings"])

    assert "it would have" in told(validation=stripes(90, 12))[0]
    (alone,) = told(test=stripes(90, 12))
    assert alone.endswith("say it with mean and std if that is wrong")


# Class names


def test_class_names_are_matched_in_any_spelling_but_never_two_with_one() -> None:
    official = ("T-shirt/top", "Ankle boot", "Bag")
    assert columns_of(("bag", "ankle_boot", "t shirt"), official).tolist() == [2, 1, 0]
    assert respelled(("bag", "Ankle boot"), official) == {"bag": "Bag"}
    assert union([official, ("T-SHIRT", "hat")]) == (*official, "hat")
    assert columns_of(("1", "-1"), ("-1", "1")).tolist() == [1, 0]
    assert columns_of(("C", "C++"), ("c++", "c")).tolist() == [1, 0]
    assert columns_of(("Dog", "dog"), ("DOG",)).tolist() == [-1, -1]
    assert columns_of(("a/b", "b"), ("a", "b")).tolist() == [0, 1]


@given(st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=8), st.randoms())
def test_a_list_matches_itself_in_any_order(names: list[str], random: object) -> None:
    turned = list(names)
    random.shuffle(turned)  # type: ignore[attr-defined]
    assert columns_of(names, turned).tolist() == [turned.index(name) for name in names]


def test_fashion_mnist_has_its_official_names() -> None:
    from feddf.data.datasets import _CLOTHES

    assert _CLOTHES[0] == "T-shirt/top"
    assert _CLOTHES[9] == "Ankle boot"


# Sizes, from the file, else the student, else the pool


def test_sizes_come_from_the_file_else_the_student_else_the_pool(tmp_path: Path) -> None:
    varying = ({0: torch.export.Dim("batch", min=1)},)
    example = stripes(4, 1).inputs.batch(torch.arange(4))
    torch.export.save(torch.export.export(models()["all"], (example,), dynamic_shapes=varying), tmp_path / "m.pt2")
    values = {"teachers": [str(tmp_path / "m.pt2")], "student": {"model": "cnn"}, "pool": {"sources": ["digits"]}}
    made = plan(load_fuse(None, values), trust=True)
    assert made.teachers[0].feeding.line.startswith("1×8×8 (file), mean 0.5, std 0.5")
    assert made.student.feeding.line.startswith("1×8×8 (teacher m), mean 0.5, std 0.5")
    made = plan(load_fuse(None, {**values, "student": {"model": "cnn", "size": 10}}), trust=True)
    assert made.student.feeding.line.startswith("1×10×10 (by hand)")
    assert made.teachers[0].feeding.get("size") == (8, 8)
    values["teachers"] = [{"path": str(tmp_path / "m.pt2"), "name": "loose"}]
    dims = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    loose = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    torch.export.save(torch.export.export(loose.eval(), (example,), dynamic_shapes=(dims,)), tmp_path / "m.pt2")
    made = plan(load_fuse(None, values), trust=True)
    assert made.student.feeding.line.startswith("1×12×12 (pool)")
    assert made.teachers[0].feeding.line.startswith("1×12×12 (student)")


def test_outputs_without_names_are_taken_in_the_datas_order_and_that_is_said() -> None:
    labeled = Labeled(RawInputs(torch.zeros(3, 2)), torch.tensor([2, 0, 1]), 3, ("setosa", "versicolor", "virginica"))
    with pytest.warns(FeedingWarning, match="output 0 for 'setosa', 1 for 'versicolor'"):
        assert labeled.among(("0", "1", "2")).labels.tolist() == [2, 0, 1]
    with warnings.catch_warnings(action="error"):
        assert labeled.among(("virginica", "setosa", "versicolor")).labels.tolist() == [0, 1, 2]
