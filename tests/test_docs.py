"""What the documents name is there: tests, functions, presets and pages."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from feddf.experiments.compare import variant
from feddf.runs.config import load, presets

ROOT = Path(__file__).parents[1]
MAP = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[^`]+)`", MAP))))
def test_every_test_in_the_paper_map_exists(name: str) -> None:
    file, _, function = name.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not function or f"def {function}(" in text


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z]+(?:\.[a-z_0-9]+)+)[(`]", MAP))))
def test_every_function_in_the_paper_map_exists(name: str) -> None:
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(["feddf", *parts[:split]]))
        except ImportError:
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return
    pytest.fail(f"feddf.{name} cannot be imported")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)", text):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in anchors, f"{target}{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_presets_and_methods_that_exist(page: Path) -> None:
    for words in re.findall(r"feddf (?:run|compare|tune) ([a-z][\w-]*)([^`\n]*)", page.read_text(encoding="utf-8")):
        if words[0] in presets():
            for method in re.findall(r"methods=([\w,+-]+)", words[1]):
                for each in method.split(","):
                    variant(load(words[0]), each)


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_configuration_that_says_what_it_is(name: str) -> None:
    assert load(name).about
