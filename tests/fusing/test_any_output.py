"""Fusing models whose outputs are not one class: what does not fit, sites that differ, and what is written."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_teachers import text_classifier
from torch import Tensor, nn

import feddf
from feddf import cli
from feddf.config import ConfigError, DistillConfig
from feddf.config.errors import FeddfError
from feddf.config.fuse_config import FuseEnsembleConfig, TeacherConfig
from feddf.config.names import MODELS
from feddf.data.datasets import plain
from feddf.data.text import CHARACTERS, characters
from feddf.fusing import ensemble, onnx_files
from feddf.fusing.folder import write_onnx
from feddf.fusing.fuse import StudentSpec
from feddf.fusing.inputs import RawInputs
from feddf.fusing.predictions import PredictionCache, in_order
from feddf.fusing.teachers import TrainedModel, of_module, read_teacher
from feddf.models.positions import UNet
from feddf.models.small import build_network
from feddf.outputs import classes, labels, values
from feddf.runtime.packages import transformers
from feddf.saved.model import Features, Images, ModelSpec, Tokens

QUICK = DistillConfig(steps=3, batch_size=8, lr=0.01, early_stopping="none")
POOL = torch.randint(0, 256, (20, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
ENCODE = Images((1, 8, 8), (0.4,), (0.3,))
ORGANS = (("background", "liver"), ("background", "spleen"), ("kidney", "background"))
UNET = StudentSpec("unet", ENCODE, {"width": 4, "depth": 1})


def main(words: list[str]) -> int:
    return cli.guarded(lambda: cli.app(words, standalone_mode=False))


def segmenter(seed: int, channels: int = 2, side: int = 8) -> UNet:
    torch.manual_seed(seed)
    return UNet((1, side, side), channels, (side, side), width=4, depth=1).eval()


def hospitals() -> list[TrainedModel]:
    said = {"preprocess": ENCODE, "outputs": "logits"}
    return [of_module(segmenter(k), f"h{k}", classes=one, **said) for k, one in enumerate(ORGANS)]  # type: ignore[arg-type]


def conditional(model_outputs: list[Tensor], lists: tuple[tuple[str, ...], ...], names: list[str]) -> np.ndarray:
    """The ten-line version: each teacher's odds against background; the background has what the others leave."""
    total = np.zeros((len(model_outputs[0]), len(names), 8, 8))
    count = np.zeros(len(names))
    for raw, known in zip(model_outputs, lists, strict=True):
        p = np.exp(raw.double().numpy())
        p /= p.sum(axis=1, keepdims=True)
        for own, name in enumerate(known):
            total[:, names.index(name)] += p[:, own]
            count[names.index(name)] += 1
    total /= count[None, :, None, None]
    total[:, names.index("background")] = 0
    total[:, names.index("background")] = np.maximum(1 - total.sum(axis=1), 0)
    return total / total.sum(axis=1, keepdims=True)


def test_hospitals_that_know_different_organs(tmp_path: Path) -> None:
    raw, teachers = RawInputs(POOL), hospitals()
    cache = PredictionCache(tmp_path, tmp_path, {"pool": raw}, ENCODE)
    models, names, outputs = ensemble.agree_on_outputs(teachers, (), None, cache.meaning, cache.n_channels)
    assert names == ("background", "liver", "spleen", "kidney")
    assert outputs.options == {"background": 0}
    found = ensemble.combine_teachers(models, names, outputs, cache, None, FuseEnsembleConfig())
    own = [segmenter(k)(ENCODE(POOL)).detach() for k in range(3)]
    expected = conditional(own, ORGANS, list(names))
    np.testing.assert_allclose(found.probabilities("pool", 1.0).numpy(), expected, atol=2e-3)


def test_targets_that_are_made_for_each_batch_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> dict[str, Tensor]:
        return feddf.fuse(hospitals(), UNET, RawInputs(POOL), distill=QUICK, cache=tmp_path).model.state_dict()

    kept = weights()
    monkeypatch.setattr(ensemble, "MOST_TARGETS", 10)
    monkeypatch.setattr("feddf.outputs.MOST_NUMBERS", 500)
    for key, tensor in weights().items():
        torch.testing.assert_close(tensor, kept[key], atol=1e-5, rtol=1e-4)


def form(outputs: feddf.Outputs) -> dict[str, Any]:
    return {key: value for key, value in outputs.describe().items() if key != "channels"}


def with_head(kind: feddf.Outputs, id: str, names: tuple[str, ...]) -> TrainedModel:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, len(names)))
    return of_module(network, id, classes=names, preprocess=ENCODE, form=form(kind))


