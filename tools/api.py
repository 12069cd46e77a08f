"""Write docs/api.md: the names that ``import feddf`` offers, from their own signatures and docstrings.

And the tables of the keys that only ``feddf fuse`` has, at the end of docs/fuse.md.

python tools/api.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

from pydantic import BaseModel

import feddf
from feddf.config.fuse_config import FuseConfig, TeacherConfig
from feddf.config.keys import Key, keys_of, tables

INTRODUCTION = """# Python reference

What `import feddf` offers, by the module that it comes from. Generated from the docstrings by `python tools/api.py`.
"""


def text_of(name: str) -> str:
    """Return one name's entry."""
    found = getattr(feddf, name)
    doc = "" if isinstance(found, type(feddf.State)) else (getattr(found, "__doc__", None) or "")
    doc = textwrap.dedent(inspect.cleandoc(doc))
    doc = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", doc).replace("``", "`")
    doc = re.sub(r"(?m)^(?=>>> )", "", doc)
    if callable(found) and (inspect.isfunction(found) or inspect.isclass(found)):
        if isinstance(found, type) and issubclass(found, BaseModel):
            found.model_rebuild()  # its signature is complete only when it was used once
        try:
            signature = str(inspect.signature(found)).replace("typing.", "")  # 3.12 leaves it out
        except ValueError:
            signature = "(...)"
    else:
        signature = ""
    if len(signature) > 160 or "**data" in signature or " at 0x" in signature:
        signature = "(...)"
    examples = re.split(r"(?m)^(?=>>> )", doc, maxsplit=1)
    body = examples[0].strip()
    if "::" in body:  # a literal block of a docstring
        body = body.replace("::\n", ":\n")
    shown = f"\n\n```text\n{examples[1].strip()}\n```" if len(examples) > 1 else ""
    return f"### `{name}`\n\n```text\n{name}{signature}\n```\n\n{body}{shown}\n"


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for module, names in feddf._HOMES.items():
        parts.append(f"## feddf.{module}\n")
        parts += [text_of(name) for name in sorted(names.split())]
    return "\n".join(parts)


def fuse_keys() -> dict[str, Key]:
    """Return every key of a fusion by its full name, with those of a teacher."""
    return keys_of(FuseConfig) | {f"teachers.{name}": known for name, known in keys_of(TeacherConfig).items()}


def fuse_tables() -> str:
    """Return the keys that only a fusion has, a table for each section."""
    titles = {"": "On top", "teachers": "`[[teachers]]`", "student": "`[student]`", "ensemble": "`[ensemble]`"}
    return tables(fuse_keys(), {**titles, "validation": "`[validation]` and `[test]`"}, "###")


if __name__ == "__main__":
    docs = Path(__file__).parents[1] / "docs"
    (docs / "api.md").write_text(page(), encoding="utf-8")
    text, *_ = (docs / "fuse.md").read_text(encoding="utf-8").partition("### On top\n")
    (docs / "fuse.md").write_text(text + fuse_tables(), encoding="utf-8")
