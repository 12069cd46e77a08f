"""Sites that hand out no model: the identity of a pool, answers by a command, and tables of any tool as teachers."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from feddf import cli
from feddf.config.errors import ConfigError
from feddf.config.fuse_config import FuseEnsembleConfig, TeacherConfig, load_fuse
from feddf.config.sections import DistillConfig
from feddf.data import files
from feddf.data.datasets import plain
from feddf.data.files import read_image
from feddf.fusing import inputs, predictions
from feddf.fusing.asking import PoolIdentity, ask, pool_identity
from feddf.fusing.folder import check, fuse_to_folder, plan
from feddf.fusing.fuse import fuse
from feddf.fusing.predictions import open_teacher
from feddf.fusing.teachers import TeacherError, TrainedModel, read_teacher
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


def config(teachers: Sequence[Path | dict[str, Any]], pool: Path, /, **more: Any) -> Any:
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
        ([EVEN] * 11, CLASSES, "no row for 1 of 12 inputs, first '11'"),
        ([[n % 11, *EVEN] for n in range(12)], ("input", *CLASSES), "two rows for the input '0'"),
        ([[n, *EVEN] for n in range(11)], ("input", *CLASSES), "no row for 1 of 12 inputs, first '11'"),
        ([[n, *EVEN] for n in range(13)], ("input", *CLASSES), "the input '12', which is not in the pool"),
        ([EVEN] * 12, ("cat", "dog", "cat"), "must have different names"),
        (
            [[n, *EVEN] for n in range(12)],
            ("", *CLASSES),
            "and are one without a name .an index of pandas.*, cat, dog",
        ),
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was opened: teachers by name, and image files, whose decoding takes long."""
    seen = list[str]()

    def opening(teacher: TrainedModel, *given: Any) -> Any:
        seen.append(teacher.id)
        return open_teacher(teacher, *given)

    def reading(path: Path, size: int | None) -> Any:
        seen.append(path.name)
        return read_image(path, size)

    monkeypatch.setattr(predictions, "open_teacher", opening)
    monkeypatch.setattr(files, "read_image", reading)
    monkeypatch.setattr(inputs, "read_image", reading)
    return seen


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (
            {"ensemble": {"weights": "validation"}},
            r"ensemble.weights = 'validation': teacher {} is a table.*; leave it at 'uniform'",
        ),
        (
            {"ensemble": {"drop_worst": "paper"}},
            r"ensemble.drop_worst = 'paper': teacher {} is a table.*; leave it at 'none'",
        ),
        ({"pool.views": 2}, r"pool.views = 2: teacher {} is a table.*; leave it at 1"),
        ({"other": "pool"}, "teacher {}: .*(another pool|no row for 12 of 12 inputs)"),
        ({"other": "length"}, "teacher {}: .*(another pool|which is not in the pool)"),
        (
            {"other": "lie"},
            "teacher {}: it has (answers for 12 inputs, and the pool has 11|a row for the input '11', which)",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".answers", ".csv", ".parquet"])
def test_what_a_table_cannot_do_is_said_before_any_teacher_is_asked(
    tmp_path: Path, asked: list[str], suffix: str, changes: dict[str, Any], word: str
) -> None:
    pool, model_of_a_site = pictures(tmp_path / "pool"), model(tmp_path / "a", 0)
    path, other = tmp_path / f"t{suffix}", changes.get("other")
    identity = pool_identity(config([tmp_path], pool))
    if suffix == ".answers":
        ask(config([model(tmp_path / "b", 1)], pool), path)
        if other == "lie":  # the pool's fingerprint in a file with answers for more inputs
            (pool / "11.png").unlink()
            forge_fingerprint(path, pool_identity(config([tmp_path], pool)).fingerprint)
    else:
        column = [] if other == "lie" else ["input"]
        table(tmp_path / "t.csv", [[*[sha] * len(column), *EVEN] for sha in identity.hashes], (*column, *CLASSES))
        if suffix == ".parquet":
            pyarrow = pytest.importorskip("pyarrow.parquet")
            pyarrow.write_table(pytest.importorskip("pyarrow.csv").read_csv(tmp_path / "t.csv"), path)
        (pool / "11.png").unlink(missing_ok=True) if other == "lie" else None
    if other == "pool":
        pool = pictures(tmp_path / "other", seed=1)
    if other == "length":
        (pool / "11.png").unlink()
    given = {key: value for key, value in changes.items() if key != "other"}
    views = {"views": given.pop("pool.views", 1)}
    more = {**given, "pool": {"sources": [f"images:{pool}"], **views}, "validation": {"name": f"folder:{pool}"}}
    asked.clear()
    with pytest.raises(
        (TeacherError, ConfigError), match=word.format(path.stem if suffix == ".answers" else path.name)
    ):
        fuse_to_folder(config([model_of_a_site, path], pool, **more), tmp_path / "out")
    assert asked == []


def forge_fingerprint(path: Path, fingerprint: str) -> None:
    with safe_open(path, framework="numpy") as file:
        said, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about = {**json.loads(said["about"]), "pool": fingerprint}
    save_file(tensors, path, {**said, "about": json.dumps(about)})