ORGAN = of_module(segmenter(0), "organ", classes=ORGANS[0], preprocess=ENCODE)
MISTAKES = {
    "another kind": ([ORGAN, with_head(labels(2), "l", ("a", "b"))], {}, "outputs are 'labels', and those of organ"),
    "another size": (
        [ORGAN, of_module(segmenter(1, side=4), "s", classes=ORGANS[1], preprocess=Images((1, 4, 4), (0.4,), (0.3,)))],
        {}, "those of organ are 'classes' at 8×8 positions; one kind is needed, at the same positions; say the size",
    ),
    "no common class": (
        [of_module(segmenter(k), f"t{k}", classes=tuple(one), preprocess=ENCODE) for k, one in enumerate(("ab", "cd"))],
        {}, "no other teacher knows one of its classes a, b",
    ),
    "no background": (
        [ORGAN, of_module(segmenter(1), "b", classes=("liver", "spleen"), preprocess=ENCODE)],
        {}, "'background', the background of others, is none of its classes liver, spleen",
    ),
    "temperature": ([with_head(values(2), "v", ("a", "b"))], {"distill": QUICK.model_copy(update={"temperature": 2.0})},
                    "distill.temperature = 2.0"),
    "certainty": ([with_head(labels(2), "l", ("a", "b"))], {"ensemble": FuseEnsembleConfig(weights="certainty")},
                  "ensemble.weights = 'certainty'"),
    "robust": (hospitals(), {"ensemble": FuseEnsembleConfig(combine="geometric-median")}, "teachers know different"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_is_one_line_before_anything_is_computed(name: str, tmp_path: Path) -> None:
    teachers, said, expected = MISTAKES[name]
    model = "unet" if name != "temperature" and name != "certainty" else "linear"
    with pytest.raises(FeddfError) as caught:
        feddf.fuse(teachers, StudentSpec(model, ENCODE), RawInputs(POOL), cache=tmp_path, **{"distill": QUICK, **said})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_labels_of_another_kind_are_one_line(tmp_path: Path) -> None:
    given = feddf.Examples(feddf.Inputs(POOL, ENCODE), torch.zeros(20, dtype=torch.int64), classes(4))
    with pytest.raises(ConfigError, match="its labels are 'classes', and the teachers answer with 'classes' at 8×8"):
        feddf.fuse(hospitals(), UNET, RawInputs(POOL), test=given, distill=QUICK, cache=tmp_path)


@pytest.mark.parametrize(("shape", "count"), [((5, 2, 4, 4), 2), ((5, 8, 8, 2), 0), ((5, 4, 4, 2), 2)])
def test_smaller_masks_and_channels_at_the_end(shape: tuple[int, ...], count: int) -> None:
    assert in_order(torch.rand(shape), (8, 8), count).shape == (5, 2, 8, 8)
    assert in_order(torch.rand(5, 7, 3), (7,), 0).shape == (5, 3, 7)
    assert in_order(torch.rand(5, 3), (7,), 0).shape == (5, 3)


# Labels, values: figures against others


def test_scores_calibration_and_standardized_values(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 3, generator=generator)
    prices = 500 + 40 * rows[:, :1]
    exact = nn.Linear(3, 1)
    with torch.no_grad():
        exact.weight.copy_(torch.tensor([[40.0, 0.0, 0.0]]))
        exact.bias.fill_(500.0)
    said = {"classes": ("rent",), "form": form(values(1))}
    test = feddf.Examples(feddf.Inputs(rows, plain), prices, values(1))
    distill = DistillConfig(steps=150, batch_size=20, lr=0.05, early_stopping="none")
    student = StudentSpec("linear", Features((3,)))
    found = feddf.fuse(
        [of_module(exact, "e", **said)], student, RawInputs(rows), test=test, distill=distill, cache=tmp_path
    )
    figures = found.report.sets["test"]
    assert figures["e"].accuracy == pytest.approx(1.0)
    assert figures["student"].accuracy > 0.95  # in units: the student learned them standardized
    assert figures["student"].ece is None
    assert figures["student"].measures["MAE"] < 10
    assert found.report.agreement[0][1] == pytest.approx(1.0, abs=1e-6)
    binary = feddf.Examples(
        feddf.Inputs(rows, plain), torch.cat([rows[:, :1] > 0, rows[:, 1:2] > 0], 1).float(), labels(2)
    )
    head = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[30.0, 0.0, 0.0], [0.0, 30.0, 0.0]]))
    teacher = of_module(head, "t", classes=("one", "two"), form=form(labels(2)))
    sets = feddf.fuse([teacher], student, RawInputs(rows), test=binary, distill=distill, cache=tmp_path).report.sets
    assert sets["test"]["t"].accuracy == 1.0
    assert sets["test"]["t"].ece is not None
    assert sets["test"]["t"].ece < 0.05
    assert sets["test"]["student"].accuracy > 0.9


