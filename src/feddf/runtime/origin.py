"""Whose a file is: a mark that only this user's feddf can make, so that code is run for nobody else unasked.

The rule: code that a user names in a command or in a TOML file of their own is trusted. A ``.pt2`` file, and whatever a
folder made elsewhere names, never is without ``--trust``. A list of one's own folders would not do instead: it knows
paths, and a folder made elsewhere can be put in the place of one's own.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from feddf.config.errors import FeddfError
from feddf.runtime.atomic import write_atomically

KEY_BYTES = 32


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
    """A file holds code, and nobody said that it may run."""

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
    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "feddf" / "key"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, secrets.token_bytes(KEY_BYTES))
            path.chmod(0o600)
        key = path.read_bytes()
    except (OSError, RuntimeError):  # no home: then nothing is known to be one's own
        key = b""
    return key if len(key) == KEY_BYTES else secrets.token_bytes(KEY_BYTES)
