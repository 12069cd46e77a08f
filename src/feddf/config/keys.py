"""Every key of a configuration: its full name, default, meaning and allowed values, read off the types."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from feddf.config.errors import ConfigError, nearest
from feddf.config.sections import PrototypeConfig, Section, SourceConfig, extra_of

SECTIONS = [
    *("", "data", "partition", "clients", "prototypes", "local", "pool", "pool.sources"),
    *("fusion", "ensemble", "distill", "fedma", "attack", "run"),
]
"""The sections in the order in which a reader wants them."""

RENAMED = {
    "about": "description",
    "data.normalisation": "data.normalization",
    "data.size": "data.train_size",
    "clients.number": "clients.total",
    "clients.spare": "clients.over_selection",
    "clients.deadline": "clients.timeout",
    "local.batch": "local.batch_size",
    "local.rate": "local.lr",
    "local.decay": "local.lr_schedule",
    "local.proximal": "local.prox_mu",
    "fusion.average": "fusion.aggregation",
    "fusion.defence": "fusion.defense",
    "teachers.ask": "ensemble.cache",
    "teachers.average": "ensemble.combine",
    "teachers.weights": "ensemble.weights",
    "teachers.memory": "ensemble.ema",
    "teachers.swag_samples": "ensemble.swag_samples",
    "teachers.swag_scale": "ensemble.swag_scale",
    "ensemble.average": "ensemble.combine",
    "distill.start": "distill.init",
    "distill.batch": "distill.batch_size",
    "distill.rate": "distill.lr",
    "distill.stop": "distill.early_stopping",
    "distill.keep_start": "distill.keep_init",
    "distill.check": "distill.eval_every",
    "student.start": "student.init",
    "run.track": "run.loggers",
}
"""Keys of version 0.1, and what they are called now."""

OPTIONS = ("methods", "seeds", "parallel", "target", "extensions")
"""Words of version 0.1 that are options of a command now."""

_TITLES = {"": "On top", "prototypes": "`[[prototypes]]`", "pool.sources": "An entry of `pool.sources`"}


@dataclass(frozen=True)
class Key:
    """One key, as ``feddf config`` and the documentation show it."""

    name: str
    default: Any
    allowed: str
    meaning: str
    kind: str

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def shown_default(self) -> str:
        """The default as TOML would have it."""
        if self.default is PydanticUndefined:
            return "needed"
        if self.default is None:
            return "unset"
        return str(self.default).lower() if isinstance(self.default, bool) else repr(self.default).replace("'", '"')


@cache
def keys_of(kind: type[Section]) -> dict[str, Key]:
    """Return every key of a kind of settings by its full name, section by section."""
    found: dict[str, Key] = {}
    for name, field in kind.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            found |= {f"{name}.{key.name}": _prefixed(name, key) for key in keys_of(section).values()}
        else:
            found[name] = _key(name, field)
    return found


def _section(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, if it holds one, or may hold one."""
    for one in (annotation, *(get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ())):
        if isinstance(one, type) and issubclass(one, Section):
            return one
    return None


@cache
def all_keys() -> dict[str, Key]:
    """Return every key of an experiment, with those of a prototype and of a pool's source."""
    from feddf.config.experiment import Experiment  # it is built on this module

    found = dict(keys_of(Experiment))
    for name, inner in (("prototypes", PrototypeConfig), ("pool.sources", SourceConfig)):
        found |= {f"{name}.{key.name}": _prefixed(name, key) for key in keys_of(inner).values()}
    return dict(sorted(found.items(), key=lambda item: SECTIONS.index(item[0].rpartition(".")[0])))


def default_of(name: str) -> Any:
    """Return the default of a key by its full name."""
    return all_keys()[name].default


def is_free(name: str, kind: type[Section]) -> bool:
    """Say whether a key may change when a run is resumed: whether it changes no byte of a model."""
    known = keys_of(kind)
    return name in known and known[name].kind == "execution"


def resolve(word: str, kind: type[Section]) -> str:
    """Return the full name of a key, of which the last part is enough where only one key has it.

    >>> from feddf.config.experiment import Experiment
    >>> resolve("alpha", Experiment), resolve("local.epochs", Experiment)
    ('partition.alpha', 'local.epochs')
    """
    known = keys_of(kind)
    free = [name for name in known if word.startswith(f"{name}.")]  # an entry of a table of options
    if word in known or (free and known[free[0]].allowed == "a table"):
        return word
    found = [key.name for key in known.values() if key.last == word]
    if len(found) > 1:
        raise ConfigError(f"'{word}' could mean {' or '.join(found)}; write the full name")
    if not found:
        raise ConfigError(f"unknown key '{word}'; {suggestion(word, kind)}")
    return found[0]


