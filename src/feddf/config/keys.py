"""Every key of a configuration, read off the types, and the other names that stand for keys: short ones, a method's.

``fedprox``, ``feddf-plus`` and ``feddf+prox+swag`` are methods by one name, which stands for a method and other keys.
"""

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
from feddf.config.names import METHODS
from feddf.config.names import PARTS as NAMED
from feddf.config.sections import PrototypeConfig, Section, SourceConfig

SECTIONS = [
    *("", "data", "partition", "clients", "prototypes", "local", "pool", "pool.sources"),
    *("fusion", "ensemble", "distill", "answers", "fedma", "privacy", "attack", "run"),
]
"""The sections in the order in which a reader wants them."""


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
        default = list(self.default) if isinstance(self.default, tuple) else self.default
        return str(default).lower() if isinstance(default, bool) else repr(default).replace("'", '"')


@cache
def keys_of(kind: type[Section], prefix: str = "") -> dict[str, Key]:
    """Return every key of a kind of settings by its full name, section by section."""
    found: dict[str, Key] = {}
    for name, field in kind.model_fields.items():
        section = _section(field.annotation)
        found |= keys_of(section, f"{prefix}{name}.") if section else {prefix + name: _key(prefix + name, field)}
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

    found = keys_of(Experiment) | keys_of(PrototypeConfig, "prototypes.") | keys_of(SourceConfig, "pool.sources.")
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
    if word in ("methods", "seeds", "parallel", "target", "extensions"):
        return f"it is the option --{word}"
    if said := _inside(word, known):
        return said
    if same := [key.name for key in known.values() if key.last == last]:
        return f"did you mean {' or '.join(map(repr, same))}?"
    plain = {re.sub(r"[._]", "", name): name for name in known}
    by_last = {key.last: key.name for key in known.values() if not section or key.name.startswith(f"{section}.")}
    for given, names in ((re.sub(r"[._]", "", word), plain), (last, by_last)):
        if near := difflib.get_close_matches(given, names, n=1, cutoff=0.75):
            return f"did you mean '{names[near[0]]}'?"
    sections = list(dict.fromkeys(name.partition(".")[0] for name in known if "." in name))
    return _inside(section, known) or f"'feddf config' lists all keys; the sections are: {', '.join(sections)}"


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
    found = [key for name, key in known.items() if name == word or name.startswith(f"{word}.")]
    found = found or [key for key in known.values() if key.last == word]
    if not found:
        last = [key.last for key in known.values()]
        raise ConfigError(f"no key or section is called '{word}'; {nearest(word, dict.fromkeys([*known, *last]))}")
    return found


def markdown() -> str:
    """Return the reference of all keys as Markdown, a table for each section."""
    own = {"": "On top", "prototypes": "`[[prototypes]]`", "pool.sources": "An entry of `pool.sources`"}
    return tables(all_keys(), {section: own.get(section, f"`[{section}]`") for section in SECTIONS}, "##")


