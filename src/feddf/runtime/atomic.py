"""Files that are never half-written, and that are known to be whole when they are read."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a crash it is either the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_checked(path: Path) -> bytes:
    """Return a file's content if the SHA-256 in the file beside it (``.sha256``) is its own."""
    content = path.read_bytes()
    expected = path.with_suffix(".sha256").read_text().split()
    if not expected or hashlib.sha256(content).hexdigest() != expected[0]:
        raise ValueError("its checksum does not match")
    return content


def write_checked(path: Path, content: bytes) -> None:
    """Write a file, and its SHA-256 beside it in the form that the command sha256sum checks."""
    line = f"{hashlib.sha256(content).hexdigest()}  {path.name}\n"
    write_atomically(path.with_suffix(".sha256"), line.encode())  # first: a file without it does not count
    write_atomically(path, content)


def append_line(path: Path, line: str) -> None:
    """Add a line to a log, on disk when this returns."""
    with path.open("a", encoding="utf-8") as log:
        log.write(line + "\n")
        log.flush()
        os.fsync(log.fileno())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a log; a line cut off by a crash ends the list."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def keep_lines(path: Path, kept: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the objects of a log that are not to be kept."""
    if path.exists():
        lines = [json.dumps(found) + "\n" for found in read_json_lines(path) if kept(found)]
        write_atomically(path, "".join(lines).encode())


@contextmanager
def held(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold a lock file inside the block, or raise ``refusal`` if another process has it; it ends with the process."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise refusal from error
        yield
