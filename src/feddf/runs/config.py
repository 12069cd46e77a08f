"""An experiment's configuration: flat keys in TOML, checked here, at the edge, before anything is trained.

Below :mod:`feddf.runs.build` nothing knows of it: everything takes plain, typed arguments.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from feddf.runs.settings import ConfigError, Contradiction, Positive, Settings, shown

S = TypeVar("S", bound=Settings)

FREE_ON_RESUME = ("data_dir", "engine", "workers", "ray_address", "keep_checkpoints", "log_clients", "log_ensemble")
"""Keys that may change when a run is resumed: none of them changes a model's bytes."""


class PrototypeSpec(BaseModel):
    """One architecture: a name from ``feddf.models.MODELS`` or ``module:callable``, and its options."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    model: str
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$", max_length=64)

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, given: Any) -> Any:
        return {"model": given} if isinstance(given, str) else given

    @property
    def label(self) -> str:
        """The prototype's name: its own, or else the model's."""
        return self.name or self.model.rpartition(":")[2]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for the model."""
        return dict(self.model_extra or {})


class PoolSpec(BaseModel):
    """One source of unlabeled inputs (``docs/decisions/pool.md`` lists the kinds), and which part of it.

    ``classes`` are so many classes at random, or those named; ``avoid`` leaves out those whose names share a word with
    these names, or with the class names of a data set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    source: str
    size: int | None = Field(default=None, ge=2)
    fraction: float | None = Field(default=None, gt=0, le=1)
    classes: Annotated[int, Field(ge=1)] | tuple[str, ...] | None = None
    avoid: str | tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        made = self.source in ("noise", "plane", "validation") or self.source.startswith("generator:")
        if (made or self.source == "train") and (self.classes is not None or self.avoid):
            raise ConfigError.at("pool", self.source, "it has no classes to choose from")
        if made and self.fraction is not None:
            raise ConfigError.at("pool", self.source, "give it a size, not a fraction")
        if self.size is not None and self.fraction is not None:
            raise ConfigError.at("pool", self.source, "give it a size or a fraction, not both")
        return self

    @field_validator("classes", "avoid", mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        return tuple(given) if isinstance(given, list) else given


class Experiment(Settings):
    """Everything that determines a run: the data, who has them, the architectures, and the settings."""

    data: str
    data_dir: str | None = None
    data_size: int | None = Field(default=None, ge=2)
    test_size: int | None = Field(default=None, ge=1)
    image_size: int | None = Field(default=None, ge=1)
    tokenizer: str | None = None
    max_tokens: int = Field(default=64, ge=2)
    validation: float = Field(default=0.1, ge=0, lt=1)
    validation_split: Literal["random", "last"] = "random"
    partition: Literal["dirichlet", "dirichlet-equal", "shards", "iid"] = "dirichlet"
    alpha: float = Field(default=1.0, gt=0)
    classes_per_client: Positive = 2
    min_shard: int = Field(default=10, ge=2)

    prototypes: tuple[PrototypeSpec, ...] = Field(min_length=1)
    local_binary: Literal["none", "straight-through", "error-feedback"] = "none"
    augment: Literal["auto", "none", "flip-crop"] = "auto"

    pool: tuple[PoolSpec, ...] = ()
    pool_size: int | None = Field(default=None, ge=2)

    @property
    def set_apart(self) -> float:
        """The share of the training data that becomes unlabeled inputs of the server's instead (pool = "train")."""
        return sum(spec.fraction or 0.5 for spec in self.pool if spec.source == "train")

    @field_validator("pool", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        several = [] if given is None else [given] if isinstance(given, str | dict) else given
        if not isinstance(several, list | tuple):
            return given
        return tuple({"source": each} if isinstance(each, str) else each for each in several)

    @field_validator("prototypes", mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = [part.strip() for part in given.split(",")]
        return tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        labels = [spec.label for spec in self.prototypes]
        if len(set(labels)) < len(labels):
            raise ConfigError.at("prototypes", labels, "two have the same name; give each a name of its own")
        if len(labels) > self.clients:
            raise ConfigError.at("prototypes", labels, f"there are more prototypes than clients ({self.clients})")
        check(self, self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Contradiction]:
        labelled = self.validation > 0
        yield from self.contradictions(labelled=labelled, pooled=bool(self.pool))
        yield (
            any(spec.source == self.data for spec in self.pool),
            "pool",
            "the pool must not be the clients' own data; 'train' sets a share of them apart, without labels",
        )
        yield (
            any(spec.source == "validation" for spec in self.pool) and not labelled,
            "pool",
            "there are no validation inputs to distil on; set validation above 0",
        )
        yield self.set_apart >= 1, "pool", "nothing would be left to train on; give 'train' a fraction below 1"
        yield (
            sum(spec.source == "train" for spec in self.pool) > 1,
            "pool",
            "'train' is named twice; give it one fraction",
        )
        yield (
            self.method == "fedma" and self.local_binary != "none",
            "local_binary",
            "FedMA matches weights of full precision only",
        )
        yield (
            self.engine == "in-process" and self.deadline is not None,
            "deadline",
            "only engine = 'processes' or 'ray' can end a late client",
        )


def load(name_or_file: str, overrides: Sequence[str] = ()) -> Experiment:
    """Return the experiment of a preset or a TOML file, with ``key=value`` overrides."""
    values = read(name_or_file)
    values.pop("versions", None)  # a run folder's config.toml is a configuration too
    return parse({**values, **dict(override(text) for text in overrides)})


@overload
def parse(values: Mapping[str, Any]) -> Experiment: ...


@overload
def parse(values: Mapping[str, Any], kind: type[S]) -> S: ...


def parse(values: Mapping[str, Any], kind: type[Settings] = Experiment) -> Settings:
    """Return a checked experiment, or raise :class:`ConfigError` with one line about the first mistake."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_one_line(error, kind)) from None


def check(settings: Settings, contradictions: Iterable[Contradiction]) -> None:
    """Raise :class:`ConfigError` for the first contradiction that is so."""
    for wrong, key, allowed in contradictions:
        if wrong:
            given = getattr(settings, key, None)
            if key == "pool" and isinstance(settings, Experiment):
                given = ", ".join(spec.source for spec in settings.pool) or None
            raise ConfigError.at(key, given, allowed)


def read(name_or_file: str) -> dict[str, Any]:
    """Return the raw values of a preset or a TOML file."""
    path = Path(name_or_file)
    if path.suffix == ".toml" or path.is_file():
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    known = presets()
    if name_or_file not in known:
        raise ConfigError(f"no preset or file is called '{name_or_file}'{_closest(name_or_file, known)}")
    return tomllib.loads(known[name_or_file])


def presets() -> dict[str, str]:
    """Return the text of every preset by name."""
    folder = files("feddf") / "presets"
    found = sorted((entry.name, entry) for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for name, entry in found}


def differences(old: Settings, new: Settings, also_free: Sequence[str] = ()) -> list[str]:
    """Return a line for every key that would change a run's result and that differs."""
    before, after = old.model_dump(), new.model_dump()
    return [
        f"{key}: {shown(before[key])} -> {shown(after[key])}"
        for key in before
        if key not in (*FREE_ON_RESUME, *also_free) and before[key] != after[key]
    ]


def override(text: str) -> tuple[str, Any]:
    """Return the key and the value of ``key=value``; the value is read as TOML, or else taken as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"'{text}' is not an override; write key=value, for instance alpha=0.1")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # a bare word is a string


def _one_line(error: ValidationError, kind: type[Settings]) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key '{key}'{_closest(key, list(kind.model_fields))}"
    if first["type"] == "missing":
        return f"the key '{key}' is missing: {_allowed(key) or 'a value is needed'}"
    given = first["input"]
    return f"{key} = {shown(given)}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _allowed(key: str) -> str:
    return {
        "clients": "say how many are expected",
        "data": "name a data set, for instance data = 'cifar10'",
        "prototypes": "name at least one architecture, for instance prototypes = ['resnet8']",
    }.get(key, "")


def _closest(word: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known are: {', '.join(known)}"