def test_a_program_is_told_as_early(tmp_path: Path, asked: list[str]) -> None:
    rows, labels = torch.randn(12, 16), torch.arange(12) % 3
    examples, student = Examples(Inputs(rows, plain), labels, classes(3)), torch.nn.Linear(16, 3)
    steps = DistillConfig(**STEPS, early_stopping="none")

    def of_table(content: list[Any], **more: Any) -> Any:
        path = table(tmp_path / "t.csv", content)
        return fuse([torch.nn.Linear(16, 3), path], student, rows, validation=examples, distill=steps, **more)

    for wrong in ({"weights": "validation"}, {"drop_worst": "paper"}):
        with pytest.raises(ConfigError, match="is a table, and has answers for"):
            of_table([EVEN] * 12, ensemble=FuseEnsembleConfig(**wrong))
    for content, word in (([EVEN] * 11, "no row for 1 of 12 inputs"), ([[0.2, 0.3, 0.6]] * 12, "not probabilities")):
        with pytest.raises(TeacherError, match=word):
            of_table(content)
    assert asked == []
    report = of_table([EVEN] * 12, test=examples).report
    assert set(report.sets["test"]) == {"teacher-1", "student"}  # the table has no answers for these inputs
    assert asked == ["teacher-1"] * 2  # a module shows what its outputs are first


def test_inputs_that_are_made_anew_for_every_model_have_no_identity(tmp_path: Path) -> None:
    a = model(tmp_path / "a", 0)
    for source in ("noise", "plane", "generator:g.pt2"):
        with pytest.raises(ConfigError, match=f"pool.sources = '{source}', .* answers are for inputs that are there"):
            ask(config([a], tmp_path, pool={"sources": [source]}), tmp_path / "a.answers")
    with pytest.raises(ConfigError, match=r"pool.views = 3: answers are for inputs that are there"):
        pool_identity(config([a], tmp_path, pool={"sources": ["digits"], "views": 3}))


def test_the_identity_of_images_is_that_of_their_files(tmp_path: Path) -> None:
    """Any tool can compute it (``sha256sum``), and no image has to be decoded for it."""
    pool = pictures(tmp_path / "pool")
    found = pool_identity(config([tmp_path], pool))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(pool.iterdir())}
    assert dict(zip(found.names, found.hashes, strict=True)) == digests
    (pool / os.fsdecode(b"\xff.png")).write_bytes((pool / "00.png").read_bytes())  # a name that is not UTF-8
    odd = pool_identity(config([tmp_path], pool))
    (tmp_path / "pool.json").write_text(odd.describe(), encoding="utf-8")
    odd.check(tmp_path / "pool.json")
    assert (odd.names[-1], odd.duplicates) == (r"\xff.png", 1)
    some = pool_identity(config([tmp_path], pool, pool={"sources": [f"images:{pool}"], "size": 5}))
    assert len(set(some.hashes)) == 5


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


def test_the_example_fuses_a_forest_an_onnx_file_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("sklearn", "skl2onnx", "onnxruntime"):
        pytest.importorskip(package)

    elsewhere = subprocess.run

    def here(command: list[str], **options: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "feddf"]:  # scikit-learn counts cores
            return elsewhere(command, **options)
        assert cli.guarded(lambda: cli.app(command[3:], standalone_mode=False)) == 0, capsys.readouterr().err
        return None

    monkeypatch.setattr(subprocess, "run", here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "fuse_answers.py"))
    report = json.loads((tmp_path / "fused" / "report.json").read_text())
    assert [(one["name"], one["source"]) for one in report["teachers"]] == [
        ("forest", "forest.answers"), ("site-b", "site-b.onnx"), ("service.csv", "service.csv")
    ]  # fmt: skip
    assert all(value > 0 for value in report["contributions"]["pool"].values())
    figures = report["sets"]["test"]
    assert figures["site-b"]["accuracy"] < 0.62 < 0.75 < figures["student"]["accuracy"]  # nobody knows all ten digits


def test_tables_can_be_inspected_and_a_fusion_with_them_estimated(tmp_path: Path) -> None:
    pool, a = pictures(tmp_path / "pool"), model(tmp_path / "a", 0)
    ask(config([a], pool), tmp_path / "t.answers")
    given = config([a, tmp_path / "t.answers", table(tmp_path / "t.csv", [EVEN] * 12)], pool)
    estimated = check(given, plan(given))
    of_model, of_answers, of_csv = estimated["teachers"]
    assert of_model["seconds_for_1000"] > 0 == of_answers["seconds_for_1000"] == of_csv["seconds_for_1000"]
    assert of_csv["takes"] == "nothing: 12 answers for a pool"
    (asked_model,) = read_teacher(TeacherConfig(path=str(a)))
    fingerprint = pool_identity(given).fingerprint
    assert of_answers["takes"].startswith(f"nothing: answers for pool {fingerprint[:16]}, by model ")
    assert f"by model {str(asked_model.content)[:16]} on 20" in of_answers["takes"]
    assert estimated["classes"] == CLASSES
