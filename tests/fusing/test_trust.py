"""No file made elsewhere runs code unasked: programs of torch.export, and folders of transformers."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import feddf
from feddf.config.errors import FeddfError
from feddf.config.fuse_config import TeacherConfig
from feddf.data.unlabeled import load_generator
from feddf.fusing.teachers import read_teacher
from feddf.runtime.atomic import UntrustedError
from feddf.runtime.device import CPU


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def pickled(canary: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Bomb(canary), buffer)
    return buffer.getvalue()


def by_sample_inputs(name: str, content: bytes, canary: Path) -> bytes:
    return pickled(canary) if name.endswith("sample_inputs/model.pt") else content


def by_weights(name: str, content: bytes, canary: Path) -> bytes:
    if name.endswith("weights_config.json"):
        return content.replace(b'"use_pickle": false', b'"use_pickle": true')
    return pickled(canary) if "/weights/weight_" in name else content


def by_expression(name: str, content: bytes, canary: Path) -> bytes:
    if not name.endswith("models/model.json"):
        return content
    model = json.loads(content)
    sizes = next(one["sizes"] for key, one in model["graph_module"]["graph"]["tensor_values"].items() if key == "input")
    call = f"__import__('pathlib').Path({str(canary)!r}).touch() or 2"
    sizes[0] = {"as_expr": {"expr_str": call, "hint": {"as_int": 2}}}
    return json.dumps(model).encode()


CRAFTED = [by_sample_inputs, by_weights, by_expression]


Craft = Callable[[str, bytes, Path], bytes]


@pytest.fixture(params=CRAFTED, ids=lambda craft: craft.__name__)
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return crafted(request.param, tmp_path)


def crafted(craft: Craft, tmp_path: Path) -> Path:
    """Return a .pt2 file that makes the file ``canary`` beside it when torch reads it."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    torch.export.save(torch.export.export(network, (torch.zeros(2, 1, 8, 8),)), tmp_path / "plain.pt2")
    with zipfile.ZipFile(tmp_path / "plain.pt2") as plain, zipfile.ZipFile(tmp_path / "made.pt2", "w") as made:
        for name in plain.namelist():
            made.writestr(name, craft(name, plain.read(name), tmp_path / "canary"))
    (tmp_path / "plain.pt2").unlink()
    return tmp_path / "made.pt2"


def test_the_crafted_file_does_run_code_where_it_is_trusted(program: Path) -> None:
    """What follows would show nothing otherwise."""
    config = TeacherConfig(path=str(program), size=8, channels=1)
    with suppress(FeddfError):  # what it holds instead of weights is no model
        (teacher,) = read_teacher(config, trust=True)
        with teacher.open(CPU):
            pass
    assert (program.parent / "canary").exists()


def as_teacher(program: Path) -> None:
    feddf.fuse([program], nn.Linear(4, 3), torch.zeros(8, 4))


def as_configured(program: Path) -> None:
    read_teacher(TeacherConfig(path=str(program), size=8, channels=1))


def as_generator(program: Path) -> None:
    load_generator(program)


@pytest.mark.parametrize("use", [as_teacher, as_configured, as_generator])
def test_a_program_is_not_read_unless_it_is_trusted(program: Path, use: Callable[[Path], None]) -> None:
    with pytest.raises(UntrustedError, match="--trust"):
        use(program)
    assert not (program.parent / "canary").exists()


def feddf_says(*words: str, cwd: Path, answer: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "feddf", *words]
    return subprocess.run(command, cwd=cwd, input=answer, capture_output=True, text=True, timeout=120)


def test_commands_refuse_a_program_in_one_line(tmp_path: Path) -> None:
    here = crafted(by_sample_inputs, tmp_path).parent
    for words in (
        ("fuse", "--teacher", "made.pt2", "--student", "{model='mlp', size=8}", "--unlabeled", "noise", "--out", "o"),
        ("run", "toy", "pool.sources=generator:made.pt2"),
        ("compare", "toy", "pool.sources=generator:made.pt2"),
    ):
        done = feddf_says(*words, cwd=here)
        assert done.returncode == 2, done.stderr
        assert "--trust" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (here / "canary").exists()


REMOTE = {
    "configuration_own.py": "from transformers import BertConfig\nimport pathlib\npathlib.Path({canary!r}).touch()\n"
    "class Config(BertConfig):\n    model_type = 'own'\n",
    "modeling_own.py": "from transformers import BertForSequenceClassification\n"
    "class Model(BertForSequenceClassification):\n    pass\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of transformers whose architecture is code in the folder."""
    pytest.importorskip("transformers")
    made = tmp_path / "theirs"
    made.mkdir()
    for name, text in REMOTE.items():
        (made / name).write_text(text.format(canary=str(tmp_path / "canary")))
    kinds = {"AutoConfig": "configuration_own.Config", "AutoModelForSequenceClassification": "modeling_own.Model"}
    config = {"model_type": "own", "architectures": ["ModelForSequenceClassification"], "auto_map": kinds}
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_a_folder_of_transformers_runs_no_code_whatever_is_answered(folder: Path, tmp_path: Path) -> None:
    """With standard input at hand, transformers would ask, and take "y" for an answer."""
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    words = ("--student", "{model='transformer', tokenizer='theirs'}", "--unlabeled", "texts.txt", "--out", "o")
    done = feddf_says("fuse", "--teacher", "theirs", *words, cwd=tmp_path, answer="y\n" * 20)
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / "canary").exists()


def test_no_call_of_transformers_leaves_remote_code_open() -> None:
    found = 0
    for path in Path(feddf.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if isinstance(node, ast.Call) and called in ("from_pretrained", "from_config"):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
                found += 1
    assert found >= 8


FORMAT = """
import torch
from contextlib import contextmanager
from feddf.fusing.teachers import TrainedModel

def of_table(config, trust):
    @contextmanager
    def open_table(device):
        yield lambda inputs: torch.zeros(len(inputs), 3)
    return [TrainedModel(config.path, open_table, ("a", "b", "c"))]
"""


def test_a_format_of_ones_own_is_a_name_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_format.py").write_text(FORMAT)
    monkeypatch.chdir(tmp_path)
    (teacher,) = read_teacher(TeacherConfig(path="anything", format="my_format:of_table"))
    assert (teacher.id, teacher.classes) == ("anything", ("a", "b", "c"))
    with pytest.raises(FeddfError, match=r"teachers\.format"):
        TeacherConfig(path="anything", format="tabel")
