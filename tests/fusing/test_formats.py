"""Teachers in every format answer as the module that they were made from."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import save_file
from small_teachers import CLASSES, ENCODE, as_folder, models, spec_of, text_classifier
from torch import Tensor, nn

from conftest import stripes
from feddf import StudentSpec, fuse
from feddf.config import DistillConfig
from feddf.config.errors import FeddfError
from feddf.config.fuse_config import TeacherConfig, load_fuse
from feddf.config.names import MODELS
from feddf.evaluate import logits
from feddf.fusing import onnx_files
from feddf.fusing.feeding import HAND, Feeding
from feddf.fusing.folder import write_onnx
from feddf.fusing.inputs import RawInputs, load_pool
from feddf.fusing.predictions import as_logits, kind_of, open_teacher
from feddf.fusing.teachers import TeacherError, TrainedModel, read_teacher, read_teachers
from feddf.runtime.execution import Execution
from feddf.runtime.packages import transformers
from feddf.saved.model import Images

IMAGES = stripes(70, 3).inputs
FED = {"size": 8, "channels": 1, "mean": (0.4,), "std": (0.3,)}


def answers(
    teacher: TrainedModel,
    raw: Tensor | tuple[str, ...] = IMAGES.raw,  # type: ignore[assignment]
    execution: Execution = Execution(),
) -> Tensor:
    with open_teacher(teacher, teacher.fed_like(Feeding.of(ENCODE, HAND)).preprocess, execution) as predict:
        outputs = torch.cat(list(predict(RawInputs(raw))))
    return as_logits(teacher, teacher.outputs or kind_of(teacher.id, outputs), outputs)


def as_safetensors(model: nn.Module, path: Path) -> TeacherConfig:
    save_file(model.state_dict(), path / "m.safetensors")
    return TeacherConfig(path=str(path / "m.safetensors"), model="cnn", options={"width": 4}, **FED)


def as_run(model: nn.Module, path: Path) -> TeacherConfig:
    (path / "models").mkdir()
    save_file(model.state_dict(), path / "models" / "small.safetensors")
    described = {"feddf": {"prototypes": {"small": spec_of().describe(), "other": spec_of(6).describe()}}}
    (path / "config.json").write_text(json.dumps(described))
    return TeacherConfig(path=str(path), prototype="small")


def as_model_folder(model: nn.Module, path: Path) -> TeacherConfig:
    return TeacherConfig(path=str(as_folder(model, spec_of(), path / "folder")))


@cache
def onnx_file() -> bytes:
    """Return a model as ONNX, written once: the exporter takes seconds."""
    with TemporaryDirectory() as folder:
        assert write_onnx(models()["all"], IMAGES.batch(torch.arange(4)), Path(folder) / "m.onnx") < 1e-4
        return (Path(folder) / "m.onnx").read_bytes()


def as_onnx(model: nn.Module, path: Path) -> TeacherConfig:
    (path / "m.onnx").write_bytes(onnx_file())
    return TeacherConfig(path=str(path / "m.onnx"), **FED)


def as_program(model: nn.Module, path: Path, batch: int | None = None) -> TeacherConfig:
    inputs = IMAGES.batch(torch.arange(batch or 4))
    varying = None if batch else ({0: torch.export.Dim("batch", min=1)},)
    torch.export.save(torch.export.export(model, (inputs,), dynamic_shapes=varying), path / "m.pt2")
    return TeacherConfig(path=str(path / "m.pt2"))  # fed as the student is


def as_program_of_fixed_batches(model: nn.Module, path: Path) -> TeacherConfig:
    return as_program(model, path, batch=9)


@pytest.mark.parametrize(
    "write", [as_safetensors, as_run, as_model_folder, as_onnx, as_program, as_program_of_fixed_batches]
)
def test_it_answers_as_its_module(write: object, tmp_path: Path) -> None:
    model = models()["all"]
    (teacher,) = read_teacher(write(model, tmp_path), trust=True)  # type: ignore[operator]
    assert torch.allclose(answers(teacher), logits(model, IMAGES), atol=1e-3)
    assert teacher.content is not None


@pytest.mark.parametrize("said", [FED, {}])
def test_a_file_is_opened_once_for_all_sets(
    said: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a file says of itself is read before, without its weights being set up: its sizes decide the pool's."""
    as_onnx(models()["all"], tmp_path)
    opened: list[Path] = []
    session = onnx_files.open_session
    monkeypatch.setattr(onnx_files, "open_session", lambda path: (opened.append(path), session(path))[1])
    (teacher,) = read_teachers([TeacherConfig(path=str(tmp_path / "m.onnx"), **said)])  # type: ignore[arg-type]
    fuse(
        [teacher],
        StudentSpec("cnn", ENCODE, {"width": 4}),
        IMAGES,
        validation=stripes(30, 4),
        test=stripes(40, 5),
        distill=DistillConfig(steps=2, batch_size=8, early_stopping="none"),
        cache=tmp_path / "cache",
    )
    assert len(opened) == 1


