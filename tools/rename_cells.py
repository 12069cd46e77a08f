"""Give every kept run the name that its configuration has now, and prove that nothing else changed.

    python -m tools.rename_cells [results]

For a change of the names' rule, or of keys: a key that was renamed must still be understood in the kept config.toml.
Results that name runs are rewritten. Run it on a clean checkout and commit what it does by itself.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from feddf.runs.store import RunFolder
from reproduction.cells import hash_of


def contents(cells: Path) -> dict[str, list[str]]:
    """Return the SHA-256 of every file, by its run's name."""
    return {
        run.name: sorted(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in run.iterdir())
        for run in sorted(cells.iterdir())
    }


def main(results: Path) -> None:
    """Rename, rewrite, compare."""
    cells = results / "cells"
    before = contents(cells)
    names = {name: hash_of(RunFolder(cells / name).experiment()) for name in before}
    if len(set(names.values())) < len(names):
        sys.exit("two kept runs would have one name; nothing was changed")
    for old in names:
        (cells / old).rename(cells / f".{old}")
    for old, new in names.items():
        (cells / f".{old}").rename(cells / new)
    for file in sorted(results.glob("*/*.json")):
        text = file.read_text(encoding="utf-8")
        for old, new in names.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        file.write_text(text, encoding="utf-8")
    after = contents(cells)
    assert {names[old]: files for old, files in before.items()} == after, "a file is not what it was"
    changed = sum(old != new for old, new in names.items())
    print(f"{len(names)} runs, {changed} renamed; every file is byte for byte what it was")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results"))
