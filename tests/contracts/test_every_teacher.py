"""Every format of teachers with every kind of output: answers are the model's own, and a student learns of them."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_every_output import KINDS, Kind
from torch import nn

import feddf
from feddf.config import DistillConfig
from feddf.config.errors import FeddfError
from feddf.config.fuse_config import TeacherConfig
from feddf.config.names import MODELS, TEACHER_FORMATS
from feddf.evaluate import logits
from feddf.fusing.answer_files import Coding, write_answers
from feddf.fusing.fuse import StudentSpec
from feddf.fusing.inputs import RawInputs
from feddf.fusing.predictions import PredictionCache
from feddf.fusing.teachers import TrainedModel, of_module, read_teacher
from feddf.models.small import Standardized, build_network
from feddf.outputs import Outputs
from feddf.saved.model import Images, ModelSpec, Preprocess, Tokens

FORMATS = ("feddf", "safetensors", "onnx", "pt2", "answers", "table")
"""Those that a file of every kind can be made in here; transformers' are below."""
QUICK = DistillConfig(steps=2, batch_size=8, early_stopping="held-out-loss", eval_every=1)


@cache
def model_of(name: str, number: int = 0) -> nn.Module:
    """Return a model of a kind, with weights that are none of a new one's."""
    kind = KINDS[name]
    architecture, options = list(kind.models.items())[number % 2]
    torch.manual_seed(number)
    model = build_network(MODELS[architecture], shape_of(kind), kind.outputs, options)
    if isinstance(model, Standardized):
        model.center.fill_(300.0)
        model.scale.fill_(50.0)
    return model.eval()


def shape_of(kind: Kind) -> tuple[int, ...]:
    return tuple(kind.make(1, 0)[0].batch(torch.arange(1)).shape[1:])


def names_of(outputs: Outputs) -> tuple[str, ...]:
    return ("background", "one", "two", "three", "four")[: outputs.channels]


def fed(kind: Kind) -> Preprocess:
    return Images((1, 8, 8), (0.4,), (0.3,)) if "gpt" not in kind.models else Tokens("characters", 8)


def spec_of(name: str) -> ModelSpec:
    kind = KINDS[name]
    architecture, options = next(iter(kind.models.items()))
    return ModelSpec(architecture, shape_of(kind), names_of(kind.outputs), fed(kind), options, form=kind.outputs.form)


def pool_of(kind: Kind, n: int = 12) -> RawInputs:
    if "gpt" in kind.models:  # characters of which the model knows the first few
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, 3, (n, 8), generator=generator)
        return RawInputs(tuple("".join("~ a"[one] for one in row) for row in rows.tolist()))
    return RawInputs(kind.make(n, 3)[0].raw)  # type: ignore[arg-type]


def written(name: str, format: str, place: Path) -> TeacherConfig:
    """Write the model of a kind in a format, and return what a user says of it."""
    model, kind, spec = model_of(name), KINDS[name], spec_of(name)
    example = kind.make(3, 1)[0].batch(torch.arange(3))
    classes = spec.classes
    how = {"size": 8, "channels": 1, "mean": (0.4,), "std": (0.3,)} if isinstance(spec.preprocess, Images) else {}
    how |= {"tokenizer": "characters", "max_tokens": 8} if isinstance(spec.preprocess, Tokens) else {}
    said: dict[str, Any] = {"classes": classes, "kind": kind.outputs.kind, **how}
    if format == "feddf":
        save_file(model.state_dict(), place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({"feddf": spec.describe()}))
        return TeacherConfig(path=str(place))
    if format == "safetensors":
        save_file(model.state_dict(), place / "m.safetensors")
        return TeacherConfig(path=str(place / "m.safetensors"), model=spec.model, options=dict(spec.options), **said)
    if format == "onnx":
        return TeacherConfig(path=str(exported(name, place)), **said)
    if format == "pt2":
        batch = torch.export.Dim("batch", min=2)
        torch.export.save(torch.export.export(model, (example,), dynamic_shapes=({0: batch},)), place / "m.pt2")
        return TeacherConfig(path=str(place / "m.pt2"), **said)
    inputs = pool_of(kind).inputs(spec.preprocess)
    answers = logits(model, inputs)
    if format == "answers":
        about = {"names": classes}
        write_answers(place / "m.answers", [answers], len(inputs), Coding.of(kind.outputs), about)
        return TeacherConfig(path=str(place / "m.answers"))
    with (place / "m.csv").open("w", newline="") as file:
        said_of = kind.outputs.probabilities(answers) if not kind.outputs.has_units else answers
        csv.writer(file).writerows([classes, *said_of.flatten(1)[:, : len(classes)].tolist()])
    return TeacherConfig(path=str(place / "m.csv"), kind=kind.outputs.kind)