def tables(known: Mapping[str, Key], titles: Mapping[str, str], level: str) -> str:
    """Return a Markdown table of its keys for each section, under its title."""
    parts = []
    for section, title in titles.items():
        rows = [key for name, key in known.items() if name.rpartition(".")[0] == section]
        lines = [f"{level} {title}\n", "| key | default | allowed | meaning |", "|---|---|---|---|"]
        lines += [f"| `{key.last}` | `{key.shown_default}` | {key.allowed} | {key.meaning} |" for key in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _key(name: str, field: FieldInfo) -> Key:
    extra: Any = field.json_schema_extra  # what sections.key() noted
    default = field.get_default(call_default_factory=True)
    if extra["names"] is None:
        allowed = _type_text(field.annotation) + _bounds_text(field)
    else:
        names = [extra["also"], *(f"{n}PATH" if n[-1] == ":" else n for n in extra["names"])]
        allowed = ", ".join(filter(None, names)) + ", or module:attribute"
    return Key(name, default, allowed, field.description or "", extra["kind"])


def _type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(str(argument) for argument in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type_text(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        return "names or tables" if arguments[0] in (PrototypeConfig, SourceConfig) else "names"
    plain = {dict: "a table", int: "whole number", float: "number", bool: "true or false"}
    return plain.get(origin or annotation, "text")


def _bounds_text(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [(text, getattr(bound, name, None)) for bound in field.metadata for name, text in words.items()]
    found = " and ".join(f"{text} {bound:g}" for text, bound in bounds if bound is not None)
    return f" {found}" if found else ""


# Methods by one name


PARTS: dict[str, tuple[str, Any]] = {
    "prox": ("local.prox_mu", 0.01),
    "momentum": ("fusion.momentum", 0.2),
    "adam": ("local.optimizer", "adam"),
    "decay": ("local.lr_schedule", "linear"),
    "adjusted": ("local.logit_adjustment", 1.0),
    "robust": ("fusion.defense", "robust"),
    "drop-worst": ("fusion.drop_worst", "paper"),
    "swag": ("ensemble.swag_samples", 10),
    "swa": ("distill.optimizer", "swa"),
    "sgd": ("distill.optimizer", "sgd"),
    "previous": ("distill.init", "previous"),
    "best": ("distill.init", "best"),
    "probabilities": ("ensemble.combine", "probabilities"),
    "class-rows": ("fusion.aggregation", "class-counts"),
    "class-counts": ("ensemble.weights", "class-counts"),
    "certainty": ("ensemble.weights", "certainty"),
    "views": ("pool.views", 4),
    "ema": ("ensemble.ema", 0.5),
    "held-out": ("distill.early_stopping", "held-out-loss"),
    "steps": ("distill.early_stopping", "none"),
    "answers": ("fusion.exchange", "answers"),
    "absolute": ("answers.distance", "absolute"),
    "entropy-reduced": ("ensemble.combine", "entropy-reduced"),
    "robust-mean": ("ensemble.combine", "cronus"),
}
"""What may be added to a method's name with a plus, and the key and value that it stands for."""

SHORT = {
    "fedprox": "fedavg+prox",
    "fedavgm": "fedavg+momentum",
    "feddistill": "feddf+swag+swa",
    "feddf-plus": "feddf+adjusted+class-counts+probabilities+class-rows",
    "feddf-plus-private": "feddf+adjusted",
    "fedmd": "feddf+answers+absolute",
    "ds-fl": "feddf+answers+entropy-reduced",
    "cronus": "feddf+answers+robust-mean",
}
"""Names for methods with parts."""


def changes_of(method: str) -> tuple[str, dict[str, Any]]:
    """Return the method without its parts, and the keys and values that the parts stand for.

    >>> changes_of("fedprox")
    ('fedavg', {'local.prox_mu': 0.01})
    >>> changes_of("fedprox+momentum")
    ('fedavg', {'local.prox_mu': 0.01, 'fusion.momentum': 0.2})
    """
    first, *added = method.split("+")
    name, *parts = [*SHORT.get(first, first).split("+"), *added]
    if (name not in METHODS and ":" not in name) or any(part not in PARTS and part not in NAMED for part in parts):
        allowed = f"{nearest(method, [*METHODS, *SHORT])} (your own is written as module:attribute)"
        if "+" in method:
            known = dict.fromkeys([*PARTS, *NAMED])
            allowed = f"parts that can be added to a method are {', '.join(f'+{part}' for part in known)}"
        raise ConfigError.at("fusion.method", method, allowed)
    named = tuple(part for part in parts if part not in PARTS)
    changes = dict(PARTS[part] for part in parts if part in PARTS)
    return name, {**changes, "fusion.parts": named} if named else changes


def short_name(method: str, values: Mapping[str, Any]) -> str:
    """Return the name of a method in which some keys have other values: that which stands for most of them.

    A number may be another than the name's own, a word may not.

    >>> short_name("fedavg", {"local.prox_mu": 0.1}), short_name("feddf", {"local.prox_mu": 0.1})
    ('fedprox', 'feddf')
    """
    stands_for = {name: changes_of(name) for name in SHORT}
    fitting = [
        name
        for name, (plain, implied) in stands_for.items()
        if plain == method and implied.keys() <= values.keys()
        if all(values[key] == value for key, value in implied.items() if isinstance(value, str))
    ]
    return max(fitting, key=lambda name: len(stands_for[name][1]), default=method)
