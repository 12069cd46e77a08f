"""Files that are never half-written, that are known to be whole when they are read, and whose they are.

A mark that only this user's feddf can make says whose a file is, so that no other's code is run unasked. The rule:
code that a user names in a command or in a TOML file of their own is trusted. A ``.pt2`` file, and whatever a folder
made elsewhere names, never is without ``--trust``. A list of one's own folders would not do instead: it knows paths,
and a folder made elsewhere can be put in the place of one's own.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from feddf.config.errors import FeddfError, one_line
from feddf.config.foreign import parse_json

Fits = Callable[[dict[str, Any]], bool]
LEFTOVER = ".tmp"  # how the name of a file ends while it is written
MOST_TEXT = 1 << 28  # bytes of a configuration or a log that are read: what is larger is none that feddf wrote
MOST_LINES, LONGEST_LINE = 1 << 30, 1 << 22  # bytes of a file of texts or of a table, and characters of one line


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file, old or new after a crash (of the machine too, if ``durable``), never half. A link is replaced."""
    with new_file(path, durable) as temporary:
        temporary.write_bytes(content)


@contextmanager
def new_file(path: Path, durable: bool = False) -> Iterator[Path]:
    """Give an empty file beside ``path`` to write to, which takes its place at the end of the block, or not at all.

    Its name cannot be foreseen, so no link in a folder made elsewhere leads what is written to another place. One that
    a crash left behind is removed by :func:`remove_leftovers`. What is ``durable`` outlasts a crash of the machine.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{LEFTOVER}")
    with naming(path):
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
        try:
            yield temporary
            if durable:
                _sync(temporary)
            temporary.replace(path)
            if durable:
                _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk itself."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove_leftovers(folder: Path) -> None:
    """Remove the files that a process was writing here when it was killed; no other process may be at work here."""
    for path in folder.glob(f".*{LEFTOVER}"):
        path.unlink(missing_ok=True)


def real_folder(path: Path) -> Path:
    """Return a folder that is there, made if need be, and no link to another; its parent must exist."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link to another folder; move what is there here", str(path))
    return path


def refuse_links(folder: Path) -> None:
    """Raise :class:`OSError` if a folder holds a link, or anything else that is neither a file nor a folder.

    What is written into such a folder could end up anywhere.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
            kind = "a link" if entry.is_symlink() else "no regular file"
            raise OSError(errno.ELOOP, f"it is {kind}, and nothing is written beside one; remove it", entry.path)


def read_regular(path: Path, most: int | None = MOST_TEXT) -> bytes:
    """Return the content of a regular file of ``most`` bytes; a pipe or a device, which might never end, is refused."""
    with open(_opened(path, os.O_RDONLY, most), "rb") as file:
        return file.read() if most is None else file.read(most)


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a regular file in UTF-8, with their ends; one that is too long is refused unread."""
    readable = one_line(ValueError, f"cannot read the text in {path}", ValueError)
    with open(_opened(path, os.O_RDONLY, MOST_LINES), encoding="utf-8-sig", newline="") as file, readable:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise ValueError(f"it has a line of {LONGEST_LINE} characters or more")
            yield line


def _opened(path: Path, flags: int, most: int | None = None) -> int:
    """Return the descriptor of a regular file of ``most`` bytes; anything else is refused without waiting for it."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and (most is None or found.st_size <= most):
        return descriptor
    os.close(descriptor)
    large = f"it has {found.st_size} bytes, and at most {most} are read"
    raise OSError(errno.EINVAL, large if stat.S_ISREG(found.st_mode) else "it is not a regular file", str(path))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the disk inside the block say which file it was about: a full disk alone says nothing."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def read_checked(path: Path, most: int | None = None) -> bytes:
    """Return a file's content if the SHA-256 in the file beside it (``.sha256``) is its own."""
    content = read_regular(path, most)
    expected = read_regular(path.with_suffix(".sha256")).decode("ascii", "replace").split()
    if not expected or hashlib.sha256(content).hexdigest() != expected[0]:
        raise ValueError("its checksum does not match")
    return content