@cache
def onnx_bytes(name: str) -> bytes:
    """Return the model of a kind as the file that ``feddf fuse --onnx`` writes: it was compared in onnxruntime."""
    import tempfile

    from feddf.fusing.folder import write_onnx

    with tempfile.TemporaryDirectory() as folder:
        inputs = pool_of(KINDS[name]).inputs(spec_of(name).preprocess)
        most = write_onnx(model_of(name), inputs.batch(torch.arange(len(inputs))), Path(folder) / "m.onnx")
        assert most < 1e-3 * (300 if KINDS[name].outputs.has_units else 1)
        return (Path(folder) / "m.onnx").read_bytes()


def exported(name: str, place: Path) -> Path:
    (place / "m.onnx").write_bytes(onnx_bytes(name))
    return place / "m.onnx"


def test_no_format_is_forgotten() -> None:
    """timm has classes alone, a bundle is an ONNX file or a program, and transformers have tests of their own."""
    assert {*FORMATS, "timm", "monai", "hugging-face"} == set(TEACHER_FORMATS)


@pytest.mark.parametrize("name", [one for one in KINDS if one != "sites"])
@pytest.mark.parametrize("format", FORMATS)
def test_answers_are_the_model_s_own_and_a_student_learns_from_them(format: str, name: str, tmp_path: Path) -> None:
    kind, spec = KINDS[name], spec_of(name)
    (tmp_path / "m").mkdir()
    config = written(name, format, tmp_path / "m")
    pool, student = pool_of(kind), StudentSpec(spec.model, spec.preprocess, spec.options)
    expected = kind.outputs.probabilities(logits(model_of(name), pool.inputs(spec.preprocess)))
    if (name == "variances" and format not in ("feddf", "answers")) or (format == "table" and kind.outputs.positions):
        with pytest.raises(FeddfError) as caught:
            feddf.fuse([*read_teacher(config, trust=True), other(name)], student, pool, distill=QUICK, cache=tmp_path)
        assert "\n" not in str(caught.value)
        return
    (teacher,) = read_teacher(config, trust=True)
    predictions = PredictionCache(tmp_path / "cache", tmp_path, {"pool": pool}, spec.preprocess)
    found = kind.outputs.probabilities(predictions.logits(teacher))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    assert predictions.meaning(teacher).title == kind.outputs.title
    fused = feddf.fuse([teacher, other(name)], student, pool, distill=QUICK, cache=tmp_path / "cache")
    assert fused.report.metric == kind.outputs.metric or name == "tokens"
    assert fused.model(pool.first(3).inputs(spec.preprocess).batch(torch.arange(3))).shape[1:] == kind.outputs.shape
    assert fused.spec is not None
    assert fused.spec.outputs.title == kind.outputs.title


def other(name: str) -> TrainedModel:
    """A second teacher, of another architecture, in memory."""
    kind = KINDS[name]
    form = {key: value for key, value in kind.outputs.describe().items() if key != "channels"}
    said = {"classes": names_of(kind.outputs), "preprocess": fed(kind), "form": form}
    return of_module(model_of(name, 1), "other", **said)
