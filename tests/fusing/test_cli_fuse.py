"""``feddf fuse`` and ``feddf predict`` from the command line: what they write, and what they refuse in one line."""

from __future__ import annotations

import csv
import json
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_teachers import CLASSES, as_folder, models, spec_of
from torch import Tensor, nn

from conftest import stripes
from feddf import cli


def run(*words: str, cwd: Path) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        code = cli.guarded(lambda: cli.app(list(words), standalone_mode=False))
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two teachers and unlabeled images, and what came of fusing them."""
    root = tmp_path_factory.mktemp("place")
    as_folder(models()["first"], spec_of(classes=CLASSES[:2]), root / "first")
    as_folder(models()["last"], spec_of(classes=CLASSES[1:]), root / "last")
    (root / "pictures").mkdir()
    for number, image in enumerate(stripes(60, 3).inputs.raw[torch.arange(60)]):
        Image.fromarray(image[0].numpy()).save(root / "pictures" / f"{number:02d}.png")
    code, out, err = run(*WORDS, "--out", "out", cwd=root)
    assert code == 0, err
    assert "first: evaluated on 60 inputs" in out
    return root


WORDS = [
    "fuse", "--teacher", "first", "--teacher", "last", "--student", "{model = 'cnn', options = {width = 4}}",
    "--unlabeled", "pictures", "--test", "small_teachers:bands", "--cache", "cache", "steps=60", "distill.lr=0.01",
    "distill.batch_size=32", "run.threads=1",
]  # fmt: skip


def test_the_result_is_a_folder_that_predicts(place: Path) -> None:
    found = {path.name for path in (place / "out").iterdir()}
    assert {
        "model.safetensors",
        "config.json",
        "README.md",
        "fuse.toml",
        "report.json",
        "reliability-test.png",
    } == found
    code, out, _ = run("predict", "out", "pictures", cwd=place)
    assert code == 0
    rows = list(csv.DictReader(StringIO(out)))
    assert [row["input"] for row in rows][:2] == ["pictures/00.png", "pictures/01.png"]
    right = [row["class"] == CLASSES[number % 3] for number, row in enumerate(rows)]
    assert sum(right) > 0.9 * len(rows)
    assert float(rows[0]["top"]) + float(rows[0]["middle"]) + float(rows[0]["bottom"]) == pytest.approx(1, abs=1e-4)
    assert run("predict", "out", "pictures/00.png", "--out", "one.jsonl", cwd=place)[0] == 0
    (line,) = (place / "one.jsonl").read_text().splitlines()
    assert json.loads(line)["class"] == "top"


def test_the_card_says_who_knows_what(place: Path) -> None:
    card = (place / "out" / "README.md").read_text()
    assert "| class | first | last |" in card
    assert "| top | • |  |" in card
    assert "fused from 2 models that were trained apart" in card


def test_resuming_a_finished_fusion_changes_nothing(place: Path) -> None:
    before = (place / "out" / "model.safetensors").stat().st_mtime_ns
    code, out, _ = run(*WORDS, "--out", "out", "--resume", cwd=place)
    assert (code, out) == (0, "out is finished already\n")
    assert (place / "out" / "model.safetensors").stat().st_mtime_ns == before
    code, _, err = run(*WORDS, "seed=4", "--out", "out", "--resume", cwd=place)
    assert code == 2
    assert "holds a fusion with another configuration" in err


def test_the_written_configuration_gives_the_same_model_and_asks_nobody(place: Path) -> None:
    code, out, err = run("fuse", "out/fuse.toml", "again", cwd=place)
    assert code == 0, err
    assert "teachers evaluated: 0; with cached predictions or tables: 2" in out
    one, other = ((place / name / "model.safetensors").read_bytes() for name in ("out", "again"))
    assert one == other


class Broken(nn.Module):
    """A teacher that does not know what to say to bright images."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models()["all"]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) / (inputs.flatten(1).max(dim=1, keepdim=True).values < 1).float()


@pytest.fixture(scope="module")
def odd(place: Path) -> Path:
    """Further teachers, each with something wrong."""
    inputs = stripes(4, 1).inputs.batch(torch.arange(4))
    varying = ({0: torch.export.Dim("batch", min=1)},)
    torch.export.save(torch.export.export(Broken().eval(), (inputs,), dynamic_shapes=varying), place / "broken.pt2")
    save_file(models()["first"].state_dict(), place / "two.safetensors")
    save_file(models()["all"].state_dict(), place / "three.safetensors")
    torch.save(models()["all"].state_dict(), place / "old.pt")
    (place / "empty").mkdir()
    (place / "lines.txt").write_text("a line\n")
    (place / "cut.pt2").write_bytes((place / "broken.pt2").read_bytes()[:2000])
    return place


