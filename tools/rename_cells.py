"""Give every kept run the keys and the name that its configuration has now, and prove that nothing else changed.

    python tools/rename_cells.py [results]

For a change of the names' rule, or of keys: keys of kept config.toml files that ``feddf.config.keys.RENAMED`` lists get
their new names. Results that name runs are rewritten. Run it on a clean checkout and commit what it does by itself.
"""

from __future__ import annotations

import hashlib
import sys
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from feddf.config.keys import RENAMED, flat, nested
from feddf.runs.store import RunFolder
from reproduction.cells import hash_of

VALUES: dict[str, dict[Any, Any]] = {
    "ensemble.cache": {"once": True, "each-batch": False},
    "distill.early_stopping": {"steps": "none"},
}
"""Values of version 0.1 that are written in another way now."""


def translate(key: str, value: Any) -> tuple[str, Any]:
    """Return a key and its value as they are written now."""
    new = RENAMED.get(key, key)
    return new, VALUES.get(new, {}).get(value, value) if isinstance(value, str) else value


def rewrite(config: Path) -> None:
    """Write a configuration with today's keys; the values of all keys stay what they were."""
    old = flat(tomllib.loads(config.read_text(encoding="utf-8")))
    new = dict(translate(*item) for item in old.items())
    if new != old:
        config.write_text(tomli_w.dumps(nested({}, new)), encoding="utf-8")
    found = flat(tomllib.loads(config.read_text(encoding="utf-8")))
    assert found == new, f"{config}: a value is not what it was"
    assert len(found) == len(old), f"{config}: two keys became one"


def contents(cells: Path) -> dict[str, list[str]]:
    """Return the SHA-256 of every file but the configuration, by its run's name."""
    return {
        run.name: sorted(
            f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"
            for file in run.iterdir()
            if file.name != "config.toml"
        )
        for run in sorted(cells.iterdir())
    }


def main(results: Path) -> None:
    """Rewrite, rename, compare."""
    cells = results / "cells"
    before = contents(cells)
    for name in before:
        rewrite(cells / name / "config.toml")
    names = {name: hash_of(RunFolder(cells / name).experiment()) for name in before}
    if len(set(names.values())) < len(names):
        sys.exit("two kept runs would have one name; no run was renamed")
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
    print(f"{len(names)} runs, {changed} renamed; every file but config.toml is byte for byte what it was")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results"))
