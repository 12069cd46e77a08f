"""The experiments that come with feddf."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from feddf.config.errors import ConfigError, nearest


def presets() -> dict[str, str]:
    """Return the text of every preset by name."""
    folder = files("feddf.config") / "presets"
    found = sorted((entry.name, entry) for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for name, entry in found}


def read(name_or_file: str) -> dict[str, Any]:
    """Return the raw values of a preset or a TOML file."""
    path = Path(name_or_file)
    if path.suffix == ".toml" or path.is_file():
        try:
            return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a BOM
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    known = presets()
    if name_or_file not in known:
        raise ConfigError(f"no preset or file is called '{name_or_file}'; {nearest(name_or_file, known)}")
    return tomllib.loads(known[name_or_file])
