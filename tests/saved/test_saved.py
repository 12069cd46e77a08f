"""A model that feddf wrote can be used without the experiment that made it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import feddf
from conftest import SHAPE, stripes
from feddf.config import DataConfig, parse
from feddf.config.keys import nested
from feddf.data.datasets import Dataset
from feddf.evaluate import accuracy
from feddf.models.small import CNN
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.saved.model import Features, Images, ModelError, ModelSpec, Tokens, described, from_description
from feddf.saved.model_folder import _with_sorted_metadata, load_model, new_folder, write_model

CLASSES = ("top", "middle", "bottom")


def bands(data: DataConfig) -> Dataset:
    return Dataset("bands", stripes(120, 11), stripes(90, 12), classes=CLASSES)


def run(folder: Path, **values: object) -> list[feddf.Record]:
    given = {
        "data.name": f"{__name__}:bands", "prototypes": ["mlp", {"model": "cnn", "width": 4}], "clients.total": 4,
        "clients.fraction": 1.0, "rounds": 1, "local.epochs": 2, "local.lr": 0.05, "pool.sources": ["noise"],
        "pool.size": 32, "distill.steps": 2, "run.engine": "in-process", **values,
    }  # fmt: skip
    experiment = parse(nested({}, given))
    return list(run_experiment(build(experiment), RunFolder.create(folder, experiment)))


def test_a_runs_models_are_loaded_with_classes_and_preprocessing(tmp_path: Path) -> None:
    records = run(tmp_path / "run", description="bands of light")
    for name in ("mlp", "cnn"):
        model = load_model(tmp_path / "run", name)
        assert model.classes == CLASSES
        assert accuracy(model, stripes(90, 12)) == pytest.approx(records[-1]["models"][name]["fused"])
    with pytest.raises(ModelError, match=r"holds several models; name one as its prototype: mlp, cnn"):
        load_model(tmp_path / "run")
    with pytest.raises(ModelError, match="has no prototype 'resnet8'; it has mlp, cnn"):
        load_model(tmp_path / "run", "resnet8")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "bands of light" in card
    assert "| cnn | `cnn` |" in card


def test_matched_layers_that_have_grown_are_loaded(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    run(tmp_path / "run", **{"prototypes": ["mlp"], "fusion.method": "fedma", "rounds": 2})
    model = load_model(tmp_path / "run")
    (prediction,) = model.predict(stripes(1, 3).inputs.raw[torch.tensor([0])])
    assert prediction.label in CLASSES


def saved(folder: Path) -> tuple[CNN, Path]:
    torch.manual_seed(0)
    model = CNN(SHAPE, 3, width=4).eval()
    spec = ModelSpec("cnn", SHAPE, CLASSES, Images((1, 8, 8), (0.4,), (0.3,)), {"width": 4})
    with new_folder(folder) as place:
        write_model(place, model, spec, {"configuration_sha256": "0" * 64})
    return model, folder


def test_what_is_written_is_what_is_loaded(tmp_path: Path) -> None:
    model, folder = saved(tmp_path / "model")
    inputs = stripes(6, 1).inputs
    found = load_model(folder)
    batch = inputs.batch(torch.arange(6))
    with torch.no_grad():
        assert torch.equal(found(found.preprocess(inputs.raw[torch.arange(6)])), model(batch))
        probabilities = model(batch).softmax(dim=1)
    predictions = found.predict(inputs.raw[torch.arange(6)])
    for row, prediction in zip(probabilities, predictions, strict=True):
        assert list(prediction.probabilities.values()) == pytest.approx(row.tolist(), abs=1e-5)
        assert prediction.label == CLASSES[int(row.argmax())]


def test_the_same_model_gives_the_same_bytes_whatever_the_order_of_its_metadata(tmp_path: Path) -> None:
    """safetensors writes several entries, as transformers need them, in an order that differs from call to call."""
    tensors = {"weight": torch.arange(4.0), "bias": torch.zeros(2)}
    metadata = {"format": "pt", "feddf": '{"a": "ä"}'}
    found = {_with_sorted_metadata(safetensors.torch.save(tensors, metadata)) for _ in range(20)}
    assert len(found) == 1
    (tmp_path / "m.safetensors").write_bytes(found.pop())
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == metadata
        assert torch.equal(file.get_tensor("weight"), tensors["weight"])


def test_files_and_arrays_are_read_alike(tmp_path: Path) -> None:
    _, folder = saved(tmp_path / "model")
    array = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(array).save(tmp_path / "picture.png")
    one, other = load_model(folder).predict([tmp_path / "picture.png", array])
    assert one.probabilities == pytest.approx(other.probabilities, abs=0.02)


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "model") as place:
            (place / "half").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value", [Images((3, 4, 4), (0.1, 0.2, 0.3), (1.0, 2.0, 3.0), "BGR"), Tokens("somewhere", 12), Features((2,))]
)
def test_a_preprocessing_survives_json(value: Images | Tokens | Features) -> None:
    assert from_description(json.loads(json.dumps(described(value)))) == value


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    _, folder = saved(tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())

    def refused(changes: dict[str, object]) -> str:
        (folder / "config.json").write_text(json.dumps({"feddf": {**values["feddf"], **changes}}))
        with pytest.raises(feddf.config.errors.FeddfError) as caught:  # type: ignore[attr-defined]
            load_model(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "does not fit the model 'cnn'" in refused({"options": {"width": 5}})
    assert "has the format 9, and this version reads 1 to 2" in refused({"format": 9})
    assert "does not describe a model" in refused({"classes": None})
    assert "does not describe a model" in refused({"preprocessing": "sound"})
    assert "does not describe a model" in refused({"preprocessing": {"kind": "images"}})
    assert "a preprocessing is one of images, tokens, features, not 'sound'" in refused(
        {"preprocessing": {"kind": "sound"}}
    )
    (folder / "config.json").write_text(json.dumps(values))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-5])
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no weights of 'cnn' yet: it has no model.safetensors"):
        load_model(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"it has no config.json of feddf"):
        load_model(tmp_path / "empty")


class Own(CNN):
    """An architecture of a user's own."""


def test_code_that_somebody_elses_model_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a description names would be called with what it says: a program with its arguments, for instance."""
    canary = tmp_path / "canary"
    spec = ModelSpec("subprocess:call", ("touch", str(canary)), ("a",), None)  # type: ignore[arg-type]
    described = {name: value for name, value in spec.describe().items() if name != "origin"}
    for mark in ({}, {"origin": 17}, {"origin": "0" * 64}, {"origin": "é"}):
        folder = tmp_path / "foreign"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"feddf": {**described, **mark}}))
        (folder / "model.safetensors").write_bytes(safetensors.torch.save({"x": torch.zeros(1)}))
        with pytest.raises(ModelError, match="was made elsewhere and has code run: 'subprocess:call'"):
            load_model(folder)
    assert not canary.exists()
    own = tmp_path / "own"
    own.mkdir()
    write_model(own, Own(SHAPE, 2), ModelSpec(f"{__name__}:Own", SHAPE, ("a", "b"), Images(SHAPE, (0.5,), (0.5,))), {})
    load_model(own)  # nothing needs to be said for one's own
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody-else"))
    with pytest.raises(ModelError, match="trust=True"):
        load_model(own)
    load_model(own, trust=True)
