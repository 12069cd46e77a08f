"""The short form of ``make soak``: the same code, a few of each."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import fuzz  # noqa: E402 (it lies there)
import sweep  # noqa: E402


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_script", ROOT / "benchmarks" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_script"] = module
    spec.loader.exec_module(module)
    return module


def test_mutated_files_do_no_harm(soak: ModuleType, tmp_path: Path) -> None:
    said = soak.mutations(1000, tmp_path)
    assert said.startswith("1,000 mutations")
    shares = {name: int(share) for name, share in re.findall(r"([a-z ]+?) [\d,]+ of [\d,]+ refused, (\d+) %", said)}
    assert len(shares) == 10
    assert min(shares.values()) > 30, shares  # what is not reached is not tried


def test_a_parser_that_fails_or_writes_is_found(tmp_path: Path) -> None:
    def fail(which: str, content: bytes) -> bool:
        if content != b"{}":
            raise KeyError(which)
        return True

    def write(which: str, content: bytes) -> bool:
        Path("stray").write_bytes(content) if content != b"{}" else None
        return True

    def refuse(which: str, content: bytes) -> bool:
        return False

    for read, said in ((fail, "KeyError"), (write, "files were written"), (refuse, "a valid file is refused")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(fuzz.PARSERS, "odd", lambda folder, read=read: fuzz.Parser({"file": b"{}"}, read, [read]))
            with pytest.raises(fuzz.Lost, match=said):
                fuzz.fuzz("odd", 20)


@pytest.mark.parametrize(
    ("ended", "said"),
    [((0, "done", "warning: a\n"), None), ((2, "", "error: a\n"), None), ((130, "", ""), None),
     ((-1, "", "KeyError"), "a traceback"), ((2, "", "error: a\nb\n"), "not one line"), ((1, "", ""), "not one line"),
     ((0, "\x1b[31m", ""), "reaches the terminal")],
)  # fmt: skip
def test_a_command_that_ends_in_another_way_is_found(ended: tuple[int, str, str], said: str | None) -> None:
    found = sweep.fault(*ended)
    assert (said in found) if said and found else found == said


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
