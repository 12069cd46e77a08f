"""The short form of ``make soak``: the same code, a few of each."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_script", ROOT / "benchmarks" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["soak_script"] = module
    spec.loader.exec_module(module)
    return module


def test_mutated_files_do_no_harm(soak: ModuleType, tmp_path: Path) -> None:
    assert soak.mutations(400, tmp_path).startswith("400 mutations")


def test_rounds_end_whatever_a_tenth_of_the_clients_does(soak: ModuleType, tmp_path: Path) -> None:
    assert soak.unreliable(4, tmp_path, seed=1).startswith("4 rounds")


def test_the_summary_goes_between_the_markers(soak: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{soak.BEGIN}\nold\n{soak.END}\nafter\n")
    soak.write(soak.Part("kills", "200 kills", 9.4), page)
    text = page.read_text()
    assert "| kills | 200 kills | 9 |" in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    soak.write(soak.Part("mutations", "many", 3.0), page)
    soak.write(soak.Part("kills", "again", 1.0), page)
    text = page.read_text()
    assert "200 kills" not in text
    assert text.index("| kills | again | 1 |") < text.index("| mutations | many | 3 |")


def test_the_page_has_the_markers(soak: ModuleType) -> None:
    text = soak.PAGE.read_text(encoding="utf-8")
    assert text.index(soak.BEGIN) < text.index(soak.END)
