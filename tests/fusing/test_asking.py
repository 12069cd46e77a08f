"""Sites that hand out no model: the identity of a pool, answers by a command, and tables of any tool as teachers."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import FuseEnsembleConfig, TeacherConfig, load_fuse
from feddf.config.sections import DistillConfig
from feddf.data.datasets import plain
from feddf.fusing.asking import PoolIdentity, ask, pool_identity
from feddf.fusing.folder import fuse_to_folder
from feddf.fusing.fuse import fuse
from feddf.fusing.teachers import TeacherError, read_teacher
from feddf.models.small import MLP
from feddf.outputs import classes
from feddf.saved.model import Images, ModelSpec
from feddf.saved.model_folder import new_folder, write_model
from feddf.states import digest
from feddf.types import Examples, Inputs

Image = pytest.importorskip("PIL.Image")
CLASSES = ("cat", "dog", "frog")
STEPS: Any = {"steps": 10, "eval_every": 5}


def model(folder: Path, seed: int, width: int = 8) -> Path:
    torch.manual_seed(seed)
    spec = ModelSpec("mlp", (1, 4, 4), CLASSES, Images((1, 4, 4), (0.5,), (0.5,)), {"width": width})
    with new_folder(folder) as place:
        write_model(place, MLP((1, 4, 4), 3, width=width), spec, {})
    return folder


def pictures(folder: Path, n: int = 12, seed: int = 0) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    for number in range(n):
        pixels = torch.randint(0, 256, (6, 6, 3), generator=generator, dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    return folder


def config(teachers: Sequence[Path | dict[str, Any]], pool: Path, **more: Any) -> Any:
    given = [one if isinstance(one, dict) else str(one) for one in teachers]
    student = {"model": "mlp", "size": 4, "channels": 1, "mean": (0.5,), "std": (0.5,)}
    values = {"teachers": given, "student": student, "pool": {"sources": [f"images:{pool}"]}, "distill": STEPS}
    return load_fuse(None, {**values, **more})


def student_of(folder: Path) -> str:
    return digest({"student": load_file(folder / "model.safetensors")})


def test_answers_teach_as_the_models_do_up_to_rounding(tmp_path: Path) -> None:
    pool = pictures(tmp_path / "pool")
    models = [model(tmp_path / name, seed) for seed, name in enumerate("ab")]
    for one in models:
        ask(config([one], pool), one.with_suffix(".answers"))
    whole = fuse_to_folder(config(models, pool), tmp_path / "of models")
    tables = fuse_to_folder(config([one.with_suffix(".answers") for one in models], pool), tmp_path / "of answers")
    inputs = torch.randn(50, 1, 4, 4)
    one, other = (result.model.eval()(inputs).softmax(dim=1) for result in (whole, tables))
    torch.testing.assert_close(one, other, atol=5e-3, rtol=0)
    assert tables.classes == CLASSES
    assert set(tables.report.contributions["pool"]) == {"a", "b"}
    mixed = fuse_to_folder(config([models[0], tmp_path / "b.answers"], pool), tmp_path / "of both")
    assert [one["name"] for one in mixed.report.teachers] == ["a", "b"]


def test_a_table_of_any_tool_teaches(tmp_path: Path) -> None:
    """Rows may come in any order, if a column says which input each is about: by number, name or SHA-256."""
    pool = pictures(tmp_path / "pool")
    identity = pool_identity(config([tmp_path], pool))
    assert identity.names[:2] == ("00.png", "01.png")
    answers = torch.softmax(3 * torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), dim=1).tolist()
    names = {"number": map(str, range(12)), "name": identity.names, "hash": identity.hashes}
    found = set()
    for kind, said in {**names, "none": [""] * 12}.items():
        rows = [[*([name] if kind != "none" else []), *row] for name, row in zip(said, answers, strict=True)]
        rows = rows if kind == "none" else rows[::-1]
        header = [*(["input"] if kind != "none" else []), *CLASSES]
        with (tmp_path / f"{kind}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        fuse_to_folder(config([tmp_path / f"{kind}.csv"], pool), tmp_path / kind)
        found.add(student_of(tmp_path / kind))
    assert len(found) == 1


def table(path: Path, rows: Sequence[Sequence[Any]], header: Sequence[str] = CLASSES) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


EVEN = [0.2, 0.3, 0.5]


@pytest.mark.parametrize(
    ("rows", "header", "word"),
    [
        ([[0.2, 0.3, "nan"]] * 12, CLASSES, "has no number in row 1"),
        ([[-0.2, 0.7, 0.5]] * 12, CLASSES, "its outputs are not probabilities"),
        ([[0.2, 0.3, 0.6]] * 12, CLASSES, "its outputs are not probabilities"),
        ([EVEN] * 11, CLASSES, "answers for 11 inputs, and the pool has 12"),
        ([[n % 11, *EVEN] for n in range(12)], ("input", *CLASSES), "two rows for the input '0'"),
        ([[n, *EVEN] for n in range(11)], ("input", *CLASSES), "no row for 1 of 12 inputs, first '11'"),
        ([[n, *EVEN] for n in range(13)], ("input", *CLASSES), "the input '12', which is not in the pool"),
        ([EVEN] * 12, ("cat", "dog", "cat"), "must have different names"),
    ],
)
def test_a_malformed_table_is_refused_in_one_line(
    tmp_path: Path, rows: list[Any], header: Sequence[str], word: str
) -> None:
    path = table(tmp_path / "t.csv", rows, header)
    with pytest.raises((TeacherError, ConfigError), match=word) as caught:
        fuse_to_folder(config([path], pictures(tmp_path / "pool")), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_answers_for_another_pool_or_order_are_refused(tmp_path: Path) -> None:
    one, other = pictures(tmp_path / "pool"), pictures(tmp_path / "other", seed=1)
    a = model(tmp_path / "a", 0)
    ask(config([a], one), tmp_path / "a.answers")
    with pytest.raises(TeacherError, match="its answers are for another pool"):
        fuse_to_folder(config([tmp_path / "a.answers"], other), tmp_path / "out")
    here = pool_identity(config([a], one))
    (tmp_path / "pool.json").write_text(here.describe())
    ask(config([a], one), tmp_path / "b.answers", agreed=tmp_path / "pool.json")
    with pytest.raises(
        ConfigError, match=r"its inputs are others, first at number 0 \('00.png' there, '00.png' here\)"
    ):
        ask(config([a], other), tmp_path / "c.answers", agreed=tmp_path / "pool.json")
    turned = PoolIdentity(here.names[::-1], here.hashes[::-1])
    with pytest.raises(ConfigError, match="the same in another order"):
        turned.check(tmp_path / "pool.json")
    with pytest.raises(ConfigError, match="it has 12 inputs, and this pool 11"):
        PoolIdentity(here.names[1:], here.hashes[1:]).check(tmp_path / "pool.json")
    (tmp_path / "pool.json").write_text('{"format": "feddf pool 1", "inputs": {"a": 3}}')
    with pytest.raises(ConfigError, match="a = 3"):
        here.check(tmp_path / "pool.json")


def test_what_a_table_cannot_do_is_said_before_the_work(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [EVEN] * 12)
    (teacher,) = read_teacher(TeacherConfig(path=str(path)))
    inputs, labels = torch.randn(12, 16), torch.arange(12) % 3
    examples = Examples(Inputs(inputs, plain), labels, classes(3))
    steps = DistillConfig(**STEPS, early_stopping="none")
    fused = fuse([teacher], torch.nn.Linear(16, 3), inputs, test=examples, distill=steps)
    assert set(fused.report.sets["test"]) == {"student"}  # nobody else answered for these inputs
    weighed = FuseEnsembleConfig(weights="validation")
    with pytest.raises(TeacherError, match="has none for validation inputs; it cannot be weighed"):
        fuse([teacher], torch.nn.Linear(16, 3), inputs, validation=examples, ensemble=weighed, distill=steps)


def test_from_the_command_line(tmp_path: Path) -> None:
    pictures(tmp_path / "pool")
    model(tmp_path / "a", 0)

    def feddf(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "feddf", *words], cwd=tmp_path, capture_output=True, text=True)

    first = feddf("pool", "--unlabeled", "pool", "--out", "pool.json")
    assert (first.returncode, first.stderr) == (0, "")
    (tmp_path / "pool" / "zz.png").write_bytes((tmp_path / "pool" / "00.png").read_bytes())
    refused = feddf("ask", "a", "--unlabeled", "pool", "--pool", "pool.json", "--out", "a.answers")
    assert refused.returncode == 2
    assert "it has 12 inputs, and this pool 13" in refused.stderr
    done = feddf("ask", "a", "--unlabeled", "pool", "--out", "a.answers", "--bits", "8", "--json")
    assert "1 of 13 inputs are there twice" in done.stderr
    said = json.loads(done.stdout)
    assert said["inputs"] == 13
    assert 0 < said["lost"] < 0.02
    for number, name in enumerate(CLASSES):
        (tmp_path / "labeled").mkdir(exist_ok=True)
        pictures(tmp_path / "labeled" / name, seed=number)
    words = ["fuse", "--teacher", "a.answers", "--student", "mlp", "--unlabeled", "pool", "--test", "labeled"]
    words += ["--out", "out"]
    fused = feddf(*words, "student.size=4", "distill.steps=4", "distill.eval_every=2", "ensemble.combine=logits")
    assert (fused.returncode, "a: a table of answers" in fused.stdout) == (0, True), fused.stderr
    shown = feddf("contributions", "out", "--json")
    assert json.loads(shown.stdout) == {"pool": {}}  # one teacher alone: there is nothing to leave out
    for words in (["contributions", "pool"], ["ask", "a.answers", "--unlabeled", "pool", "--out", "b.answers"]):
        bad = feddf(*words)
        assert bad.returncode in (1, 2)
        assert len(bad.stderr.strip().splitlines()) == 1, bad.stderr