FED = "size = 8, channels = 1, mean = [0.4], std = [0.3]"
MISTAKES: dict[str, tuple[list[str], str]] = {
    "pickle": (["--teacher", "old.pt"], "a .pt file can run any code when it is read; where you trust it, convert it"),
    "nothing": (["--teacher", "nowhere.onnx"], "there is no teacher nowhere.onnx"),
    "nan": (
        ["--teacher", f"{{path = 'broken.pt2', classes = ['top', 'middle', 'bottom'], {FED}}}", "--trust"],
        "teacher broken: its logits for input 0 are not finite",
    ),
    "outputs": (
        ["--teacher", f"{{path = 'two.safetensors', model = 'cnn', options = {{width = 4}}, {FED}}}"],
        "teacher two: it has 2 outputs, and its class list (or the student's, if it has none) has 3 names",
    ),
    "list": (
        ["--teacher", f"{{path = 'three.safetensors', model = 'cnn', classes = ['a', 'b'], {FED}}}"],
        "does not fit the model 'cnn'",
    ),
    "short list": (
        [
            "--teacher",
            f"{{path = 'three.safetensors', model = 'cnn', options = {{width = 4}}, classes = ['a', 'b'], {FED}}}",
        ],
        "teacher three: it has 3 outputs, and its class list (or the student's, if it has none) has 2 names",
    ),
    "damaged": (["--teacher", "cut.pt2", "--trust"], "cut.pt2 is not a whole program of torch.export"),
    "size": (
        ["--teacher", "{path = 'broken.pt2', size = 16, channels = 1, mean = [0.4], std = [0.3]}", "--trust"],
        "its file takes inputs of 1×8×8, and it would be fed 1×16×16; say how it is fed with size and channels",
    ),
    "maps": (
        [
            "--teacher", "{path = 'first', map = {top = 'a'}}", "--teacher", "{path = 'last', map = {top = 'b'}}",
        ],
        "two class maps contradict each other: 'top' is 'a' for first, and 'b' for last",
    ),
    "pool": (["--unlabeled", "empty"], "pool.sources = 'images:empty': empty holds no image"),
    "lines": (["--unlabeled", "lines.txt"], "pool.sources = 'lines:lines.txt': no model reads texts"),
    "twice": (["student.classes=['top', 'middle', 'bottom', 'top']"], "'top' is named twice"),
    "student": (["student.classes=['top', 'middle']"], "the student cannot express all classes"),
    "start": (["student.init=first"], "it cannot express all classes: 'bottom' is none of its outputs"),
    "average": (["student.init=average"], "there is nothing to average"),
    "no such start": (["student.init=frist"], "no teacher has this name; did you mean 'first'?"),
    "labels": (["ensemble.weights=validation"], "it needs labeled examples; name some with validation.name"),
    "architecture": (["student.model=resnet9"], "student.model = 'resnet9': did you mean 'resnet"),
    "key": (["student.sise=8"], "did you mean 'student.size'?"),
    "table": (["--teacher", "{path = "], "is not a TOML table"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(name: str, odd: Path) -> None:
    words, expected = MISTAKES[name]
    before = sorted(path for path in odd.rglob("*") if "cache" not in path.parts)
    code, _, err = run(*WORDS, *words, "--out", "wrong", cwd=odd)
    assert code == 2, err
    assert expected in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(path for path in odd.rglob("*") if "cache" not in path.parts) == before


def test_predict_refuses_in_one_line(place: Path) -> None:
    for words, expected in (
        (["nowhere", "x.png"], "there is no folder nowhere"),
        (["out", "x.png"], "there is no image file or folder x.png"),
        (["out", "pictures", "--out", "x.txt"], "must end in .csv or .jsonl"),
        (["out", "out/fuse.toml"], "cannot be read as an image"),
    ):
        code, _, err = run("predict", *words, cwd=place)
        assert code == 2
        assert expected in err
        assert err.count("\n") == 1


def test_how_every_teacher_is_fed_is_said_everywhere(place: Path) -> None:
    code, out, err = run(*WORDS, "--out", "told", cwd=place)
    assert code == 0, err
    line = "1×8×8, mean 0.4, std 0.3, values from -1.33 to 2 (file)"
    assert f"first: {line}\n" in out
    assert "the student: distilled in 60 steps\n" in out
    card, report = (place / "told" / "README.md").read_text(), json.loads((place / "told" / "report.json").read_text())
    assert f"| first | {line} | logits |" in card
    assert 'base_model:\n- "first"\n- "last"\n' in card
    assert [one["fed"] for one in report["teachers"]] == [line, line]
    assert report["teachers"][0]["said_by"]["mean"] == "file"
    assert "## Accuracy on each class (test, in %)" in card
    gains = report["contributions"]["test"]
    figures = report["sets"]["test"]
    assert gains["first"] == pytest.approx(figures["ensemble"]["accuracy"] - figures["last"]["accuracy"], abs=1e-9)
    per_class = figures["student"]["per_class"]
    assert sum(per_class) / 3 == pytest.approx(figures["student"]["accuracy"], abs=1e-6)  # 30 of each class


def test_a_teacher_that_is_fed_as_nobody_said_is_a_warning(odd: Path) -> None:
    varying = ({0: torch.export.Dim("batch", min=1)},)
    example = stripes(4, 1).inputs.batch(torch.arange(4))
    torch.export.save(torch.export.export(models()["all"], (example,), dynamic_shapes=varying), odd / "bare.pt2")
    words = ["--teacher", "{path = 'bare.pt2', classes = ['top', 'Middle', 'bottom']}", "--trust"]
    code, out, err = run(*WORDS, *words, "--out", "bare", cwd=odd)
    assert code == 0, err
    assert "bare: 1×8×8 (file), mean 0.4, std 0.3, values from -1.33 to 2 (assumed as for the student)\n" in out
    assert err.startswith("warning: teacher bare: nothing says how its inputs are normalized; it is fed 1×8×8 (file)")
    assert err.count("\n") == 1
    assert "bare: its class 'Middle' is taken as 'middle'" in out
    card = (odd / "bare" / "README.md").read_text()
    assert "- teacher bare: nothing says how its inputs are normalized" in card
    assert "- bare: its class 'Middle' is taken as 'middle'." in card


def test_json_is_all_that_is_printed(place: Path) -> None:
    code, out, _ = run(*WORDS, "--out", "quiet", "--json", cwd=place)
    assert code == 0
    assert json.loads(out)["folder"] == "quiet"
    assert json.loads(out)["sets"]["test"]["student"]["accuracy"] > 0.9
    code, out, _ = run("predict", "out", "pictures/00.png", "--json", cwd=place)
    assert json.loads(out)[0]["class"] == "top"


def test_a_check_does_everything_but_the_work(place: Path) -> None:
    before = sorted(place.rglob("*"))
    code, out, err = run(*WORDS, "--check", "student.size=10", cwd=place)
    assert code == 0, err
    assert "student: 1×10×10 (by hand)" in out
    assert "for all 60 steps" in out
    assert sorted(place.rglob("*")) == before
    code, out, _ = run(*WORDS, "--check", "--json", cwd=place)
    found = json.loads(out)
    assert found["classes"] == list(CLASSES)
    assert found["bytes_of_memory"] > 10**7
    code, _, err = run(*WORDS, "--check", "student.classes=['top', 'middle']", cwd=place)
    assert (code, err.count("\n")) == (2, 1)


def test_inspect_looks_at_all_and_asks_in_one_line(odd: Path) -> None:
    code, out, err = run("inspect", "first", "two.safetensors", "last", "--labeled", "small_teachers:bands", cwd=odd)
    assert code == 2
    assert out.count("fed      1×8×8, mean 0.4, std 0.3, values from -1.33 to 2 (file)\n") == 2
    assert "returns  2 logits" in out
    assert "of 90 examples right" in out
    assert err.startswith("error: teacher two.safetensors: say which architecture its weights are of, with model = ...")
    assert err.count("\n") == 1
    code, out, _ = run("inspect", "first", "--json", cwd=odd)
    (found,) = json.loads(out)
    assert (code, found["classes"], found["n_outputs"]) == (0, list(CLASSES[:2]), 2)


def test_a_table_is_a_pool_and_an_mlp_its_student(place: Path) -> None:
    """Two trees' worth of numbers far from mean 0: the student is fed them standardized, the teachers as they are."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(240) % 3
    rows = 100 + 20 * torch.randn((240, 4), generator=generator)
    rows[torch.arange(240), labels] += 90
    for name, some in (("pool", range(180)), ("test", range(180, 240))):
        lines = [",".join(f"{value:.3f}" for value in rows[row].tolist()) + f",c{labels[row]}" for row in some]
        (place / f"{name}.csv").write_text("\n".join(["w,x,y,z,kind", *lines]))
    teacher = nn.Linear(4, 3)
    with torch.no_grad():
        teacher.weight.copy_(torch.eye(3, 4) / 5)
        teacher.bias.zero_()
    varying = ({0: torch.export.Dim("batch", min=1)},)
    torch.export.save(torch.export.export(teacher, (torch.zeros(4, 4),), dynamic_shapes=varying), place / "rule.pt2")
    words = ["fuse", "--teacher", "{path = 'rule.pt2', classes = ['c0', 'c1', 'c2']}", "--student", "mlp",
             "--unlabeled", "pool.csv#kind", "--test", "test.csv#kind", "--trust", "--cache",
             "cache", "steps=150"]  # fmt: skip
    code, out, err = run(*words, "--out", "table", cwd=place)
    assert code == 0, err
    assert "rule: 4 numbers (file), as they are (assumed)\n" in out
    report = json.loads((place / "table" / "report.json").read_text())
    assert report["student"]["fed"] == "4 numbers, standardized by mean and deviation (pool)"
    assert report["sets"]["test"]["student"]["accuracy"] > 0.9
    code, out, err = run("predict", "table", "test.csv#kind", cwd=place)
    assert code == 0, err
    found = [row["class"] == f"c{labels[180 + number]}" for number, row in enumerate(csv.DictReader(StringIO(out)))]
    assert (len(found), sum(found) > 54) == (60, True)
