"""A whole experiment: its sections, whether they fit together, and how it is read from presets, files and words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from pydantic import ValidationError, field_validator, model_validator

from feddf.config import sections
from feddf.config.errors import ConfigError, nearest, one_line, shown
from feddf.config.foreign import parse_toml
from feddf.config.keys import all_keys, changes_of, default_of, flat, is_free, keys_of, nested, resolve, suggestion
from feddf.config.names import METHODS
from feddf.config.privacy import PrivacyConfig, privacy_mistakes
from feddf.config.sections import Section, key

Mistake = tuple[bool, str, str]
"""(is it so?, the key, what would be right)."""

LABELS = "it needs validation data; set data.validation above 0"


AROUND = [
    *("fusion.defense", "fusion.trust", "fusion.drop_worst", "fusion.guard", "fusion.batchnorm", "fusion.aggregation"),
    *("fusion.momentum", "fusion.parts"),
]
"""Keys of what looks at clients' weights."""


class Settings(Section):
    """All that a run is made of except its data and architectures."""

    name: str = key("experiment", "a name for folders and titles", pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)
    description: str = key("", "one line about the experiment")
    seed: int = key(0, "every random choice follows from it", ge=0)
    rounds: int = key(100, "T, the communication rounds", ge=1)
    clients: sections.ClientsConfig = sections.ClientsConfig()
    local: sections.LocalConfig = sections.LocalConfig()
    fusion: sections.FusionConfig = sections.FusionConfig()
    ensemble: sections.EnsembleConfig = sections.EnsembleConfig()
    distill: sections.DistillConfig = sections.DistillConfig()
    answers: sections.AnswersConfig = sections.AnswersConfig()
    fedma: sections.FedMAConfig = sections.FedMAConfig()
    run: sections.RunConfig = sections.RunConfig()

    @model_validator(mode="before")
    @classmethod
    def _spell_the_method_out(cls, given: Any) -> Any:
        """Return tables in which ``fusion.method`` is a plain method and its parts are keys of their own.

        A part stands for its value in :data:`feddf.config.keys.PARTS`, unless the configuration has another than the
        default (``prox_mu = 0.1`` is FedProx's).
        """
        fusion = given.get("fusion") if isinstance(given, Mapping) else None
        method = fusion.get("method") if isinstance(fusion, Mapping) else None
        if not isinstance(method, str) or method in METHODS:
            return given
        name, changes = changes_of(method)
        tables = {name: part.model_dump() if isinstance(part, Section) else part for name, part in given.items()}
        set_ = flat(tables)
        mine = {key: value for key, value in changes.items() if set_.get(key, default_of(key)) == default_of(key)}
        return nested(tables, {"fusion.method": name, **mine})

    @property
    def distills(self) -> bool:
        """Whether students are distilled; a user's own method does what it does."""
        return self.fusion.method == "feddf"

    def mistakes(self, *, labeled: bool, pooled: bool) -> Iterator[Mistake]:
        """Yield what is right alone and wrong together, given whether the server has labeled data, and a pool."""
        if self.distills:
            yield from self._mistakes_in_distillation(labeled, pooled)
        yield from self._mistakes_in_ensemble(labeled)
        yield from self._mistakes_in_fusion(labeled, pooled)
        if self.fusion.method == "fedma":
            yield from self._mistakes_in_matching()
        if self.fusion.exchange == "answers":
            yield from self._mistakes_in_exchange()
        elsewhere = self.run.ray_address is not None and self.run.engine != "ray"
        yield elsewhere, "run.ray_address", "it is the address of a Ray cluster; set run.engine = 'ray'"
        total = self.clients.total
        least = f"no client would be sampled from {total}; it must be above {0.5 / total:g}"
        yield self.clients.cohort < 1, "clients.fraction", least

    def changed(self, names: Iterable[str], why: str) -> Iterator[Mistake]:
        """Yield which of some keys do not have their defaults, which they must have."""
        values, known = flat(self.model_dump()), all_keys()
        for name in names:
            usual = known[name].shown_default.replace('"', "'")
            yield values[name] != known[name].default, name, f"{why}; leave it at {usual}"

    def _mistakes_in_distillation(self, labeled: bool, pooled: bool) -> Iterator[Mistake]:
        stop, inputs = self.distill.early_stopping, "for instance pool.sources = ['cifar100']"
        yield not pooled, "pool.sources", f"method 'feddf' needs unlabeled inputs, {inputs}"
        held_out = "hold some validation data out, or set distill.early_stopping = 'held-out-loss' or 'none'"
        yield stop == "validation" and not labeled, "data.validation", held_out
        scored = "the best is found by a score; set distill.early_stopping = 'validation' or 'held-out-loss'"
        yield self.distill.init == "best" and stop == "none", "distill.init", scored

    def _mistakes_in_ensemble(self, labeled: bool) -> Iterator[Mistake]:
        ensemble, sampled = self.ensemble, self.ensemble.swag_samples > 0
        whole = "what earlier rounds answered is known for the whole pool only; it needs ensemble.cache = true"
        yield ensemble.ema > 0 and not ensemble.cache, "ensemble.ema", whole
        yield sampled and not ensemble.cache, "ensemble.swag_samples", "only with ensemble.cache = true"
        if ensemble.groups:
            alone = ("ensemble.weights", "ensemble.cache", "fusion.trust", "fusion.defense")
            yield from self.changed(alone, "averages of groups teach, and no client is weighed or asked alone")
        measured = ensemble.weights == "validation"
        yield measured and not labeled, "ensemble.weights", LABELS
        other = "sampled teachers have no validation accuracy of their own; use other weights, or swag_samples = 0"
        yield measured and sampled, "ensemble.weights", other

    def _mistakes_in_fusion(self, labeled: bool, pooled: bool) -> Iterator[Mistake]:
        fusion, trust = self.fusion, self.fusion.trust
        yield fusion.drop_worst != "none" and not labeled, "fusion.drop_worst", LABELS
        again = "statistics are estimated again on unlabeled data; name a pool"
        yield fusion.batchnorm == "recalibrate" and not pooled, "fusion.batchnorm", again
        yield trust == "mixture" and not labeled, "fusion.trust", f"{LABELS}, or use 'expguard'"
        compared = "teachers are compared on unlabeled data; name a pool, or use 'mixture'"
        yield trust == "expguard" and not pooled, "fusion.trust", compared
        neither = "models are compared on validation data or on unlabeled inputs, and there are neither"
        yield fusion.guard is not None and not labeled and not pooled, "fusion.guard", neither

    def _mistakes_in_matching(self) -> Iterator[Mistake]:
        """Yield what FedMA cannot do: its layers are matched one by one, and grow from round to round."""
        yield from self.changed(AROUND, "FedMA's layers grow and are matched one by one")
        yield from self.changed(["local.binary"], "FedMA matches weights of full precision")

    def _mistakes_in_exchange(self) -> Iterator[Mistake]:
        """Yield what needs clients' models, which they keep to themselves."""
        kept = "clients keep their models, and answers are for the pool only"
        yield not self.distills, "fusion.exchange", "only students learn from answers: fusion.method = 'feddf'"
        yield from self.changed(["ensemble.cache", "ensemble.groups", "ensemble.swag_samples", "distill.init"], kept)
        yield self.ensemble.weights == "validation", "ensemble.weights", f"{kept}; choose others"

    def refuse(self, mistakes: Iterator[Mistake]) -> None:
        """Raise :class:`ConfigError` for the first mistake that is so."""
        for wrong, where, allowed in mistakes:
            if wrong:
                values = flat(self.model_dump())  # a strategy that is handed its data has no section for them
                given = values.get(where, default_of(where))
                if where == "pool.sources":
                    given = ", ".join(source["name"] for source in given) or None
                raise ConfigError.at(where, list(given) if isinstance(given, tuple) else given, allowed)


