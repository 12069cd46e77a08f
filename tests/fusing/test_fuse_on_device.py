"""One-shot fusion on another device than the CPU: all teachers answer there, and the student learns there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_formats as formats
import torch
from small_teachers import CLASSES, ENCODE, as_folder, models, spec_of, text_classifier
from torch import Tensor, nn
from typer.testing import CliRunner

import feddf
from conftest import stripes
from feddf.cli import app
from feddf.config import ConfigError, DistillConfig, RunConfig
from feddf.config.fuse_config import TeacherConfig
from feddf.fusing import predictions
from feddf.fusing.inputs import RawInputs
from feddf.fusing.teachers import TrainedModel, read_teacher
from feddf.runtime.execution import Execution
from feddf.states import digest
from pretend_device import NAME, pretend_device

POOL = stripes(60, 3).inputs
SHORT = DistillConfig(steps=6, batch_size=16, eval_every=3)


class Seen(nn.Module):
    """A model that notes the device of everything that it is called with."""

    places: ClassVar[list[str]] = []  # of all copies

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        assert len(inputs)  # so it cannot be traced, and is called itself
        self.places.append(inputs.device.type)
        found: Tensor = self.model(inputs)
        return found


@pytest.fixture
def places() -> Iterator[list[str]]:
    Seen.places.clear()
    yield Seen.places
    Seen.places.clear()


def fused(device: str, folder: Path) -> feddf.FusionResult:
    return feddf.fuse(
        [models()["all"], folder],
        feddf.StudentSpec("cnn", ENCODE, {"width": 4}, classes=CLASSES),
        POOL,
        validation=stripes(40, 8),
        test=stripes(50, 12),
        distill=SHORT,
        device=device,
        cache=folder.parent / f"cache-{device}",
        seed=3,
    )


def test_a_fusion_there_ends_with_the_bytes_and_the_report_of_the_cpu(tmp_path: Path) -> None:
    folder = as_folder(models()["wide"], spec_of(6), tmp_path / "wide")
    with pretend_device() as transfers:
        there = fused(NAME, folder)
    assert transfers.to_device
    here = fused("cpu", folder)
    assert all(type(tensor) is Tensor for tensor in there.model.state_dict().values())
    assert digest({"m": dict(there.model.state_dict())}) == digest({"m": dict(here.model.state_dict())})
    assert there.report == here.report


def test_teachers_and_student_compute_there(places: list[str]) -> None:
    with pretend_device():
        feddf.fuse([Seen(models()["all"])], models()["last"].__class__((1, 8, 8), 3, width=4), POOL,
                   distill=SHORT.model_copy(update={"early_stopping": "none"}), device=NAME)  # fmt: skip
        asked = len(places)
        assert asked
        feddf.fuse([models()["all"]], Seen(models()["wide"]), POOL,
                   distill=SHORT.model_copy(update={"early_stopping": "none"}), run=RunConfig(device=NAME))  # fmt: skip
    tried = "cpu"  # once, on two inputs, before anybody is asked
    assert set(places[:asked]) == {NAME}
    assert places[asked] == tried
    assert set(places[asked + 1 :]) == {NAME}
    assert places.count(NAME) >= asked + SHORT.steps


def test_a_module_of_the_users_stays_where_it_is(places: list[str]) -> None:
    module = Seen(models()["all"])
    with pretend_device():
        feddf.fuse(
            [module], models()["wide"], POOL, distill=SHORT.model_copy(update={"early_stopping": "none"}), device=NAME
        )
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}


# Teachers of every format


FORMATS = {
    "safetensors": formats.as_safetensors,
    "run": formats.as_run,
    "folder": formats.as_model_folder,
    "program": formats.as_program,
}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    ask = predictions._predict

    def noted(teacher: TrainedModel, forward: Any, batch: Tensor) -> Tensor:
        def seen(inputs: Tensor) -> Tensor:
            outputs: Tensor = forward(inputs)
            found.extend([inputs.device.type, outputs.device.type])
            return outputs

        return ask(teacher, seen, batch)

    with monkeypatch.context() as patched:
        patched.setattr(predictions, "_predict", noted)
        yield found


def said(teacher: TrainedModel, rows: Any, device: str) -> Tensor:
    return formats.answers(teacher, rows, Execution(device=device))


@pytest.mark.parametrize("name", FORMATS)
def test_files_answer_there_as_on_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (teacher,) = read_teacher(FORMATS[name](models()["all"], tmp_path), trust=True)
    with pretend_device(), watched(monkeypatch) as found:
        there = said(teacher, POOL.raw, NAME)
    assert set(found) == {NAME}
    assert torch.equal(there, said(teacher, POOL.raw, "cpu"))


def test_a_text_classifier_answers_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (teacher,) = read_teacher(TeacherConfig(path=str(text_classifier(tmp_path / "texts")), max_tokens=4))
    with pretend_device(), watched(monkeypatch) as found:
        there = said(teacher, ("good film", "bad"), NAME)
    assert set(found) == {NAME}
    assert torch.allclose(there, said(teacher, ("good film", "bad"), "cpu"), atol=1e-6)


def test_an_onnx_file_answers_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (teacher,) = read_teacher(formats.as_onnx(models()["all"], tmp_path))
    with pretend_device(), watched(monkeypatch) as found:
        there = said(teacher, POOL.raw, NAME)
    assert set(found) == {"cpu"}
    assert torch.equal(there, said(teacher, POOL.raw, "cpu"))


def test_answers_of_another_device_are_remembered_apart(tmp_path: Path) -> None:
    """Their last bits differ, and the CPU's result must not depend on what was asked elsewhere before."""
    (teacher,) = read_teacher(formats.as_safetensors(models()["all"], tmp_path))
    (onnx,) = read_teacher(formats.as_onnx(models()["all"], tmp_path))
    sets = {"pool": RawInputs(POOL.raw)}  # type: ignore[arg-type]
    for device, asked in ((NAME, ["m", "m"]), ("cpu", ["m"]), (NAME, []), ("cpu", [])):
        with pretend_device():
            execution = Execution(device=device)
            cache = predictions.PredictionCache(tmp_path / "cache", tmp_path, sets, ENCODE, execution=execution)
            for one in (teacher, onnx):
                cache.logits(one)
        assert cache.evaluated == asked  # the ONNX file answers on the CPU either way


# The result


def test_a_model_is_loaded_and_asked_there(tmp_path: Path) -> None:
    folder = as_folder(models()["all"], spec_of(), tmp_path / "model")
    image = POOL.raw[0, 0].numpy()  # type: ignore[union-attr]
    with pretend_device() as transfers:
        model = feddf.load_model(folder, device=NAME)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {NAME}
        model.predict([image])  # the constants of its encoding are sent with the first image, unless they are there
        sent = transfers.to_device
        there = model.predict([image])
        assert transfers.to_device == sent + 1
    assert there == feddf.load_model(folder).predict([image])


def test_a_device_that_is_not_here_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder called digits, where the tests are run, would be taken as the pool
    folder = as_folder(models()["all"], spec_of(), tmp_path / "model")
    with pytest.raises(ConfigError, match="has no such device"):
        feddf.fuse([folder], feddf.StudentSpec("cnn", ENCODE, {"width": 4}), POOL, device="vulkan:7")
    with pytest.raises(ConfigError, match="has no such device"):
        feddf.load_model(folder, device="no device")
    command = ["fuse", "--teacher", str(folder), "--student", "cnn", "--unlabeled", "digits", "--device", "cuda:99"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigError)
    assert "cuda:99" in str(done.exception)
    assert not (tmp_path / "out").exists()
