"""Write docs/api.md: the names that ``import feddf`` offers, from their own signatures and docstrings.

And the tables of the keys that only ``feddf fuse`` has, at the end of docs/fuse.md.

python tools/api.py
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import formatannotation
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, get_origin

from pydantic import BaseModel
from typing_extensions import is_typeddict

import feddf
from feddf.config.fuse_config import FuseConfig, TeacherConfig
from feddf.config.keys import Key, keys_of, tables
from feddf.config.names import Names
from feddf.outputs import Outputs

WIDTH = 100

INTRODUCTION = """# Python reference

What `import feddf` offers, by the module that it comes from. Generated from the docstrings by `python tools/api.py`.
"""


def shown(value: object) -> str:
    """Return a default as a reader would write it."""
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}()"
    if isinstance(value, Outputs):
        return "classes()"
    if callable(value):
        name = getattr(value, "__name__", "_")
        return name if name[0].isalpha() else "..."
    plain = is_dataclass(value) and not isinstance(value, type) and value == type(value)()
    return f"{type(value).__name__}()" if plain else repr(value)


def annotated(hint: object) -> str:
    """Return a type without bounds, quotes and module names."""
    if get_origin(hint) is Annotated:
        hint = hint.__origin__  # type: ignore[attr-defined]
    text = hint if isinstance(hint, str) else getattr(hint, "__forward_arg__", None) or formatannotation(hint)
    return re.sub(r"\b(?!nn\b)(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def parameters(found: object) -> tuple[list[str], str]:
    """Return the arguments of a function or of a type, one text each, and what comes back."""
    if is_typeddict(found):
        return [f"{name}: {annotated(hint)}" for name, hint in found.__annotations__.items()], ""
    made = {field.name: field.default_factory for field in fields(found)} if is_dataclass(found) else {}
    called = found.__call__ if getattr(found, "_is_protocol", False) else found
    signature = inspect.signature(called)
    texts, keywords = [], False
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not keywords:
            texts.append("*")
        keywords = keywords or one.kind is one.KEYWORD_ONLY
        hint = "" if one.annotation is one.empty else f": {annotated(one.annotation)}"
        default = made[one.name]() if repr(one.default) == "<factory>" else one.default
        stars = {one.VAR_KEYWORD: "**", one.VAR_POSITIONAL: "*"}.get(one.kind, "")
        texts.append(f"{stars}{one.name}{hint}" + ("" if default is one.empty else f" = {shown(default)}"))
    back = "" if isinstance(found, type) and called is found else signature.return_annotation
    return texts, "" if back in ("", signature.empty) else f" -> {annotated(back)}"


def signature_of(name: str, found: object) -> str:
    """Return a name as it is called, on one line or with a line for each argument."""
    is_type = isinstance(found, type)
    if not (is_type or inspect.isfunction(found)) or (is_type and issubclass(found, Exception)):
        return name
    if is_type and issubclass(found, BaseModel):
        found.model_rebuild()  # its signature is complete only when it was used once
    arguments, back = parameters(found)
    line = f"{name}({', '.join(arguments)}){back}"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {one}," for one in arguments), f"){back}"])


def with_lists(doc: str) -> str:
    """Return a docstring in which the arguments are a list in Markdown."""

    def listed(block: re.Match[str]) -> str:
        entries = re.sub(r"\n {6,}", " ", block[1])
        return "Arguments:\n\n" + re.sub(r"(?m)^ {4}([\w, ]+): ", r"- `\1`: ", entries)

    return re.sub(r"(?m)^Args:\n((?: {4}.*\n?)+)", listed, doc)


def assigned(name: str) -> tuple[str, str]:
    """Return the assignment that defines a name, and the string below it."""
    body = ast.parse(inspect.getsource(import_module(feddf._HOME[name]))).body
    for one, after in pairwise(body):
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name and isinstance(after, ast.Expr):
            return ast.unparse(one), str(ast.literal_eval(after.value))
    raise ValueError(f"{name} is not explained where it is assigned")


def explained(name: str, found: object) -> tuple[str, str]:
    """Return how a name is called or defined, and its docstring."""
    if isinstance(found, Names):
        return name, f"{assigned(name)[1]}\n\nNames: {', '.join(f'``{one}``' for one in found)}."
    if isinstance(found, type(feddf.State)):
        return assigned(name)
    return signature_of(name, found), getattr(found, "__doc__", None) or ""


def text_of(name: str) -> str:
    """Return one name's entry."""
    signature, doc = explained(name, getattr(feddf, name))
    doc = with_lists(textwrap.dedent(inspect.cleandoc(doc)))
    doc = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", doc).replace("``", "`")
    examples = re.split(r"(?m)^(?=>>> )", doc, maxsplit=1)
    body = examples[0].strip()
    if "::" in body:  # a literal block of a docstring
        body = body.replace("::\n", ":\n")
    example = f"\n\n```text\n{examples[1].strip()}\n```" if len(examples) > 1 else ""
    return f"### `{name}`\n\n```text\n{signature}\n```\n\n{body}{example}\n"


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for module, names in groupby(feddf._HOME, key=feddf._HOME.__getitem__):
        parts.append(f"## {module}\n")
        parts += [text_of(name) for name in sorted(names)]
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
