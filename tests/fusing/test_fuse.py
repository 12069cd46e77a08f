"""One-shot fusion: it is FedDF's, it asks each teacher once, and its result is a folder that can be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from small_teachers import CLASSES, ENCODE, as_folder, models, spec_of
from torch import nn

import feddf
from conftest import stripes
from feddf.config import ConfigError, DistillConfig
from feddf.config.errors import FeddfError
from feddf.config.fuse_config import FuseEnsembleConfig, TeacherConfig, load_fuse
from feddf.data.files import read_image
from feddf.evaluate import accuracy, logits
from feddf.fusing.folder import fuse_to_folder
from feddf.fusing.inputs import RawInputs
from feddf.fusing.predictions import PredictionCache
from feddf.fusing.report import figures
from feddf.fusing.teachers import TrainedModel, read_teachers
from feddf.fusion.distill import distill
from feddf.fusion.ensemble import CachedTargets, avg_logits, avg_probabilities
from feddf.seeds import derive
from feddf.types import WeightedLogits

QUICK = DistillConfig(steps=40, batch_size=32, lr=0.01, early_stopping="none")
POOL = stripes(96, 3).inputs


def plan(**values: object) -> feddf.StudentSpec:
    return feddf.StudentSpec("cnn", ENCODE, {"width": 4}, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("average", "target"), [("logits", avg_logits), (None, avg_probabilities)])
def test_it_is_the_distillation_of_feddf(average: str | None, target: Any) -> None:
    """Against the pieces put together by hand: averaged answers, then one distillation from the same start."""
    ensemble = FuseEnsembleConfig(combine=average) if average else FuseEnsembleConfig()
    student = models()["last"].__class__((1, 8, 8), 3, width=4)
    fused = feddf.fuse([models()["all"], models()["wide"]], student, POOL, ensemble=ensemble, distill=QUICK, seed=7)
    answers = target([WeightedLogits(logits(models()[name], POOL)) for name in ("all", "wide")])
    seed = derive(derive(7, "fuse"), "student")
    expected = distill(student, CachedTargets(answers), POOL, QUICK, score=None, seed=seed)
    for key, tensor in expected.state.items():
        assert torch.allclose(fused.model.state_dict()[key], tensor, atol=1e-5), key


def test_a_student_of_two_teachers_with_different_classes_knows_all(tmp_path: Path) -> None:
    first = as_folder(models()["first"], spec_of(classes=CLASSES[:2]), tmp_path / "first")
    last = as_folder(models()["last"], spec_of(classes=CLASSES[1:]), tmp_path / "last")
    found = feddf.fuse([first, last], plan(), POOL, test=stripes(90, 12), distill=QUICK, cache=tmp_path / "cache")
    assert found.classes == CLASSES
    figures = found.report.sets["test"]
    assert figures["first"].accuracy < 0.7 > figures["last"].accuracy
    assert figures["student"].accuracy > 0.95
    assert found.report.knows == {"first": (True, True, False), "last": (False, True, True)}


def test_only_new_teachers_are_asked(tmp_path: Path) -> None:
    folders = [as_folder(models()["all"], spec_of(), tmp_path / name) for name in ("a", "b")]
    folders.append(as_folder(models()["wide"], spec_of(6), tmp_path / "c"))

    def asked(chosen: list[Path], **values: object) -> tuple[str, ...]:
        return feddf.fuse(chosen, plan(), POOL, distill=QUICK, cache=tmp_path / "cache", **values).evaluated  # type: ignore[arg-type]

    assert asked(folders[:1]) == ("a",)
    assert asked(folders[:2]) == ()  # the same weights under another name
    assert asked(folders) == ("c",)
    assert asked(folders, seed=3, ensemble=FuseEnsembleConfig(combine="probabilities")) == ()


def test_an_interrupted_teacher_leaves_no_answers_and_the_others_keep_theirs(tmp_path: Path) -> None:
    folders = [as_folder(models()[name], spec_of(width), tmp_path / name) for name, width in (("all", 4), ("wide", 6))]

    def interrupt(teacher: str, done: int, total: int) -> None:
        if teacher == "wide":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        feddf.fuse(folders, plan(), POOL, distill=QUICK, cache=tmp_path / "cache", progress=interrupt)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert feddf.fuse(folders, plan(), POOL, distill=QUICK, cache=tmp_path / "cache").evaluated == ("wide",)


def test_a_module_in_memory_is_asked_every_time(tmp_path: Path) -> None:
    for _ in range(2):
        assert feddf.fuse([models()["all"]], plan(), POOL, distill=QUICK, cache=tmp_path / "cache").evaluated == (
            "teacher-1",
        )
    assert not (tmp_path / "cache").exists()


def test_a_student_starts_as_a_teacher_or_as_an_average(tmp_path: Path) -> None:
    folders = [as_folder(models()["all"], spec_of(), tmp_path / name) for name in ("a", "b")]
    nothing = DistillConfig(steps=1, lr=1e-12, early_stopping="none")
    for start in ("a", "average"):
        found = feddf.fuse(folders, plan(init=start), POOL, distill=nothing, cache=tmp_path / "cache")
        weights = found.model.state_dict()
        for key, tensor in models()["all"].state_dict().items():
            if "running" not in key and "num_batches" not in key:
                assert torch.allclose(weights[f"network.{key}"], tensor, atol=1e-6), key


def test_a_student_starts_as_weights_whose_classes_the_user_names(config: str, tmp_path: Path) -> None:
    """A safetensors file has no class names: those of the others, or the student's, are its own."""
    values = {
        "student": {"init": "b"},
        "cache": str(tmp_path / "cache"),
        "distill": {"steps": 1, "early_stopping": "none"},
    }
    result = fuse_to_folder(load_fuse(config, values), tmp_path / "out")
    assert result.classes == CLASSES
    assert result.report.sets["test"]["student"].accuracy > 0.9