def write_checked(path: Path, content: bytes) -> None:
    """Write a file, and its SHA-256 beside it in the form that the command sha256sum checks."""
    line = f"{hashlib.sha256(content).hexdigest()}  {path.name}\n"
    write_atomically(path.with_suffix(".sha256"), line.encode())  # first: a file without it does not count
    write_atomically(path, content)


def append_line(path: Path, line: str) -> None:
    """Add a line to a log, on disk when this returns. A link is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with naming(path), open(_opened(path, flags), "a", encoding="utf-8") as log:
        log.write(line + "\n")
        log.flush()
        os.fsync(log.fileno())


def read_json_lines(path: Path, fits: Fits = lambda one: True) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the objects in a log that fit in it, and the numbers of its damaged lines (a crash may cut the last)."""
    found: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, line in enumerate(BytesIO(read_regular(path)) if path.exists() else (), 1):
        try:
            value = parse_json(line.decode("utf-8"))
        except ValueError:  # not JSON, or not UTF-8, or brackets without end
            value = None
        if isinstance(value, dict) and fits(value):
            found.append(value)
        elif line.endswith(b"\n") and len(damaged) < 100:  # what follows the last newline was never finished
            damaged.append(number)
    return found, damaged


def keep_lines(path: Path, kept: Fits, fits: Fits) -> str | None:
    """Drop the objects of a log that are not to be kept.

    A log with damaged lines is first put aside as it is; what was wrong, and where it lies now, is returned.
    """
    if not path.exists():
        return None
    found, damaged = read_json_lines(path, fits)
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in range(1, 10_000))
    aside = next(name for name in names if not name.exists())
    if damaged:
        write_atomically(aside, read_regular(path))
    write_atomically(path, "".join(json.dumps(one) + "\n" for one in found if kept(one)).encode())
    where = f"{path} is damaged in line {', '.join(map(str, damaged[:5]))}"
    return f"{where}: the other lines are kept, and the file as it was is {aside.name}" if damaged else None


@contextmanager
def held(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold a lock file inside the block, or raise ``refusal`` if another process has it; it ends with the process.

    What is in the file stays as it is, and a link is not followed.
    """
    with open(_opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise refusal from error
        yield


def is_held(path: Path, table: Path = Path("/proc/locks")) -> bool:
    """Say whether a process of this machine holds a lock file, without touching the lock; ``False`` if unknown."""
    try:
        inode, lines = path.stat().st_ino, table.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return False
    return any("FLOCK" in line and f":{inode} " in line for line in lines)


# Whose a file is


def signed(content: bytes) -> str:
    """Return the mark of this content: an HMAC under a key in the user's own state folder."""
    return hmac.new(_key(), content, "sha256").hexdigest()


def is_mine(content: bytes, mark: object) -> bool:
    """Say whether a mark is the one that this user's feddf gave to the content."""
    return isinstance(mark, str) and hmac.compare_digest(mark.encode(), signed(content).encode())


def names_code(name: str) -> bool:
    """Say whether a name stands for code: a ``module:attribute``, whatever a module's file may be called."""
    module, _, attribute = name.partition(":")
    return bool(module and attribute)


class UntrustedError(FeddfError):
    """A file holds code, and it was not said that it may run."""

    exit_code = 2


def check_program(path: Path, trust: bool) -> None:
    """Raise :class:`UntrustedError` for a program of ``torch.export`` that the user does not trust.

    ``torch.export.load`` unpickles parts of the file and evaluates expressions in it: to read it is to run it.
    """
    if not trust:
        raise UntrustedError(
            f"{path}: a .pt2 file is a program, and torch runs code that it holds when it is read; where you trust its "
            "origin, say --trust (in Python trust=True), else ask for an .onnx or .safetensors file"
        )


def _key() -> bytes:
    size = 32
    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "feddf" / "key"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, secrets.token_bytes(size))
            path.chmod(0o600)
        key = path.read_bytes()
    except (OSError, RuntimeError):  # no home: then nothing is known to be one's own
        key = b""
    return key if len(key) == size else secrets.token_bytes(size)
