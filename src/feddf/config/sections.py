"""The sections of a configuration: one frozen type each, which the component that it is about takes whole.

Every key states its default (the paper's, where the paper has one), its bounds and its meaning in one place; the table
of ``feddf config`` and of the documentation is made from them. Its kind says what a change of it means:

* ``task``: another experiment (whose data, which sizes);
* ``method``: another method on the same experiment;
* ``execution``: the same bytes, elsewhere or with another log. Only these may change when a run is resumed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from feddf.config import names
from feddf.config.errors import ConfigError
from feddf.config.names import Names

Precision = Literal["float32", "tf32", "bfloat16"]


def key(
    default: Any, meaning: str, *, kind: str = "task", names: Names | None = None, also: str = "", **bounds: Any
) -> Any:
    """Return a field; ``names`` is what its value is looked up in, and ``also`` a further value that is allowed."""
    extra: Any = {"kind": kind, "names": names, "also": also}
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)


method_key = partial(key, kind="method")
"""A key whose change makes another method of the same experiment."""

execution_key = partial(key, kind="execution")
"""A key whose change leaves the bytes of a result as they are."""


class Section(BaseModel):
    """A frozen group of keys; unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    place: ClassVar[str | None] = None
    """What the section is called in complaints about its names, where it is not what the names are best known by."""

    word: ClassVar[str | None] = None
    """The key that a plain string in the section's place stands for."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, given: Any) -> Any:
        return {cls.word: given} if cls.word and isinstance(given, str) else given

    @field_validator("*", mode="before")
    @classmethod
    def _lists_are_tuples(cls, given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, str) and cls.model_fields[str(info.field_name)].annotation == tuple[str, ...]:
            return tuple(given.split(","))  # loggers=wandb
        return tuple(given) if isinstance(given, list) else given

    @field_validator("*")
    @classmethod
    def _name_is_known(cls, value: Any, info: ValidationInfo) -> Any:
        extra: Any = cls.model_fields[str(info.field_name)].json_schema_extra  # what key() noted
        if extra and extra["names"] is not None and value not in (extra["also"], None):
            called = f"{cls.place}.{info.field_name}" if cls.place else None
            for name in value if isinstance(value, tuple) else (value,):
                extra["names"].check(name, called)
        return value


class DataConfig(Section):
    """``[data]``: the examples that the clients hold together, and what the server keeps of them."""

    name: str = key(..., "the data set", names=names.DATASETS)
    folder: str | None = execution_key(None, "the folder of all data sets (default: FEDDF_DATA, or data)")
    train_size: int | None = key(None, "use only so many training examples, chosen at random", ge=2)
    test_size: int | None = key(None, "use only so many test examples", ge=1)
    image_size: int | None = key(None, "images are resized to this side (a folder's are cut square first)", ge=1)
    tokenizer: str | None = key(None, "a tokenizer's folder or name (default: that of the first transformer)")
    max_tokens: int = key(64, "the length to which texts are cut", ge=2)
    normalization: Literal["measured", "released"] = key("measured", "CIFAR-10's deviations: measured, or as released")
    validation: float = key(0.1, "the share of the training data that the server holds out", ge=0, lt=1)
    validation_split: Literal["random", "last"] = key("random", "which examples are held out")
    train_fraction: float = key(1.0, "the clients' share of the training data that are not held out", gt=0, le=1)


class PartitionConfig(Section):
    """``[partition]``: who holds which examples."""

    scheme: str = key("dirichlet", "how examples are dealt to clients", names=names.PARTITIONS)
    alpha: float = key(1.0, "α of the Dirichlet distribution: small is skewed, large is even", gt=0)
    classes_per_client: int = key(2, "pieces of the sorted data a client gets (scheme 'shards')", ge=1)
    min_size: int = key(10, "the least examples a client has (scheme 'dirichlet')", ge=2)


class ClientsConfig(Section):
    """``[clients]``: how many there are, how many take part in a round, and what happens if some do not answer."""

    total: int = key(20, "K, the number of clients", ge=1)
    fraction: float = key(0.4, "C, the share of the clients that take part in a round", gt=0, le=1)
    quorum: float = key(0.5, "the share of the sampled clients without which a round is abandoned", gt=0, le=1)
    attempts: int = key(3, "how often an abandoned round is tried again, with other clients", ge=1)
    over_selection: int = key(0, "further clients that are sampled in each round, for those that may not answer", ge=0)
    timeout: float | None = key(None, "seconds after which a client counts as failed", gt=0)
    lost_state: Literal["refuse", "anew"] = key("refuse", "a client whose kept state is lost is refused or begins anew")

    @property
    def cohort(self) -> int:
        """The number of clients sampled in a round."""
        return cohort_size(self.total, self.fraction)


def cohort_size(clients: int, fraction: float) -> int:
    """Return C·K, rounded: the number of clients sampled in a round; 0 means that C is too small."""
    return round(fraction * clients)


class PrototypeConfig(Section):
    """``[[prototypes]]``: one architecture. All further keys are options of the model."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    word = "model"

    model: str = key(..., "the architecture", names=names.MODELS)
    name: str = key("", "its name in files (default: the model's)", pattern=r"^[A-Za-z0-9_.-]*$", max_length=64)

    @property
    def label(self) -> str:
        """The prototype's name: its own, or else the model's."""
        return self.name or self.model.rpartition(":")[2]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for the model."""
        return dict(self.model_extra or {})


class LocalConfig(Section):
    """``[local]``: what a client does with its examples (Algorithm 2)."""

    epochs: int = key(40, "E, the passes over the client's examples", ge=1)
    batch_size: int = key(64, "examples in a mini-batch", ge=2)
    lr: float = key(0.1, "the learning rate", gt=0)
    optimizer: Literal["sgd", "adam"] = method_key("sgd", "the optimizer, new in every round")
    lr_schedule: Literal["none", "linear", "cosine"] = method_key("none", "how the rate falls during a round")
    prox_mu: float = method_key(0.0, "FedProx's μ", ge=0)
    logit_adjustment: float = method_key(0.0, "τ: the loss is adjusted by the client's class prior, τ log p(c)", ge=0)
    binary: str = method_key("none", "binarize inner layers, by which gradient", names=names.BINARIZATIONS, also="none")
    augment: Literal["auto", "none", "flip-crop"] = key("auto", "mirror and shift images ('auto': where data allow it)")


class SourceConfig(Section):
    """One of ``pool.sources``: where unlabeled inputs come from, and which part of them is used.

    ``classes`` are that many classes at random, or those named or numbered; ``avoid`` leaves out those numbered, and
    those whose names share a word with these names, or with the class names of a data set.
    """

    word = "name"

    name: str = key(..., "a kind of source, or any data set", names=names.SOURCES)
    size: int | None = key(None, "use so many inputs", ge=2)
    fraction: float | None = key(None, "use this share of the inputs", gt=0, le=1)
    classes: int | tuple[str | int, ...] | None = key(None, "that many classes at random, or these (names, numbers)")
    avoid: str | tuple[str | int, ...] = key((), "leave out these classes, and those that share a word with them")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        made = self.name in ("noise", "plane", "validation") or self.name.startswith(("generator:", "images:"))
        if isinstance(self.classes, int) and self.classes < 1:
            raise ConfigError.at("pool.sources.classes", self.classes, "at least one class is needed")
        if (made or self.name == "train") and (self.classes is not None or self.avoid):
            raise ConfigError.at("pool.sources", self.name, "it has no classes to choose from")
        if made and self.fraction is not None:
            raise ConfigError.at("pool.sources", self.name, "give it a size, not a fraction")
        if self.size is not None and self.fraction is not None:
            raise ConfigError.at("pool.sources", self.name, "give it a size or a fraction, not both")
        return self


class PoolConfig(Section):
    """``[pool]``: the server's unlabeled inputs, on which students are distilled."""

    sources: tuple[SourceConfig, ...] = key((), "where they come from: one or several")
    size: int | None = key(None, "use at most so many inputs, chosen at random", ge=2)
    views: int = method_key(1, "versions of each image: itself, and shifted (where it fits, mirrored) copies", ge=1)
    augment: bool = method_key(False, "mirror and shift them (only with ensemble.cache = false)")

    @field_validator("sources", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        if isinstance(given, str):
            return tuple(part.strip() for part in given.split(",") if part.strip())
        return (given,) if isinstance(given, dict) else given

    @property
    def names(self) -> str:
        """The names of the sources, with commas between them."""
        return ", ".join(source.name for source in self.sources)

    @property
    def share_of_training(self) -> float:
        """The share of the training data that becomes unlabeled inputs of the server (source 'train')."""
        return sum(source.fraction or 0.5 for source in self.sources if source.name == "train")


class FusionConfig(Section):
    """``[fusion]``: how updates become the next models."""

    method: str = method_key(
        "feddf",
        "the method; fedprox, fedavgm, feddistill, feddf-plus and feddf+prox+swag stand for keys that are set then",
        names=names.METHODS,
    )
    exchange: Literal["weights", "answers"] = method_key(
        "weights", "'answers': clients keep their models, and send what these answer for the pool"
    )
    aggregation: str = method_key(
        "examples", "weights: n_k, all alike, n_kc for the last layer's row c; or a robust rule", names=names.AVERAGES
    )
    batchnorm: Literal["average", "last", "recalibrate", "local"] = method_key(
        "average", "what becomes of BatchNorm's statistics in the average"
    )
    momentum: float = method_key(0.0, "server momentum β (FedAvgM)", ge=0, lt=1)
    drop_worst: str = method_key("none", "leave out clients that learned nothing", names=names.DROP_RULES, also="none")
    trust: str = method_key("none", "how far each client is believed, over rounds", names=names.TRUSTS, also="none")
    guard: float | None = method_key(None, "a fused model that loses more accuracy than this is not kept", ge=0, le=1)
    defense: Literal["none", "robust"] = method_key(
        "none", "'robust': start, ensemble, trust and guard that stand hostile clients (docs/decisions/defense.md)"
    )
    parts: tuple[str, ...] = method_key((), "what is added to the method, on clients and server", names=names.PARTS)
    options: dict[str, Any] = method_key({}, "whatever a method of your own wants to be told")


class EnsembleConfig(Section):
    """``[ensemble]``: how the clients' models predict together."""

    combine: str = method_key("logits", "how predictions are combined: a mean, or a robust rule", names=names.TARGETS)
    weights: str = method_key("uniform", "how much each teacher counts", names=names.TEACHER_WEIGHTS)
    cache: bool = method_key(True, "evaluate teachers once a round on the pool; false: on each batch (pseudo code)")
    ema: float = method_key(0.0, "γ: earlier rounds' ensemble is a teacher, with γ times its last weight", ge=0, lt=1)
    groups: int = method_key(
        0, "averages of so many groups of clients teach, and not each client; 0: each client", ge=0
    )
    swag_samples: int = method_key(0, "further teachers, sampled from a Gaussian over the clients' models", ge=0)
    swag_scale: float = method_key(0.5, "the factor of that Gaussian's covariance (SWAG: 0.5)", gt=0)


class DistillConfig(Section):
    """``[distill]``: how a student learns from the teachers' answers (section 4.1)."""

    init: Literal["average", "previous", "best"] = method_key("average", "averaged or previous weights, or the better")
    steps: int = key(10_000, "N, the most steps", ge=1)
    batch_size: int = key(128, "unlabeled inputs in a mini-batch", ge=2)
    lr: float = key(1e-3, "the learning rate", gt=0)
    optimizer: Literal["adam", "sgd", "swa"] = method_key(
        "adam", "'adam' and 'sgd' with cosine annealing; 'swa' averages the weights at the end of each cycle of SGD"
    )
    swa_cycle: int = method_key(25, "steps in one of SWA's cycles", ge=1)
    clip: float | None = method_key(None, "the largest norm of a gradient", gt=0)
    temperature: float = method_key(1.0, "T, which softens the answers of teachers and student", gt=0)
    early_stopping: Literal["validation", "held-out-loss", "none"] = method_key(
        "validation", "stop by accuracy on validation data, by loss on held-out inputs of the pool, or after all steps"
    )
    held_out: float = method_key(0.1, "the share of the pool held out by early_stopping = 'held-out-loss'", gt=0, lt=1)
    keep_init: bool = method_key(True, "return the first weights if no snapshot scores better")
    eval_every: int = key(100, "steps between two looks at the score", ge=1)
    patience: int = key(1_000, "steps without a better score after which a student stops", ge=1)

    @property
    def approach(self) -> int:
        """The steps before patience counts: SWA begins to average after the first quarter, which only approaches."""
        return self.steps // 4 if self.optimizer == "swa" else 0


class AnswersConfig(Section):
    """``[answers]``: how clients learn from each other's answers, where they send these instead of weights."""

    digest_epochs: int = method_key(1, "passes over the pool in which a client learns from the last target", ge=0)
    digest_lr: float = method_key(1e-3, "the learning rate of these passes (Adam)", gt=0)
    distance: Literal["divergence", "absolute"] = method_key(
        "divergence", "how far a client is from the target: as a student, or by FedMD's absolute difference of logits"
    )
    gamma: float = method_key(0.1, "FD's γ: how much the others' mean answers count in a client's loss", ge=0)


class FedMAConfig(Section):
    """``[fedma]``: matched averaging."""

    own_start: bool = method_key(True, "each client begins from weights of its own")
    neuron_weights: Literal["uniform", "examples"] = method_key("uniform", "weights of matched neurons: alike, or n_k")
    growth: float = method_key(1.25, "how far a matched layer may grow", ge=1)


class AttackConfig(Section):
    """``[attack]``: hostile clients, to measure defenses with."""

    kind: str = key("none", "what hostile clients do in the attacked rounds", names=names.ATTACKS, also="none")
    share: float = key(0.2, "the share of the clients that are hostile", gt=0, le=1)
    since: int = key(1, "the first round that is attacked", ge=1)
    until: int | None = key(None, "the last round that is attacked (default: the run's)", ge=1)
    scale: float | None = key(None, "the strength of an attack (default: its own)", gt=0)
    target: int = key(0, "the class that an attack wants", ge=0)


class RunConfig(Section):
    """``[run]``: where the work is done, and what is kept of it.

    Threads, compilation, precision and the kind of device change the last bits. The device may nevertheless change when
    a run is resumed: then there is a warning, or with ``--strict`` a refusal.
    """

    engine: Literal["processes", "in-process", "ray"] = execution_key("processes", "where jobs run")
    workers: int | None = execution_key(None, "worker processes (default: one a core, or two a GPU)", ge=1)
    ray_address: str | None = execution_key(None, "a Ray cluster's host:port (default: one on this machine)")
    device: str = execution_key(
        "auto", "cpu, cuda, cuda:1, ...; 'auto': the first accelerator that works, else cpu", pattern=r"^[a-z]+(:\d+)?$"
    )
    precision: Precision = key("float32", "of matrix products; weights, means and losses stay in float32 or wider")
    deterministic: bool = key(True, "on an accelerator, use only algorithms that give the same bits every time")
    threads: int | None = key(None, "torch threads of a student (default: 2 for a large one alone, else 1)", ge=1)
    compile: bool = key(False, "compile training steps (needs a C++ compiler)")
    log_clients: bool = execution_key(False, "log each client's test accuracy and drift, even without log_ensemble")
    log_ensemble: bool = execution_key(True, "log the ensemble's test accuracy")
    keep_checkpoints: int = execution_key(2, "how many of the newest checkpoints are kept", ge=2)
    loggers: tuple[str, ...] = execution_key((), "send each round's numbers there, too", names=names.TRACKERS)
