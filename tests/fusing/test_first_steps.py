"""What a newcomer meets first: folders and tables as they are, typing mistakes, long names, and other makers' files."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_teachers import CLASSES, as_folder, models, spec_of
from test_cli_fuse import run

from conftest import stripes
from feddf import outputs
from feddf.config.names import MODELS
from feddf.fusing.card import kept_start
from feddf.fusing.report import Report
from feddf.models.small import build_network
from feddf.saved.model import Features, ModelSpec

QUICK = ["steps=2", "batch_size=8", "run.threads=1", "--cache", "cache"]
LONG = "a-hospital-with-a-name-that-is-far-longer-than-a-column-of-a-table"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a teacher, and labeled images in a folder for each class."""
    as_folder(models()["all"], spec_of(), tmp_path / "all")
    examples = stripes(30, 3)
    for number, (image, label) in enumerate(zip(examples.inputs.raw[torch.arange(30)], examples.labels, strict=True)):
        path = tmp_path / "labeled" / CLASSES[int(label)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    return tmp_path


def test_a_folder_of_labeled_images_is_named_by_its_path_and_used_whole(place: Path) -> None:
    code, out, err = run("inspect", "all", "--labeled", "labeled", cwd=place)
    assert code == 0, err
    assert "of 30 examples right" in out
    words = ["--student", "cnn", "--unlabeled", "labeled", "--test", "labeled", "--out", "out", *QUICK]
    assert run("fuse", "--teacher", "all", *words, cwd=place)[0] == 0
    assert json.loads((place / "out" / "report.json").read_text())["sizes"] == {"test": 30}


def test_a_source_with_a_typing_mistake_names_the_option(place: Path) -> None:
    words = ["fuse", "--teacher", "all", "--student", "cnn", "--out", "out", "--unlabeled"]
    assert "error: --unlabeled = 'digitz': did you mean 'digits'?" in run(*words, "digitz", cwd=place)[2]
    assert run(*words, "?", cwd=place)[2].count("table:PATH") == 1


def test_names_are_not_cut_and_who_was_evaluated_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    teacher = f"{{path = 'all', name = '{LONG[:64]}'}}"
    words = ["--student", "cnn", "--unlabeled", "labeled", "--test", "labeled", "--out", "out", *QUICK]
    code, out, err = run("fuse", "--teacher", teacher, *words, cwd=place)
    assert code == 0, err
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert LONG[:64] in "".join(rows)
    assert "…" not in out
    assert "teachers evaluated: 1; with cached predictions or tables: 0\n" in out


def test_a_student_that_kept_its_start_is_said_to() -> None:
    report = Report((), CLASSES, {}, 7, (), (), {}, notes={"distillation": {"student": {"best_step": 0}}})
    assert kept_start(report).startswith("The student is what it started as")
    report.notes["distillation"]["student"]["best_step"] = 3
    assert kept_start(report) == ""


def test_a_folder_that_is_no_model_names_those_inside(place: Path) -> None:
    (place / "some.onnx").write_bytes(b"")
    _, _, err = run("inspect", ".", cwd=place)
    assert "it is not known what it holds; name what is inside: all, some.onnx" in err
    assert err.count("\n") == 1


def test_values_are_predicted_under_their_names(tmp_path: Path) -> None:
    form = outputs.values(2)
    spec = ModelSpec("linear", (3,), ("price", "area"), Features((3,), columns=("a", "b", "c")), form=form.describe())
    as_folder(build_network(MODELS["linear"], (3,), form, {}), spec, tmp_path / "model")
    (tmp_path / "rows.csv").write_text("a,b,c\n1,2,3\n4,5,6\n")
    code, out, err = run("predict", "model", "rows.csv", cwd=tmp_path)
    assert code == 0, err
    assert out.splitlines()[0] == "input,price,area"
    (first, _) = csv.DictReader(StringIO(out))
    (found, _) = json.loads(run("predict", "model", "rows.csv", "--json", cwd=tmp_path)[1])
    assert found.keys() == {"input", "price", "area"}
    assert float(first["price"]) == pytest.approx(found["price"])


@pytest.mark.parametrize("zipmap", [True, False])
def test_a_model_of_scikit_learn_learned_on_a_table_teaches_on_a_parquet_file(zipmap: bool, tmp_path: Path) -> None:
    """With the real packages: skl2onnx's file, and pyarrow's."""
    skl2onnx = pytest.importorskip("skl2onnx")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    linear_model = pytest.importorskip("sklearn.linear_model")
    random = np.random.default_rng(0)
    rows = random.normal(size=(200, 3)).astype(np.float32)
    labels = np.where(rows[:, 0] > 0, "yes", "no")
    model = linear_model.LogisticRegression().fit(rows, labels)
    options = None if zipmap else {id(model): {"zipmap": False}}
    (tmp_path / "m.onnx").write_bytes(skl2onnx.to_onnx(model, rows[:1], options=options).SerializeToString())
    columns = {name: rows[:, number] for number, name in enumerate("abc")}
    parquet.write_table(arrow.table(columns), tmp_path / "pool.parquet")
    parquet.write_table(arrow.table({**columns, "label": labels}), tmp_path / "test.parquet")
    words = ["--student", "mlp", "--unlabeled", "pool.parquet", "--test", "test.parquet", "--out", "out", *QUICK]
    code, _, err = run("fuse", "--teacher", "m.onnx", *words, cwd=tmp_path)
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(report["classes"]) == {"yes", "no"}
    assert report["teachers"][0]["outputs"] == "probabilities"
    assert report["sets"]["test"]["m"]["accuracy"] == pytest.approx(model.score(rows, labels))