def test_a_run_folder_gives_all_its_prototypes(tmp_path: Path) -> None:
    config = as_run(models()["all"], tmp_path)
    save_file(models()["wide"].state_dict(), tmp_path / "models" / "other.safetensors")
    found = read_teachers([config.model_copy(update={"prototype": None, "name": "run"})])
    assert [teacher.id for teacher in found] == ["run-small", "run-other"]
    assert torch.allclose(answers(found[1]), logits(models()["wide"], IMAGES), atol=1e-4)


@pytest.mark.parametrize("model", ["mlp", "resnet8", "vgg9"])
def test_weights_say_how_many_classes_there_are(model: str, tmp_path: Path) -> None:
    """Whatever the order in the file: a hidden layer of an MLP is larger than the last one, and comes after it."""
    state = MODELS[model]((1, 16, 16), 5).state_dict()
    save_file(state, tmp_path / "m.safetensors")
    config = TeacherConfig(path=str(tmp_path / "m.safetensors"), model=model, **{**FED, "size": 16})
    (teacher,) = read_teacher(config)
    assert teacher.classes == ()  # they have no names
    assert answers(teacher).shape == (70, 5)


def test_two_teachers_of_one_name_get_numbers(tmp_path: Path) -> None:
    config = as_safetensors(models()["all"], tmp_path)
    assert [teacher.id for teacher in read_teachers([config, config])] == ["m-1", "m-2"]


def test_probabilities_become_logits(tmp_path: Path) -> None:
    class Sure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = models()["all"]

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs).softmax(dim=1)

    (teacher,) = read_teacher(as_program(Sure(), tmp_path).model_copy(update={"outputs": "probabilities"}), trust=True)
    teacher = TrainedModel(teacher.id, teacher.open, outputs="probabilities")
    expected = logits(models()["all"], IMAGES).softmax(dim=1)
    assert torch.allclose(answers(teacher).softmax(dim=1), expected, atol=1e-4)


def test_a_teacher_sees_images_in_its_own_way(tmp_path: Path) -> None:
    """Another size, normalization and order of colors are the teacher's own business."""
    shown: list[Tensor] = []

    class Eye(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            shown.append(inputs)
            return inputs.flatten(1)[:, :3]

    from feddf.fusing.teachers import of_module

    raw = torch.zeros((2, 3, 8, 8), dtype=torch.uint8)
    raw[:, 0] = 255  # red
    own = Images((3, 4, 4), (0.5, 0.5, 0.5), (0.5, 0.25, 0.5), "BGR")
    answers(of_module(Eye(), "eye", preprocess=own), raw)
    assert shown[-1].shape == (2, 3, 4, 4)
    assert shown[-1][0, :, 0, 0].tolist() == pytest.approx([-1.0, -2.0, 1.0])


def test_a_text_classifier_of_hugging_face(tmp_path: Path) -> None:
    texts = text_classifier(tmp_path)
    (teacher,) = read_teacher(TeacherConfig(path=str(texts), max_tokens=8))
    assert teacher.classes == ("negative", "positive")
    library = transformers()
    model = library.AutoModelForSequenceClassification.from_pretrained(texts).eval()
    rows = library.AutoTokenizer.from_pretrained(texts)(["very good film", "bad"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    assert torch.allclose(answers(teacher, ("very good film", "bad")), expected, atol=1e-5)


def test_an_image_classifier_of_hugging_face(tmp_path: Path) -> None:
    library = transformers()
    torch.manual_seed(0)
    config = library.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_labels=3, id2label=dict(enumerate(CLASSES)), label2id={name: number for number, name in enumerate(CLASSES)},
    )  # fmt: skip
    model = library.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    described = {"size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    (teacher,) = read_teacher(TeacherConfig(path=str(tmp_path)))
    assert teacher.classes == CLASSES
    assert teacher.preprocess == Images((3, 8, 8), (0.5,) * 3, (0.25,) * 3)
    raw = IMAGES.raw[torch.arange(5)].expand(-1, 3, -1, -1).contiguous()
    with torch.no_grad():
        expected = model(pixel_values=(raw / 255 - 0.5) / 0.25).logits
    assert torch.allclose(answers(teacher, raw), expected, atol=1e-4)


def refused(config: TeacherConfig, raw: Tensor = IMAGES.raw) -> str:  # type: ignore[assignment]
    with pytest.raises(FeddfError) as caught:
        answers(read_teachers([config], trust=True)[0], raw)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".bin", ".ckpt"])
def test_a_pickle_is_refused_with_the_way_to_convert_it(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    torch.save({"weight": torch.zeros(1)}, path)
    said = refused(TeacherConfig(path=str(path)))
    assert f"a {suffix} file can run any code when it is read" in said
    assert "save_file(torch.load(" in said


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".safetensors"])
def test_a_damaged_file_is_one_line(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"nothing of the kind" * 20)
    said = refused(TeacherConfig(path=str(path), model="cnn", size=8))
    assert "not a whole" in said