# Folders of transformers


def tiny(task: str, folder: Path, **more: Any) -> Any:
    library = transformers()
    text_classifier(folder)  # for its tokenizer
    torch.manual_seed(0)
    names = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    if task == "SegformerForSemanticSegmentation":
        config = library.SegformerConfig(
            num_channels=3, depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8,
            image_size=32, **names,
        )  # fmt: skip
        for file in folder.glob("*token*"):
            file.unlink()
    elif task == "GPT2LMHeadModel":
        config = library.GPT2Config(vocab_size=6, n_embd=8, n_layer=1, n_head=2, n_positions=32)
    else:
        config = library.DistilBertConfig(
            vocab_size=6, dim=8, hidden_dim=8, n_layers=1, n_heads=2, max_position_embeddings=32, pad_token_id=0,
            **({} if task.endswith("MaskedLM") else names), **more,
        )  # fmt: skip
    model = getattr(library, task)(config).eval()
    model.save_pretrained(folder)
    return model


TASKS: dict[str, tuple[str, dict[str, Any], str, tuple[int, ...]]] = {
    "tokens": ("DistilBertForTokenClassification", {}, "classes", (32,)),
    "masked": ("DistilBertForMaskedLM", {}, "classes", (32,)),
    "causal": ("GPT2LMHeadModel", {}, "classes", (32,)),
    "labels": ("DistilBertForSequenceClassification", {"problem_type": "multi_label_classification"}, "labels", ()),
    "values": ("DistilBertForSequenceClassification", {"problem_type": "regression"}, "values", ()),
    "masks": ("SegformerForSemanticSegmentation", {}, "classes", (32, 32)),
}


@pytest.mark.parametrize("name", TASKS)
def test_folders_of_transformers(name: str, tmp_path: Path) -> None:
    task, more, kind, positions = TASKS[name]
    model = tiny(task, tmp_path / "hf", **more)
    (teacher,) = read_teacher(TeacherConfig(path=str(tmp_path / "hf")))
    rows: Any = ("good film", "very bad", "good") if name != "masks" else torch.randint(0, 256, (3, 3, 32, 32)).byte()
    raw = RawInputs(rows)
    cache = PredictionCache(tmp_path, tmp_path, {"pool": raw}, None)
    meaning = cache.meaning(teacher)
    assert (meaning.kind, meaning.positions) == (kind, positions)
    found = cache.logits(teacher)
    inputs = raw.inputs(teacher.preprocess).batch(torch.arange(3))
    with torch.no_grad():
        if name == "masks":
            wanted = nn.functional.interpolate(model(pixel_values=inputs).logits, size=(32, 32), mode="bilinear")
        else:
            there = (inputs != 0).long()
            wanted = model(input_ids=inputs, attention_mask=there).logits
            wanted = wanted if wanted.ndim == 2 else wanted.movedim(2, 1) * there[:, None]
    torch.testing.assert_close(meaning.probabilities(found), meaning.probabilities(wanted), atol=2e-3, rtol=2e-3)
    if name in ("masked", "causal"):
        assert teacher.classes[:3] == ("[PAD]", "[UNK]", "good")


# What is written


def folder_of(place: Path, spec: ModelSpec, model: nn.Module) -> str:
    place.mkdir()
    save_file(model.state_dict(), place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({"feddf": spec.describe()}))
    return str(place)


