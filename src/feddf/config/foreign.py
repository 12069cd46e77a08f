"""What files made elsewhere say: TOML and JSON within bounds, and values of a checked form; else a ``ValueError``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from feddf.config.errors import shown

DEEPEST, MOST_BITS = 64, 64
"""Tables and lists inside each other, and bits of a number: no file of ours comes near, and code below may recurse."""

_form: Any = cache(TypeAdapter)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    return dict(_bounded(tomllib.loads, text))


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON file."""
    return _bounded(json.loads, content)


def _bounded(parse: Callable[[Any], Any], content: str | bytes) -> Any:
    large = f"a number in it has more than {MOST_BITS} bits"
    try:
        found = parse(content)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from None
    except ValueError as error:  # of its own kind: not TOML, not JSON, or not UTF-8
        raise ValueError(large) if type(error) is ValueError else error from None  # Python reads up to 4,300 digits
    level = [found]
    for _ in range(DEEPEST):
        if any(type(one) is int and one.bit_length() > MOST_BITS for one in level):
            raise ValueError(large)
        groups = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for group in groups for part in group]
        if not level:
            return found
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def validated(kind: Any, value: Any) -> Any:
    """Return a value that JSON can hold as the type (of pydantic's) that it must have; the error names the place."""
    try:
        return _form(kind).validate_json(json.dumps(value), strict=True)  # where lists are tuples, and tables classes
    except ValidationError as error:
        first = error.errors()[0]
        place, said = ".".join(str(part) for part in first["loc"])[:80] or "it", first["msg"]
        raise ValueError(f"{place} = {shown(first['input'])}: {said[0].lower()}{said[1:]}") from None
