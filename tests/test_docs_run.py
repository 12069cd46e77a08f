"""Every block of code in the pages for users is run, page by page, in an empty folder.

Blocks of Python share one program, commands (``sh``) are given to the command line in this process, and a block with a
title is a file. The work is done in this process too, with five steps of distillation: worker processes would take
seconds each to start. What cannot be run here (installations, hours of work) is in blocks called ``console``; of these,
the commands must exist.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import feddf
from feddf import cli
from reproduction.__main__ import app as reproduction_app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md"]
PAGES += [ROOT / "docs" / f"{name}.md" for name in ("index", "concepts", "which-method", "logged", "feddf-plus")]
PAGES += sorted((ROOT / "docs" / "how-to").glob("*.md"))
RUNS = ("run", "compare", "resume")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.M | re.S)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(block: str) -> list[list[str]]:
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in lines if words]


def call(words: list[str]) -> None:
    app = cli.app
    if words[:3] == ["python", "-m", "reproduction"]:
        app, words = reproduction_app, words[2:]
    else:
        assert words[0] == "feddf", f"only feddf and the reproduction are run: {words}"
    given = {word.partition("=")[0] for word in words}
    own = ["engine=in-process"] if words[1] in RUNS else []
    own += ["distill.steps=5"] if words[1] in ("run", "compare") and not given & {"distill.steps", "steps"} else []
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.guarded(lambda: app([*words[1:], *own], standalone_mode=False))
    assert code == 0, f"{shlex.join(words)}: {err.getvalue()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    program: dict[str, Any] = {"__name__": page.stem}
    with chdir(tmp_path):
        for kind, title, body in blocks(page):
            if title:
                (tmp_path / title).write_text(body)
            elif kind == "sh":
                for words in commands(body):
                    call(words)
            elif kind == "python":
                with redirect_stdout(StringIO()):
                    exec(compile(body, str(page), "exec"), program)
    for name in set(sys.modules) - before:  # a page's own modules must not meet those of another page
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=lambda page: page.stem
)
def test_the_commands_that_are_only_shown_exist(page: Path) -> None:
    known = get_command(cli.app)
    assert isinstance(known, TyperGroup)
    for kind, _, body in blocks(page):
        lines = body.replace("\\\n", " ").splitlines() if kind in ("sh", "console") else []
        for line in lines:
            if found := re.match(r"\s*feddf (?!-)([\w-]+)(.*)", line):
                assert found[1] in known.commands, line
                options = {name for one in known.commands[found[1]].params for name in one.opts}
                assert set(re.findall(r" (--[a-z-]+)", found[2].partition(" #")[0].partition(";")[0])) <= options, line


SMALL = {
    "STEPS = 2000": "STEPS = 20",
    '"toy", [': '"toy", ["local.epochs=1", ',
    '"rounds=3", "local.epochs=5"': '"rounds=1", "local.epochs=1", "steps=2", "data.train_size=600"',
}
"""What makes a notebook affordable here."""


@pytest.mark.parametrize("name", ["toy", "three_architectures"])
def test_the_notebooks_run(name: str, tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    program: dict[str, Any] = {"__name__": name}
    with chdir(tmp_path), redirect_stdout(StringIO()):
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            for old, new in SMALL.items():
                source = source.replace(old, new)
            if cell["cell_type"] == "code":
                exec(compile(source, name, "exec"), program)


@pytest.mark.parametrize("name", ["toy", "three_architectures"])
def test_the_notebooks_show_small_pictures_and_use_public_names_only(name: str) -> None:
    text = (ROOT / "examples" / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text) < 150_000
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    kinds = [kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {"printed": ""})]
    assert {"printed", "image/png"} == set(kinds)
    source = "\n".join("".join(cell["source"]) for cell in cells)
    assert "import feddf\n" in source
    assert not re.search(r"from feddf|import feddf\.|reproduction", source)
    assert set(re.findall(r"\bfeddf\.(\w+)", source)) <= set(feddf.__all__)


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert listed == {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}


def test_the_python_reference_is_what_the_docstrings_say() -> None:
    program: dict[str, Any] = {"__name__": "api"}
    source = ROOT / "tools" / "api.py"
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), program)
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == program["page"]()
