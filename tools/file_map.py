"""Write the file map in CONTRIBUTING.md, a line for each file from its docstring: python tools/file_map.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?<=^## File map\n\n```text\n).*?(?=^```)", re.M | re.S)


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(doc.partition("\n\n")[0].split()).partition(". ")[0].removesuffix(".")
    return re.sub(r":\w+:`~?([^`]+)`", r"\1", first).replace("``", "")


def lines(folder: Path, depth: int = 0) -> list[str]:
    """Return a line for a package, for its files, and then for the packages in it."""
    name = f"{folder.relative_to(ROOT).as_posix()}/" if depth == 0 else f"{folder.name}/"
    found = [f"{'  ' * depth}{name:<22}{summary(folder / '__init__.py')}"]
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    found += [f"{'  ' * depth}  {path.name:<20}{summary(path)}" for path in files]
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        found += lines(package, depth + 1)
    return found


def file_map() -> str:
    """Return the map of the library and of the reproduction."""
    return "\n".join([*lines(ROOT / "src" / "feddf"), *lines(ROOT / "reproduction")]) + "\n"


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(BLOCK.sub(lambda _: file_map(), page.read_text(encoding="utf-8")), encoding="utf-8")
