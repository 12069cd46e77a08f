"""What ``feddf predict`` is given: files and folders, as named inputs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from feddf.data.files import SUFFIXES
from feddf.saved.model import LoadedModel, ModelError
from feddf.saved.preprocess import Images, Tokens


def inputs_of(model: LoadedModel, paths: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (name, input) for every image file, also below folders, or for every line of text files."""
    if isinstance(model.preprocess, Images):
        found: list[tuple[str, Any]] = [(str(path), path) for text in paths for path in _images(Path(text))]
    elif isinstance(model.preprocess, Tokens):
        found = [(f"{text}:{number}", line) for text in paths for number, line in enumerate(_lines(Path(text)), 1)]
    else:
        raise ModelError("only models of images and texts can be asked from the command line; use feddf.load_model")
    if not found:
        raise ModelError(f"there is nothing to classify in {', '.join(paths)}")
    return found


def given(found: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return the inputs without their names."""
    return [one for _, one in found]


def _images(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(one for one in path.rglob("*") if one.suffix.lower() in SUFFIXES and one.is_file())
    if not path.is_file():
        raise ModelError(f"there is no image file or folder {path}")
    return [path]


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read the texts in {path}: {error}") from error
