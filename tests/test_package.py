"""The package as its users get it."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import feddf

ROOT = Path(__file__).parent.parent
MODULES = [module.name for module in pkgutil.walk_packages(feddf.__path__, "feddf.") if module.name != "feddf.__main__"]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_tell_the_truth(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), extraglobs={"torch": importlib.import_module("torch")})
    assert failed == 0


@pytest.mark.parametrize("name", feddf.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    thing = getattr(feddf, name)
    assert isinstance(thing, dict) or (thing.__doc__ and len(thing.__doc__) > 20)


def test_names_are_what_the_type_checker_thinks() -> None:
    for node in ast.walk(ast.parse(Path(feddf.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("feddf."):
            for alias in node.names:
                assert getattr(feddf, alias.name) is getattr(importlib.import_module(str(node.module)), alias.name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'feddf' has no attribute 'fedsgd'"):
        feddf.fedsgd  # noqa: B018


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_the_examples_run(example: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
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
    assert "feddf/presets/demo.toml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "examples"))]
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True, timeout=120
    )
    code = "import feddf, sys; sys.argv[1:] = ['presets']; print(feddf.__file__); import feddf.cli; feddf.cli.main()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "demo" in done.stdout