class Experiment(Settings):
    """Everything that determines a run: the data, who has them, the architectures, and the settings."""

    data: sections.DataConfig
    partition: sections.PartitionConfig = sections.PartitionConfig()
    prototypes: tuple[sections.PrototypeConfig, ...] = key(..., "architectures, dealt to clients in turn", min_length=1)
    pool: sections.PoolConfig = sections.PoolConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    attack: sections.AttackConfig = sections.AttackConfig()

    @field_validator("prototypes", mode="before")
    @classmethod
    def _names_with_commas(cls, given: Any) -> Any:
        return tuple(part.strip() for part in given.split(",")) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        labels = [prototype.label for prototype in self.prototypes]
        if len(set(labels)) < len(labels):
            raise ConfigError.at("prototypes", labels, "two have the same name; give each a name of its own")
        if len(labels) > self.clients.total:
            raise ConfigError.at("prototypes", labels, f"there are more prototypes than clients ({self.clients.total})")
        self.refuse(self.mistakes(labeled=self.data.validation > 0, pooled=bool(self.pool.sources)))
        self.refuse(self._mistakes_in_pool())
        self.refuse(privacy_mistakes(self))
        return self

    def _mistakes_in_pool(self) -> Iterator[Mistake]:
        names, where = [source.name for source in self.pool.sources], "pool.sources"
        own = "the pool must not be the clients' own data; the source 'train' takes a share of them, without labels"
        yield self.data.name in names, where, own
        held_out = "there are no validation inputs to distill on; set data.validation above 0"
        yield "validation" in names and self.data.validation == 0, where, held_out
        left = "nothing would be left to train on; give the source 'train' a fraction below 1"
        yield self.pool.share_of_training >= 1, where, left
        yield names.count("train") > 1, where, "'train' is named twice; give it one fraction"
        yield self.pool.augment and self.ensemble.cache, "pool.augment", "only with ensemble.cache = false"
        timed = self.run.engine == "in-process" and self.clients.timeout is not None
        yield timed, "clients.timeout", "only run.engine = 'processes' or 'ray' can end a late client"


