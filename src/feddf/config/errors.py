"""A user's mistake is one line that says what was given and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self


class FeddfError(Exception):
    """Something that the user can put right; the message is one line, and ``exit_code`` is the command line's."""

    exit_code = 1


class ConfigError(FeddfError):
    """A mistake in a configuration: one line that names the key, the value and what is allowed."""

    exit_code = 2

    @classmethod
    def at(cls, key: str, given: object, allowed: str) -> Self:
        """Return the error for one key."""
        return cls(f"{key} = {shown(given)}: {allowed}")


def shown(value: object) -> str:
    """Return a value as an error message shows it."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind if it has none; a name in it may not be UTF-8."""
    return (str(error).encode("utf-8", "replace").decode().strip().splitlines() or [type(error).__name__])[0]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the most similar known word, or lists all of them."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(names)}"


def reason(error: BaseException) -> str:
    """Return an error's kind and the first line of its message."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"


@contextmanager
def one_line(kind: Callable[[str], Exception], said: str = "", of: Any = Exception) -> Iterator[None]:
    """Turn what goes wrong in a block into one line: ``said`` and why; an error of ours is one already.

    A library may fail in any way on a damaged file, so unless ``of`` names them, these are all errors.
    """
    try:
        yield
    except of as error:
        if isinstance(error, FeddfError) and of is Exception:
            raise
        raise kind(f"{said}: {first_line(error)}" if said else first_line(error)) from error
