"""Files that are never half-written, and that are known to be whole when they are read."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def checksum_line(path: Path, content: bytes) -> bytes:
    """Return what stands in the ``.sha256`` beside a file, in the form that the command sha256sum checks."""
    return f"{hashlib.sha256(content).hexdigest()}  {path.name}\n".encode()


@contextmanager
def held(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold a lock file inside the block, or raise ``refusal`` if another process has it; it ends with the process."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise refusal from error
        yield
