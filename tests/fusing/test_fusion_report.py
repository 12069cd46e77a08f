"""The figures of a report, what is remembered of answers, and ONNX files that must be the student."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_teachers import CLASSES, ENCODE, spec_of
from torch import Tensor, nn

from feddf.config.errors import FeddfError
from feddf.fusing import folder
from feddf.fusing.card import card
from feddf.fusing.inputs import RawInputs
from feddf.fusing.predictions import PredictionCache, default_cache
from feddf.fusing.report import Report, figures, outliers
from feddf.fusing.teachers import TeacherError, of_module


def test_the_calibration_error_in_closed_form() -> None:
    """Ten answers of confidence 0.9 of which six are right, and ten of 0.6 that all are."""
    probabilities = torch.tensor([[0.9, 0.1]] * 10 + [[0.6, 0.4]] * 10)
    labels = torch.tensor([0] * 6 + [1] * 4 + [0] * 10)
    found = figures(probabilities, labels, torch.tensor([1.0, 0.0]))
    assert found.accuracy == pytest.approx(16 / 20)
    assert found.ece == pytest.approx(0.5 * 0.3 + 0.5 * 0.4)
    assert found.own_accuracy == 1.0
    assert sum(one.count for one in found.bins) == 20


def test_three_teachers_are_too_few_for_an_outlier() -> None:
    assert outliers({"a": 0.9, "b": 0.9, "c": 0.1}) == {}
    assert list(outliers({"a": 0.9, "b": 0.9, "c": 0.1, "d": 0.9})) == ["c"]


def test_a_card_of_a_hundred_teachers_stays_readable_and_a_name_breaks_no_table() -> None:
    names = [f"a|b-{number}" for number in range(100)]
    said = {"source": "x", "model": "", "sha256": None, "license": "", "fed": "", "outputs": "logits"}
    about = tuple({"name": name, **said} for name in names)
    row = (1.0,) * 102
    report = Report(about, CLASSES, {}, 7, (*names, "ensemble", "student"), (row,) * 102, {})
    text = card("many", report, "", spec_of())
    assert "Who agrees with whom" not in text
    assert "| a\\|b-7 | x |" in text


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs.flatten(1)[:, :3]


def test_answers_are_remembered_for_these_inputs_fed_in_this_way(tmp_path: Path) -> None:
    module = Counting()
    teacher = replace(of_module(module, "one"), content="the same file")
    raw = RawInputs(torch.arange(0, 2 * 64, dtype=torch.uint8).view(2, 1, 8, 8))

    def calls(raw: RawInputs, fed: object = ENCODE, **changes: object) -> int:
        module.calls = 0
        cache = PredictionCache(tmp_path / "cache", tmp_path, {"pool": raw}, fed)  # type: ignore[arg-type]
        answers = cache.logits(replace(teacher, **changes))  # type: ignore[arg-type]
        assert answers.shape == (2, 3)
        return module.calls

    assert calls(raw) == 1
    assert calls(raw) == 0
    assert calls(raw, replace(ENCODE, mean=(0.5,))) == 1  # fed otherwise
    assert calls(RawInputs(raw.rows.flip(0))) == 1  # type: ignore[union-attr]  # other inputs
    assert calls(raw, content="another file") == 1
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-4])  # cut off: asked again
    assert calls(raw) == 1


def test_outputs_that_are_no_probabilities_are_refused(tmp_path: Path) -> None:
    teacher = replace(of_module(Counting(), "one"), outputs="probabilities")
    raw = RawInputs(torch.full((2, 1, 8, 8), 255, dtype=torch.uint8))
    with pytest.raises(TeacherError, match="its outputs are not probabilities; say outputs = 'logits'"):
        PredictionCache(tmp_path, tmp_path, {"pool": raw}, ENCODE).logits(teacher)


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "feddf" / "answers"


def test_an_onnx_file_that_differs_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = SimpleNamespace(run=lambda _, given: [np.ones((len(given["inputs"]), 3), np.float32)])
    monkeypatch.setattr(folder, "open_session", lambda path: other)
    path = tmp_path / "model.onnx"
    with pytest.raises(FeddfError, match="the ONNX file gives other logits than the student"):
        folder.write_onnx(nn.Linear(4, 3), torch.randn(5, 4), path)
    assert not path.exists()
