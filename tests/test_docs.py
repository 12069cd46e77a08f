"""What the documents name is there: tests, files, functions, keys, presets, commands and pages."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from importlib import import_module
from inspect import getdoc, isfunction, signature
from itertools import pairwise
from pathlib import Path

import pytest

import feddf
from feddf.config import Experiment, load
from feddf.config.experiment import presets
from feddf.config.fuse_config import FuseConfig
from feddf.config.keys import all_keys, flat, markdown, resolve
from feddf.config.records import DistillationRecord, ModelRecord, Record
from feddf.runs.many import variant
from reproduction import NAMES

ROOT = Path(__file__).parents[1]
MAP = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def spans(page: Path) -> list[str]:
    """Return what a page has between single backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S))


@every_page
def test_every_test_and_every_file_of_code_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # which also names what is gone
        return
    roots = (ROOT, ROOT / "src" / "feddf", page.parent)
    for name, function in re.findall(r"`([\w/-]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
        if f'title="{name}"' in page.read_text(encoding="utf-8"):  # the page itself makes it
            continue
        found = [root / name for root in roots if (root / name).is_file()]
        assert found, name
        assert not function or f"def {function}(" in found[0].read_text(encoding="utf-8"), function


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z]+(?:\.[a-z_0-9]+)+)[(`]", MAP)) - set(all_keys())))
def test_every_function_in_the_paper_map_exists(name: str) -> None:
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(([] if parts[0] == "reproduction" else ["feddf"]) + parts[:split]))
        except ImportError:
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return
    pytest.fail(f"{name} cannot be imported")


def test_deviations_are_numbered_without_gaps_and_all_are_used() -> None:
    listed = [int(number) for number in re.findall(r"^- \*\*D(\d+)\*\*", MAP, flags=re.MULTILINE)]
    used = {int(number) for row in MAP.splitlines() if row.startswith("|") for number in re.findall(r"\bD(\d+)\b", row)}
    assert listed == list(range(1, len(listed) + 1))
    assert used == set(listed)


def test_every_algorithm_table_and_figure_of_the_paper_has_a_row() -> None:
    for wanted in [*(f"Table {n}" for n in range(1, 9)), *(f"Algorithm {n}" for n in range(1, 4)), "Theorem 5.1"]:
        assert wanted in MAP
    numbers = {int(n) for text in re.findall(r"Figures? ([\d, –and]+)", MAP) for n in _spread(text)}
    assert numbers >= set(range(1, 18))


def _spread(text: str) -> list[str]:
    found: list[str] = []
    for part in re.split(r",| and ", text):
        first, dash, last = part.strip().partition("–")
        if first.isdigit():
            found += [str(n) for n in range(int(first), int(last if dash else first) + 1)]
    return found


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)", text):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in anchors, f"{target}{anchor}"


@every_page
def test_commands_are_valid(page: Path) -> None:
    """Presets, methods and overrides; values that stand for something (``SOURCE``, ``...``) are left out."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for kind, command in re.findall(r"feddf (run|compare|tune) ([a-z][\w-]*(?: [^`\n]*)?)", text):
        name, *words = shlex.split(command, comments=True)
        if name not in presets():
            continue
        if kind == "compare":  # several numbers are tried one after the other
            words = [re.sub(r"^([a-z._]+=[\d.]+)(,[\d.]+)+$", r"\1", word) for word in words]
        options = {option: value for option, value in pairwise(words) if option.startswith("--")}
        given = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
        if kind == "tune":  # which also takes options of all models, that are no keys
            given = {key: value for key, value in given.items() if not key.startswith("prototypes.")}
            given = {key: re.sub(r"^([\d.]+)(,[\d.]+)+$", r"\1", value) for key, value in given.items()}
        overrides = [f"{key}={value}" for key, value in given.items() if not _placeholder(value)]
        for method in options.get("--methods", "feddf").split(","):
            variant(load(name, overrides), method)
        tuned = [word for word in words if kind == "tune" and re.fullmatch(r"[a-z][a-z_.]*", word)]
        for key in [*given, *tuned]:
            assert resolve(key, Experiment)


@every_page
def test_what_is_reproduced_has_a_name(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # which also names what is gone
        return
    known = {*NAMES, "all", "NAME", "ARTIFACT", "report", "bound", "attacks", "check", "measure-points", "regions"}
    for names in re.findall(r"python -m reproduction ([\w,-]+)", page.read_text(encoding="utf-8")):
        assert names.startswith("--") or set(names.split(",")) <= known, names
    assert not re.search(r"feddf (reproduce|bound|attack-matrix)\b", page.read_text(encoding="utf-8"))


def _placeholder(value: str) -> bool:
    return value == "..." or value.isupper()


@every_page
def test_every_key_exists(page: Path) -> None:
    """``key=value``, ``section.key``, ``key = value`` and blocks of TOML name keys of a configuration."""
    if page.name in ("CHANGELOG.md", "api.md"):  # which also name what is gone, or stands for a key
        return
    fusing = page.name in ("fuse.md", "fuse-evidence.md", "class-lists.md")
    known = runpy.run_path(str(ROOT / "tools" / "api.py"))["fuse_keys"]() if fusing else all_keys()
    sections = {name.partition(".")[0] for name in known if "." in name}
    for span in spans(page):
        for word in re.findall(r"^'?([a-z][a-z_.]*)(?:=| = )", span):
            of_a_teacher = fusing and f"teachers.{word}" in known
            assert of_a_teacher or resolve(word, FuseConfig if fusing else Experiment), span
        if re.fullmatch(r"[a-z]+\.[a-z_]+", span) and span.partition(".")[0] in sections:
            assert span in known or page.name == "paper-map.md", span  # where `local.py` has functions, too
    for block in re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
        assert set(flat(tomllib.loads(block))) <= set(known)


def test_the_file_map_is_what_the_docstrings_say() -> None:
    file_map = runpy.run_path(str(ROOT / "tools" / "file_map.py"))["file_map"]()
    assert f"## File map\n\n```text\n{file_map}```\n" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_tables_of_a_fusions_keys_are_those_of_its_types() -> None:
    tables = runpy.run_path(str(ROOT / "tools" / "api.py"))["fuse_tables"]()
    assert (ROOT / "docs" / "fuse.md").read_text(encoding="utf-8").endswith(tables)


def test_every_field_of_a_record_is_explained() -> None:
    fields = {*Record.__annotations__, *DistillationRecord.__annotations__} - {"models", "distillation"}
    fields |= {f"models.NAME.{name}" for name in ModelRecord.__annotations__}
    assert fields <= set(spans(ROOT / "docs" / "logged.md"))


def test_the_tables_of_keys_are_those_that_the_command_prints() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").endswith(markdown())


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_configuration_that_says_what_it_is(name: str) -> None:
    assert load(name).description


@pytest.mark.parametrize("name", feddf.__all__)
def test_public_functions_explain_their_arguments(name: str) -> None:
    found = getattr(feddf, name)
    names = list(signature(found).parameters) if isfunction(found) else []
    explained = re.findall(r"^ {4}(\w+): ", (getdoc(found) or "").partition("Args:\n")[2], flags=re.M)
    assert len(names) <= 2 or explained == names