def test_drop_worst_and_weights_are_those_of_feddf(tmp_path: Path) -> None:
    torch.manual_seed(9)
    ignorant = models()["all"].__class__((1, 8, 8), 3, width=4)
    nn.init.zeros_(ignorant.classifier.weight)
    found = feddf.fuse(
        [models()["all"], models()["wide"], ignorant],
        plan(),
        POOL,
        validation=stripes(60, 4),
        ensemble=FuseEnsembleConfig(drop_worst="paper", weights="validation"),
        distill=QUICK,
    )
    assert list(found.report.notes["dropped_worst"]["clients"]) == ["teacher-3"]
    assert found.report.sets["validation"]["ensemble"].accuracy > 0.9


def test_drop_worst_without_labels_is_one_line() -> None:
    asked = FuseEnsembleConfig(drop_worst="paper")
    with pytest.raises(ConfigError, match=r"ensemble\.drop_worst = 'paper': it needs labeled examples"):
        feddf.fuse([models()["all"]], plan(), POOL, ensemble=asked, distill=QUICK)


def test_students_learn_at_a_temperature_and_the_ensemble_is_reported_without_it() -> None:
    names, test = ("all", "wide"), stripes(90, 12)
    hot = QUICK.model_copy(update={"temperature": 4.0})
    student = models()["last"].__class__((1, 8, 8), 3, width=4)
    found = feddf.fuse([models()[name] for name in names], student, POOL, test=test, distill=hot, seed=7)
    answers = avg_probabilities([WeightedLogits(logits(models()[name], POOL)) for name in names], 4.0)
    expected = distill(
        student, CachedTargets(answers), POOL, hot, score=None, seed=derive(derive(7, "fuse"), "student")
    )
    for key, tensor in expected.state.items():
        assert torch.allclose(found.model.state_dict()[key], tensor, atol=1e-5), key
    votes = [WeightedLogits(logits(models()[name], test.inputs)) for name in names]
    cool, warm = (figures(avg_probabilities(votes, t), test.labels, torch.ones(3)) for t in (1.0, 4.0))
    assert abs(cool.ece - warm.ece) > 0.01
    assert found.report.sets["test"]["ensemble"].ece == pytest.approx(cool.ece, abs=1e-6)