def test_torch_logs_nothing_about_a_damaged_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would be a traceback above our own line."""
    (tmp_path / "m.pt2").write_bytes(b"PK and nothing more")
    logger = logging.getLogger("torch.export")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(TeacherError, match="not a whole"):
            read_teacher(TeacherConfig(path=str(tmp_path / "m.pt2")), trust=True)
        assert not caplog.records
    finally:
        logger.removeHandler(caplog.handler)


def test_what_is_missing_or_does_not_fit_is_one_line(tmp_path: Path) -> None:
    model = models()["all"]
    config = as_safetensors(model, tmp_path)
    (tmp_path / "site-a.onnx").touch()
    (tmp_path / "notes.md").touch()
    cases = {
        "there is no teacher": TeacherConfig(path=str(tmp_path / "none.onnx")),
        "; did you mean 'site-a.onnx'": TeacherConfig(path=str(tmp_path / "site_a.onnx")),
        "site-a.onx; did you mean 'site-a.onnx'": TeacherConfig(path=str(tmp_path / "site-a.onx")),
        "known are folders of feddf or Hugging Face": TeacherConfig(path="./none"),
        "notes.md; known are folders": TeacherConfig(path=str(tmp_path / "notes.md")),
        "say which architecture its weights are of": TeacherConfig(path=config.path, **FED),
        "say how large its images are": TeacherConfig(path=config.path, model="cnn"),
        "does not fit the model 'cnn'": config.model_copy(update={"options": {"width": 5}}),
        "its class list names 'a' twice": config.model_copy(update={"classes": ("a", "a", "b")}),
        "its map has a class 'd' that it does not know": config.model_copy(
            update={"classes": ("a", "b", "c"), "map": {"d": "e"}}
        ),
        "its map makes 'b' of 'a' and 'b'": config.model_copy(update={"classes": ("a", "b", "c"), "map": {"a": "b"}}),
    }
    for expected, given in cases.items():
        assert expected in refused(given)


def test_a_file_that_takes_another_size_is_refused(tmp_path: Path) -> None:
    as_onnx(models()["all"], tmp_path)
    said = refused(TeacherConfig(path=str(tmp_path / "m.onnx"), **{**FED, "size": 16}))
    assert said.startswith("teacher m: its file takes inputs of 1×8×8, and it would be fed 1×16×16; say how")
    (teacher,) = read_teacher(TeacherConfig(path=str(tmp_path / "m.onnx")))
    with pytest.raises(TeacherError, match="takes inputs of 1×8×8, and it would be fed 3×8×8"):
        answers(replace(teacher, feeding=Feeding.of(Images((3, 8, 8), (0.4,) * 3, (0.3,) * 3), HAND)))


def test_maps_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    config = as_safetensors(models()["all"], tmp_path)
    one, other = (
        config.model_copy(update={"classes": ("car", "b", "c"), "map": {"car": name}}) for name in ("auto", "lorry")
    )
    with pytest.raises(TeacherError, match="two class maps contradict each other: 'car' is 'auto'"):
        read_teachers([one, other])


def test_the_pool_has_the_views_that_are_asked_for() -> None:
    pool = {"sources": ["digits"], "size": 20, "views": 3}
    config = load_fuse(None, {"teachers": [{"path": "a.pt"}], "pool": pool, "student": {"model": "mlp"}})
    raw = load_pool(config, [Images((1, 8, 8), (0.5,), (0.5,))])
    assert (len(raw), raw.views) == (60, 3)
    assert raw.stored(Images((1, 16, 16), (0.5,), (0.5,))).views == 3
