"""Give every kept run the keys and the name that its configuration has now, and prove that nothing else changed.

    python -m tools.rename_cells [results]

For a change of the names' rule, or of keys: keys of kept config.toml files that ``RENAMED`` lists get
their new names. Results that name runs, or show their configurations, are rewritten. Run it on a clean checkout and
commit what it does by itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from feddf.config.keys import flat, nested
from feddf.runs.store import RunFolder
from reproduction.cells import hash_of

_RENAMED = (
    ("data", "data", {"normalisation": "normalization", "size": "train_size"}),
    ("clients", "clients", {"number": "total", "spare": "over_selection", "deadline": "timeout"}),
    ("local", "local", {"batch": "batch_size", "rate": "lr", "decay": "lr_schedule", "proximal": "prox_mu"}),
    ("fusion", "fusion", {"average": "aggregation", "defence": "defense"}),
    ("teachers", "ensemble", {"ask": "cache", "average": "combine", "weights": "weights", "memory": "ema"}),
    ("teachers", "ensemble", {"swag_samples": "swag_samples", "swag_scale": "swag_scale"}),
    ("ensemble", "ensemble", {"average": "combine"}),
    ("distill", "distill", {"start": "init", "batch": "batch_size", "rate": "lr", "stop": "early_stopping"}),
    ("distill", "distill", {"keep_start": "keep_init", "check": "eval_every"}),
    ("student", "student", {"start": "init"}),
    ("run", "run", {"track": "loggers"}),
)
RENAMED = {f"{before}.{old}": f"{after}.{new}" for before, after, keys in _RENAMED for old, new in keys.items()}
RENAMED["about"] = "description"
"""Keys of version 0.1, and what they are called now."""

VALUES: dict[str, dict[Any, Any]] = {
    "ensemble.cache": {"once": True, "each-batch": False},
    "distill.early_stopping": {"steps": "none"},
}
"""Values of version 0.1 that are written in another way now."""


def translate(key: str, value: Any) -> tuple[str, Any]:
    """Return a key and its value as they are written now."""
    new = RENAMED.get(key, key)
    return new, VALUES.get(new, {}).get(value, value) if isinstance(value, str) else value


def renew(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with today's keys; the values of all keys stay what they were."""
    old = flat(config)
    new = dict(translate(*item) for item in old.items())
    assert len(new) == len(old), f"two keys became one in {old}"
    return nested({}, new)


def rewrite_config(file: Path) -> None:
    """Write a kept run's configuration with today's keys."""
    old = tomllib.loads(file.read_text(encoding="utf-8"))
    new = renew(old)
    if flat(new) != flat(old):
        file.write_text(tomli_w.dumps(new), encoding="utf-8")
    assert flat(tomllib.loads(file.read_text(encoding="utf-8"))) == flat(new), f"{file}: a value is not what it was"


def rewrite_result(file: Path, names: Mapping[str, str]) -> None:
    """Write a result with today's names of its runs, and today's keys in its configurations."""
    result = json.loads(file.read_text(encoding="utf-8"))
    for cell in result["cells"]:
        cell["configuration"] = renew(cell["configuration"])
        cell["hashes"] = [names.get(one, one) for one in cell["hashes"]]
    file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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
        rewrite_config(cells / name / "config.toml")
    names = {name: hash_of(RunFolder(cells / name).experiment()) for name in before}
    if len(set(names.values())) < len(names):
        sys.exit("two kept runs would have one name; no run was renamed")
    for old in names:
        (cells / old).rename(cells / f".{old}")
    for old, new in names.items():
        (cells / f".{old}").rename(cells / new)
    for file in sorted(results.glob("*/*.json")):
        rewrite_result(file, names)
    after = contents(cells)
    assert {names[old]: files for old, files in before.items()} == after, "a file is not what it was"
    changed = sum(old != new for old, new in names.items())
    print(f"{len(names)} runs, {changed} renamed; every file but config.toml is byte for byte what it was")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results"))