def test_an_average_is_of_those_that_are_not_dropped_by_their_examples(tmp_path: Path) -> None:
    torch.manual_seed(9)
    ignorant, other = (models()["all"].__class__((1, 8, 8), 3, width=4) for _ in range(2))
    nn.init.zeros_(ignorant.classifier.weight)
    moved = {key: one + 0.01 if "weight" in key else one for key, one in models()["all"].state_dict().items()}
    other.load_state_dict(moved)
    known = {"a": models()["all"], "b": other, "c": ignorant}
    paths = [as_folder(model, spec_of(), tmp_path / name) for name, model in known.items()]
    found = feddf.fuse(
        read_teachers([TeacherConfig(path=str(path), examples=n) for path, n in zip(paths, (1, 3, 50), strict=True)]),
        plan(init="average"),
        POOL,
        validation=stripes(60, 4),
        ensemble=FuseEnsembleConfig(drop_worst="paper"),
        distill=DistillConfig(steps=1, lr=1e-12, early_stopping="none"),
    )
    assert list(found.report.notes["dropped_worst"]["clients"]) == ["c"]
    for key, tensor in known["a"].state_dict().items():
        if "running" not in key and "num_batches" not in key:
            expected = (tensor + 3 * other.state_dict()[key]) / 4
            assert torch.allclose(found.model.state_dict()[f"network.{key}"], expected, atol=1e-6), key


CONFIG = """
name = "bands"
[[teachers]]
path = "TMP/a"
[[teachers]]
path = "TMP/b.safetensors"
model = "cnn"
options = { width = 6 }
size = 8
channels = 1
mean = [0.4]
std = [0.3]
[student]
model = "cnn"
[pool]
sources = ["small_teachers:bands"]
[distill]
steps = 60
lr = 0.01
[test]
name = "small_teachers:bands"
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    from safetensors.torch import save_file

    as_folder(models()["all"], spec_of(), tmp_path / "a")
    save_file(models()["wide"].state_dict(), tmp_path / "b.safetensors")
    path = tmp_path / "fuse.toml"
    path.write_text(CONFIG.replace("TMP", str(tmp_path)) + "\n[run]\nthreads = 1\n")
    return str(path)


def test_the_folder_holds_a_model_that_can_be_used(config: str, tmp_path: Path) -> None:
    from PIL import Image

    asked = load_fuse(config, {"cache": str(tmp_path / "cache")})
    assert asked.distill.early_stopping == "held-out-loss"  # nobody gave labels
    result = fuse_to_folder(asked, tmp_path / "out")
    model = feddf.load_model(tmp_path / "out")
    test = stripes(90, 12)
    assert model.classes == CLASSES
    assert accuracy(model, test) == result.report.sets["test"]["student"].accuracy > 0.9
    picture = tmp_path / "picture.png"
    Image.fromarray(test.inputs.raw[2, 0].numpy()).save(picture)
    (prediction,) = model.predict([str(picture)])
    assert prediction.label == CLASSES[int(test.labels[2])]
    assert sum(prediction.probabilities.values()) == pytest.approx(1)
    assert read_image(picture, None).shape == (8, 8, 3)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert len(json.loads(file.metadata()["feddf"])["configuration_sha256"]) == 64
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: feddf\n")
    assert "mean of the teachers" in card
    assert 'path = "' in card
    assert (tmp_path / "out" / "reliability-test.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FeddfError, match="is there already"):
        fuse_to_folder(asked, tmp_path / "out")


def test_the_same_configuration_gives_the_same_bytes(config: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        fuse_to_folder(load_fuse(config, {"cache": str(tmp_path / f"cache-{name}")}), tmp_path / name)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_labeled_set_needs_the_classes_of_the_student(config: str, tmp_path: Path) -> None:
    named = {"name": "small_teachers:bands", "classes": ["top", "middle", "elsewhere"]}
    with pytest.raises(ConfigError, match="its class 'elsewhere' is none of the student's: top, middle, bottom"):
        fuse_to_folder(load_fuse(config, {"test": named, "cache": str(tmp_path / "c")}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_predictions_through_a_function_of_the_users_are_not_found_again(tmp_path: Path) -> None:
    """The same rows with another encoding are other inputs, and a function has no content that could be hashed."""
    asked: list[float] = []

    @contextmanager
    def opened(device: torch.device) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        def predict(batch: torch.Tensor) -> torch.Tensor:
            asked.append(float(batch.sum()))
            return batch

        yield predict

    teacher = TrainedModel("site", opened, content="the hash of its file")
    rows = torch.ones(4, 3)
    for encode in (lambda raw: raw, lambda raw: 2 * raw):
        scratch = tmp_path / f"scratch-{len(asked)}"
        cache = PredictionCache(tmp_path / "cache", scratch, {"pool": RawInputs(rows, encode)}, None)
        assert float(cache.logits(teacher).sum()) == asked[-1]
    assert asked == [12.0, 24.0]
    assert not (tmp_path / "cache").exists()
