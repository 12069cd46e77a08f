"""Texts: classifiers with tokenizers are fused into a transformer that transformers can load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_teachers import text_classifier

from feddf import load_model
from feddf.config.fuse_config import load_fuse
from feddf.fusing.folder import fuse_to_folder
from feddf.runtime.packages import transformers

LINES = ["very good film", "bad film", "good", "very bad", "film film", "very very good", "bad bad", "a film"]


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate(("one", "two")):
        (root / name).mkdir()
        text_classifier(root / name, seed)
    (root / "lines.txt").write_text("\n".join(LINES) + "\n\n")
    values = {
        "teachers": [{"path": str(root / name), "max_tokens": 8} for name in ("one", "two")],
        "student": {
            "model": "transformer", "tokenizer": str(root / "one"), "max_tokens": 8, "options": {"pretrained": False},
        },
        "pool": {"sources": [f"lines:{root / 'lines.txt'}"]},
        "distill": {"steps": 4, "batch_size": 4, "early_stopping": "none"},
        "cache": str(root / "cache"),
        "run": {"threads": 1},
    }  # fmt: skip
    result = fuse_to_folder(load_fuse(None, values), root / "out")
    assert result.classes == ("negative", "positive")
    assert result.report.pool_size == len(LINES)
    return root / "out"


def test_transformers_load_the_same_model(fused: Path) -> None:
    library = transformers()
    network = library.AutoModelForSequenceClassification.from_pretrained(fused).eval()
    assert network.config.id2label == {0: "negative", 1: "positive"}
    rows = library.AutoTokenizer.from_pretrained(fused)(LINES, padding="max_length", max_length=8, return_tensors="pt")
    with torch.no_grad():
        expected = network(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits.softmax(dim=1)
    predictions = load_model(fused).predict(LINES)
    for row, prediction in zip(expected, predictions, strict=True):
        assert list(prediction.probabilities.values()) == pytest.approx(row.tolist(), abs=1e-5)


def test_a_fused_transformer_moves_and_teaches(fused: Path, tmp_path: Path) -> None:
    """Its folder names no other folder, and is a teacher itself."""
    moved = fused.rename(tmp_path / "moved")
    (prediction,) = load_model(moved).predict(["good"])
    from feddf.config.fuse_config import TeacherConfig
    from feddf.fusing.inputs import RawInputs
    from feddf.fusing.predictions import open_teacher
    from feddf.fusing.teachers import read_teacher

    (teacher,) = read_teacher(TeacherConfig(path=str(moved)))
    with open_teacher(teacher, teacher.preprocess) as predict:
        answers = next(predict(RawInputs(("good", "bad")))).softmax(dim=1)
    moved.rename(fused)
    assert list(prediction.probabilities.values()) == pytest.approx(answers[0].tolist(), abs=1e-5)