S = TypeVar("S", bound=Section)


FIRST = ("demo", "toy", "cifar10-small")
"""The presets that take minutes."""


def presets() -> dict[str, str]:
    """Return the text of every experiment that comes with feddf by its name, those to begin with first."""
    folder = files("feddf.config") / "presets"
    found = {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return {name: found[name].read_text(encoding="utf-8") for name in [*FIRST, *sorted(found.keys() - set(FIRST))]}


def read(name_or_file: str) -> dict[str, Any]:
    """Return the raw values of a preset or a TOML file."""
    path = Path(name_or_file)
    if path.suffix == ".toml" or path.is_file():
        with one_line(ConfigError, f"cannot read the configuration {path}", (OSError, ValueError)):
            return parse_toml(path.read_text(encoding="utf-8-sig"))  # some editors write a BOM
    known = presets()
    if name_or_file not in known:
        raise ConfigError(f"no preset or file is called '{name_or_file}'; {nearest(name_or_file, known)}")
    return parse_toml(known[name_or_file])


def load(name_or_file: str, overrides: Sequence[str] = ()) -> Experiment:
    """Return the experiment of a preset or a TOML file, with ``key=value`` overrides.

    Args:
        name_or_file: the name of a preset, or the path of a TOML file.
        overrides: values of single keys, as on the command line.

    >>> load("demo", ["alpha=1", "local.epochs=2"]).local.epochs
    2
    """
    return parse(read(name_or_file), overrides=overrides)


@overload
def parse(values: Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Experiment: ...


@overload
def parse(values: Mapping[str, Any], kind: type[S], *, overrides: Sequence[str] = ()) -> S: ...


def parse(values: Mapping[str, Any], kind: type[Section] = Experiment, *, overrides: Sequence[str] = ()) -> Section:
    """Return checked settings, or raise :class:`ConfigError` with one line about the first mistake.

    A run folder's ``config.toml`` is a configuration too: the versions in it are left out.
    """
    given = {name: value for name, value in values.items() if name != "versions"}
    changes = dict(override(text, kind) for text in overrides)
    try:
        return kind.model_validate(nested(given, changes))
    except ValidationError as error:
        raise ConfigError(_one_line(error, kind)) from None


def with_values(settings: S, changes: Mapping[str, Any]) -> S:
    """Return the settings with other values of some keys, by their full names.

    >>> with_values(load("demo"), {"local.epochs": 3, "seed": 7}).local.epochs
    3
    """
    return parse(nested(settings.model_dump(), changes), type(settings))


def override(text: str, kind: type[Section] = Experiment) -> tuple[str, Any]:
    """Return the full name and the value in ``key=value``; the value is read as TOML, or else taken as a string."""
    word, equals, value = text.partition("=")
    if not equals or not word.strip():
        raise ConfigError(f"'{text}' is not an override; write key=value, for instance alpha=0.1")
    name = resolve(word.strip(), kind)
    try:
        return name, parse_toml(f"value = {value}")["value"]
    except ValueError:
        return name, value.strip()  # a bare word is a string


def differences(old: Settings, new: Settings, also_free: Sequence[str] = ()) -> list[str]:
    """Return a line for every key that would change a run's result and that differs."""
    before, after = flat(old.model_dump()), flat(new.model_dump())
    return [
        f"{name}: {shown(before.get(name))} -> {shown(after.get(name))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name) and name not in also_free and not is_free(name, type(new))
    ]


def _one_line(error: ValidationError, kind: type[Section]) -> str:
    first = error.errors()[0]
    name, problem = ".".join(str(part) for part in first["loc"]), first["type"]
    if problem == "extra_forbidden":
        if isinstance(first["input"], Mapping) and "." not in name:
            known = dict.fromkeys(key.partition(".")[0] for key in keys_of(kind) if "." in key)
            return f"unknown section [{name}]; {nearest(name, known)}"
        return f"unknown key '{name}'; {suggestion(name, kind)}"
    if problem == "missing":
        return f"the key '{name}' is missing: {_NEEDED.get(name, 'a value is needed')}"
    given = first["input"]
    said = f"it is a section; {suggestion(name, kind)}" if problem == "model_type" else _SAID.get(problem, first["msg"])
    written = list(given) if isinstance(given, tuple) else given  # a list of TOML is kept as a tuple here
    return f"{name} = {shown(written)}: {said[0].lower()}{said[1:]}"


_SAID = {"tuple_type": "must be a list, for instance ['a', 'b']", "too_short": "at least one is needed"}
"""Pydantic's words are about Python's types; these are about what a user writes."""

_NEEDED = {
    "data": "name a data set, for instance data.name = 'cifar10'",
    "data.name": "name a data set, for instance 'cifar10'",
    "prototypes": "name at least one architecture, for instance prototypes = ['resnet8']",
    "student": "name an architecture, for instance student.model = 'resnet8'",
    "teachers": "name at least one model that was trained already",
}