def suggestion(word: str, kind: type[Section]) -> str:
    """Return the end of a sentence that suggests the key that was probably meant."""
    known, (word, entries) = keys_of(kind), re.subn(r"\.\d+", "", word)
    section, _, last = word.rpartition(".")
    if entries:  # of a list of tables, which have keys of their own
        known = {name: key for name, key in all_keys().items() if name.startswith(f"{section}.")} or known
    if said := _called_now(word, known) or _inside(word, known):
        return said
    if same := [key.name for key in known.values() if key.last == last]:
        return f"did you mean {' or '.join(map(repr, same))}?"
    plain = {re.sub(r"[._]", "", name): name for name in known}
    near = difflib.get_close_matches(re.sub(r"[._]", "", word), plain, n=1, cutoff=0.75)
    if near:
        return f"did you mean '{plain[near[0]]}'?"
    by_last = {key.last: key.name for key in known.values() if not section or key.name.startswith(f"{section}.")}
    near = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
    if near:
        return f"did you mean '{by_last[near[0]]}'?"
    sections = list(dict.fromkeys(name.partition(".")[0] for name in known if "." in name))
    return _inside(section, known) or f"'feddf config' lists all keys; the sections are: {', '.join(sections)}"


def _called_now(word: str, known: Mapping[str, Key]) -> str:
    """Say what a key of version 0.1 is called now, named in full or by its last part."""
    if word in OPTIONS:
        return f"it is the option --{word} now"
    found = dict.fromkeys(new for old, new in RENAMED.items() if f".{old}".endswith(f".{word}") and new in known)
    return f"it is called {' or '.join(map(repr, found))} now" if found else ""


def _inside(section: str, known: Mapping[str, Key]) -> str:
    found = [key.last for name, key in known.items() if name.rpartition(".")[0] == section != ""]
    return f"the keys of [{section}] are: {', '.join(found)}" if found else ""


def short(name: str) -> str:
    """Return the shortest name under which a key is known: its last part, if no other key ends in it."""
    last = name.rpartition(".")[2]
    return last if sum(key.last == last for key in all_keys().values()) == 1 else name


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one dictionary with full names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def nested(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables with some values replaced, by their full names."""
    result = {name: nested(value, {}) if isinstance(value, Mapping) else value for name, value in values.items()}
    for name, value in changes.items():
        *tables, last = name.split(".")
        table: Any = result
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError.at(name, value, f"'{part}' is not a section of this configuration")
        table[last] = value
    return result


def find(word: str) -> list[Key]:
    """Return the keys that a word is about: one key, all of a section, or those that are called something like it."""
    known = all_keys()
    if word in known:
        return [known[word], *(key for name, key in known.items() if name.startswith(f"{word}."))]
    found = [key for name, key in known.items() if name.startswith(f"{word}.")]
    found = found or [key for key in known.values() if key.last == word]
    if not found:
        raise ConfigError(f"no key or section is called '{word}'; {_called_now(word, known) or nearest(word, known)}")
    return found


def markdown() -> str:
    """Return the reference of all keys as Markdown, a table for each section."""
    return tables(all_keys(), {section: _TITLES.get(section, f"`[{section}]`") for section in SECTIONS}, "##")


def tables(known: Mapping[str, Key], titles: Mapping[str, str], level: str) -> str:
    """Return a Markdown table of its keys for each section, under its title."""
    parts = []
    for section, title in titles.items():
        rows = [key for name, key in known.items() if name.rpartition(".")[0] == section]
        lines = [f"{level} {title}\n", "| key | default | allowed | meaning |", "|---|---|---|---|"]
        lines += [f"| `{key.last}` | `{key.shown_default}` | {key.allowed} | {key.meaning} |" for key in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _prefixed(section: str, key: Key) -> Key:
    return Key(f"{section}.{key.name}", key.default, key.allowed, key.meaning, key.kind)


def _key(name: str, field: FieldInfo) -> Key:
    extra = extra_of(field)
    allowed = _allowed(field, extra)
    default = field.default if field.default_factory is None else field.get_default(call_default_factory=True)
    return Key(name, default, allowed, field.description or "", extra.get("kind", "task"))


def _allowed(field: FieldInfo, extra: Mapping[str, Any]) -> str:
    if extra["names"] is not None:
        names = [
            *([extra["also"]] if extra["also"] else []),
            *(f"{n}PATH" if n[-1] == ":" else n for n in extra["names"]),
        ]
        return ", ".join(names) + ", or module:attribute"
    return _type_text(field.annotation) + _bounds_text(field)


def _type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(str(argument) for argument in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type_text(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        return {PrototypeConfig: "names or tables", SourceConfig: "names or tables"}.get(arguments[0], "names")
    if origin is dict:
        return "a table"
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}.get(annotation, "text")


def _bounds_text(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{text} {getattr(bound, name):g}"
        for bound in field.metadata
        for name, text in words.items()
        if hasattr(bound, name)
    ]
    return f" {' and '.join(found)}" if found else ""