def test_masks_are_written_as_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line: three folders with different class lists, then a picture's mask, pixel by pixel."""
    places, pool = [], tmp_path / "pool"
    pool.mkdir()
    for number, row in enumerate(POOL):
        Image.fromarray(row[0].numpy()).save(pool / f"{number}.png")
    for k, names in enumerate(ORGANS):
        outputs = classes(2, (8, 8), background=names.index("background"))
        spec = ModelSpec("unet", (1, 8, 8), names, ENCODE, {"width": 4, "depth": 1}, form=outputs.form)
        places += ["--teacher", folder_of(tmp_path / f"h{k}", spec, segmenter(k))]
    out, rest = str(tmp_path / "out"), ["distill.steps=2", "distill.batch_size=8", f"cache={tmp_path / 'cache'}"]
    student = '{model = "unet", options = {width = 4, depth = 1}}'
    assert main(["fuse", *places, "--student", student, "--unlabeled", str(pool), "--out", out, *rest]) == 0
    assert (tmp_path / "out" / "masks.png").is_file()
    assert "![masks](masks.png)" in (tmp_path / "out" / "README.md").read_text()
    assert main(["predict", out, str(pool / "3.png"), "--out", str(tmp_path / "said")]) == 0
    model = feddf.load_model(out)
    expected = model(model.preprocess(POOL[3:4])).argmax(dim=1)[0]  # type: ignore[misc]
    with Image.open(tmp_path / "said" / "3.png") as picture:
        assert np.array_equal(np.array(picture), expected.numpy())
    with (tmp_path / "said" / "masks.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["liver"]) == pytest.approx(
        float(model(model.preprocess(POOL[3:4])).softmax(1)[0, 1].mean()), abs=1e-5
    )  # type: ignore[misc]
    assert main(["fuse", "--check", *places, "--student", student, "--unlabeled", str(pool)]) == 0
    assert "2 logits of classes at 8×8 positions" in capsys.readouterr().out


STUDENTS: dict[str, tuple[str, feddf.Outputs, Tensor, dict[str, Any]]] = {
    "masks": ("unet", classes(3, (8, 8), background=0), torch.randn(4, 1, 8, 8), {"width": 4, "depth": 1}),
    "tokens, attention": ("gpt", classes(6, (5,)), torch.randint(0, 6, (4, 5)), {"width": 8, "heads": 2}),
    "tokens, recurrent": ("gru", classes(6, (5,)), torch.randint(0, 6, (4, 5)), {"width": 8}),
    "labels": ("cnn", labels(3), torch.randn(4, 1, 8, 8), {"width": 4}),
    "values": ("mlp", values(2), torch.randn(4, 3), {"width": 8}),
    "variances": ("linear", values(2, variance=True), torch.randn(4, 3), {}),
}


@pytest.mark.parametrize(("model", "outputs", "inputs", "options"), STUDENTS.values(), ids=STUDENTS)
def test_a_student_of_every_kind_is_written_as_onnx(
    model: str, outputs: feddf.Outputs, inputs: Tensor, options: dict[str, Any], tmp_path: Path
) -> None:
    """In the labels' units too: the center and scale of values are part of the file."""
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    network = build_network(MODELS[model], tuple(inputs.shape[1:]), outputs, options)
    if outputs.has_units:
        network.standardize(torch.tensor([[100.0, 3.0], [300.0, 5.0]]))
    assert write_onnx(network, inputs, tmp_path / "m.onnx") < 1e-3
    session = onnx_files.open_session(tmp_path / "m.onnx")
    (found,) = session.run(None, {"inputs": inputs[:3].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), network.eval()(inputs[:3]), atol=1e-2, rtol=1e-3)


def test_tokens_labels_and_values_are_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.txt").write_text("ab~\n")
    (tmp_path / "rows.csv").write_text("p,q\n1,2\n")
    names = tuple(f"class {number}" for number in range(len(CHARACTERS)))
    said: dict[str, list[dict[str, str]]] = {}
    for name, outputs, model, fed, given in (
        ("tokens", classes(len(names), (4,)), "gpt", Tokens("characters", 4), "texts.txt"),
        ("labels", labels(3), "linear", Features((2,)), "rows.csv"),
        ("values", values(3), "linear", Features((2,)), "rows.csv"),
    ):
        known = names if name == "tokens" else ("x", "y", "z")
        spec = ModelSpec(model, fed.shape, known, fed, {}, form=outputs.form)
        torch.manual_seed(0)
        place = folder_of(tmp_path / name, spec, spec.prototype.build())
        assert main(["predict", place, str(tmp_path / given)]) == 0
        said[name] = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["token"] for row in said["tokens"]] == ["a", "b", "?"]  # a character that it does not know
    loaded = feddf.load_model(tmp_path / "tokens")
    expected = loaded(characters(["ab~"], 4).long()).argmax(dim=1)[0, :3]
    assert [row["class"] for row in said["tokens"]] == [names[number] for number in expected]
    assert list(said["values"][0]) == ["input", "x", "y", "z"]
    assert list(said["labels"][0]) == ["input", "class", "x", "y", "z"]
    assert said["labels"][0]["class"] == ", ".join(name for name in "xyz" if float(said["labels"][0][name]) > 0.5)
