"""The package as its users get it."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.metadata
import json
import os
import pkgutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

import feddf
from soak import SOAK, soak

ROOT = Path(__file__).parent.parent
MODULES = [module.name for module in pkgutil.walk_packages(feddf.__path__, "feddf.") if module.name != "feddf.__main__"]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_tell_the_truth(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), extraglobs={"torch": importlib.import_module("torch")})
    assert failed == 0


@pytest.mark.parametrize("name", feddf.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    thing = getattr(feddf, name)
    home = sys.modules[feddf._HOME[name]]
    said = below(Path(str(home.__file__)), name) or thing.__doc__  # of a type or a value, which has none of its own
    assert said
    assert len(said) > 20
    assert name in dir(feddf)


def below(path: Path, name: str) -> str:
    """Return the text in quotes right after an assignment to a name."""
    body = ast.parse(path.read_text()).body
    for one, after in pairwise(body):
        names = [target.id for target in getattr(one, "targets", []) if isinstance(target, ast.Name)]
        if name in names and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return str(after.value.value)
    return ""


def test_names_are_what_the_type_checker_thinks() -> None:
    """The stub, which type checkers read and from which Python finds the names."""
    listed: list[str] = []
    for node in ast.parse(Path(feddf.__file__).with_suffix(".pyi").read_text()).body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            assert alias.asname == alias.name, "not re-exported"
            assert getattr(feddf, alias.name) is getattr(importlib.import_module(str(node.module)), alias.name)
            listed.append(alias.name)
    assert sorted(listed) == feddf.__all__
    assert len(set(listed)) == len(listed) > 70


def test_no_public_name_hides_a_module() -> None:
    """Otherwise ``feddf.name`` would be the one or the other, whichever was imported last."""
    modules = {module.name for module in pkgutil.iter_modules(feddf.__path__)}
    assert modules & set(feddf.__all__) == set()
    for name in modules - {"__main__"}:
        importlib.import_module(f"feddf.{name}")
    assert callable(feddf.feddf)
    assert isinstance(feddf.MODELS, Mapping)


def test_the_version_is_the_installed_one() -> None:
    assert feddf.__version__ == importlib.metadata.version("feddf")
    assert "__version__" in dir(feddf)
    assert {name for name in dir(feddf) if not name.startswith("__")} == {*feddf.__all__}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'feddf' has no attribute 'fedsgd'"):
        feddf.fedsgd  # noqa: B018


def python(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


WITHOUT_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not for this command")
sys.meta_path.insert(0, Blocker())
"""
SLOW = ["torch", "numpy", "matplotlib", "safetensors", "ray", "ssl", "http.client", "urllib.request", "asyncio"]
COMMAND = "import sys, feddf.cli; sys.argv[0] = 'feddf'; feddf.cli.main()"


def test_importing_the_package_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, feddf, feddf.config, feddf.report.read; feddf.load('demo'), feddf.Settings, feddf.METHODS, "
        "feddf.__version__, dir(feddf); print(sorted({'torch', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    done = python(code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("words", [["--help"], ["presets"], ["config"], ["config", "alpha"], ["run", "--help"]])
def test_a_command_that_needs_no_torch_loads_none_nor_what_else_is_slow(words: list[str], tmp_path: Path) -> None:
    code = (
        "import atexit, sys; atexit.register("
        f"lambda: print(sorted(set({SLOW}) & set(sys.modules)), len(sys.modules))); " + COMMAND
    )
    done = python(code, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    slow, _, count = done.stdout.splitlines()[-1].rpartition(" ")
    assert slow == "[]"
    assert int(count) <= 520, "many modules take long to load"
    assert len(done.stdout) > 200  # it did what was asked


def test_a_report_can_be_made_where_torch_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('rounds = 3\n[data]\nname = "toy"\n[fusion]\nmethod = "feddf"\n')
    record = {"models": {"mlp": {"averaged": 0.1, "fused": 0.425}}, "ensemble": 0.5, "seconds": {"train": 1.0}}
    lines = [json.dumps({"round": number, **record}) + "\n" for number in (1, 2)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    done = python(WITHOUT_TORCH + COMMAND, "report", "run", "--out", "curves.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "42.5" in done.stdout
    assert "2/3" in done.stdout
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    blocked = python(WITHOUT_TORCH + "import torch", cwd=tmp_path)
    assert "torch is not for this command" in blocked.stderr  # the blocker works


@pytest.mark.long
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path.name, marks=[soak] if path.name == "hierarchical_fusion.py" else [])
        for path in sorted((ROOT / "examples").glob("*.py"))
        if path.name not in ("train_generator.py", "own_parts.py", "fuse_answers.py")  # which have tests of their own
    ],
)
def test_the_examples_run(example: str, tmp_path: Path) -> None:
    program = ROOT / "examples" / example
    if example == "feddf_on_digits.py" and not SOAK:  # with less to do
        text = program.read_text(encoding="utf-8").replace("epochs=5", "epochs=1").replace("steps=200", "steps=20")
        program = tmp_path / example
        program.write_text(text, encoding="utf-8")
    command = [sys.executable, str(program)]
    calm = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait must not take the cores of other tests
    done = subprocess.run(command, cwd=tmp_path, env=calm, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "round 3" in done.stdout


def test_the_first_example_is_short() -> None:
    assert len((ROOT / "examples" / "feddf_on_digits.py").read_text().splitlines()) < 60


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    """Built, unpacked elsewhere and run from there."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = tmp_path.glob("feddf-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "feddf/py.typed" in names
    assert "feddf/config/presets/demo.toml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "examples", "reproduction"))]
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True, timeout=120
    )
    code = "import feddf, sys; sys.argv[1:] = ['presets']; print(feddf.__file__); import feddf.cli; feddf.cli.main()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "demo" in done.stdout


def test_no_constructor_of_typers_classes_is_called() -> None:
    """They differ between the versions that the ranges allow, and the tests run with one of them."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not {"TyperOption", "TyperArgument"} & {ast.unparse(call).rpartition(".")[2] for call in calls}, path
