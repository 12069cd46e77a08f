"""How rounds are played and updates fused: the keys of a configuration that do not say whose data they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from feddf.rounds import sample_size

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Contradiction = tuple[bool, str, str]
"""(is it so?, the key, what would be right)."""


class ConfigError(Exception):
    """A user's mistake in a configuration: one line that names the key, what was given and what is allowed."""

    @classmethod
    def at(cls, key: str, given: object, allowed: str) -> Self:
        """Return the error for one key."""
        return cls(f"{key} = {shown(given)}: {allowed}")


class Settings(BaseModel):
    """All that a run is made of but its data and architectures. The defaults are the paper's where it states them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)
    about: str = ""
    seed: int = Field(default=0, ge=0)
    rounds: Positive = 100

    clients: Positive = 20
    fraction: Share = 0.4
    quorum: Share = 0.5
    attempts: Positive = 3
    deadline: float | None = Field(default=None, gt=0)

    local_epochs: Positive = 40
    local_batch: int = Field(default=64, ge=2)
    local_rate: float = Field(default=0.1, gt=0)
    local_optimizer: Literal["sgd", "adam"] = "sgd"
    local_decay: Literal["none", "linear", "cosine"] = "none"
    proximal: float = Field(default=0.0, ge=0)

    method: Literal["fedavg", "feddf", "fedma"] = "feddf"
    average_weights: Literal["examples", "uniform"] = "examples"
    batchnorm: Literal["average", "last", "recalibrate", "local"] = "average"
    server_momentum: float = Field(default=0.0, ge=0, lt=1)
    drop_worst: Literal["none", "paper", "released"] = "none"
    fedma_growth: float = Field(default=1.25, ge=1)

    pool_augment: bool = False
    mode: Literal["cached", "online"] = "cached"
    teacher_average: Literal["logits", "probabilities", "losses"] = "logits"
    teacher_weights: Literal["uniform", "examples", "validation", "certainty", "class-counts"] = "uniform"
    temperature: float = Field(default=1.0, gt=0)
    swag_samples: int = Field(default=0, ge=0)
    swag_scale: float = Field(default=0.5, gt=0)

    start: Literal["average", "previous", "best"] = "average"
    stop: Literal["validation", "held-out-loss", "steps"] = "validation"
    held_out: float = Field(default=0.1, gt=0, lt=1)
    distill_optimizer: Literal["adam", "sgd", "swa"] = "adam"
    distill_clip: float | None = Field(default=None, gt=0)
    distill_steps: Positive = 10_000
    distill_batch: int = Field(default=128, ge=2)
    distill_rate: float = Field(default=1e-3, gt=0)
    distill_check: Positive = 100
    distill_patience: Positive = 1_000
    distill_threads: Positive | None = None

    log_clients: bool = False
    log_ensemble: bool = True
    compile: bool = False
    engine: Literal["processes", "in-process", "ray"] = "processes"
    ray_address: str | None = None
    workers: Positive | None = None
    keep_checkpoints: int = Field(default=2, ge=2)

    @property
    def discloses(self) -> bool:
        """Whether clients tell how many examples they have of each class: only if something is weighed by it."""
        return self.method == "feddf" and self.teacher_weights == "class-counts"

    def threads_of_a_student(self, students: int) -> int:
        """Two for a student that learns alone, one for each of several: never a matter of the machine."""
        return self.distill_threads or (2 if students == 1 else 1)

    def contradictions(self, *, labelled: bool, pooled: bool) -> Iterator[Contradiction]:
        """Yield what is right alone and wrong together, given whether the server has labelled data, and a pool."""
        distils = self.method == "feddf"
        yield (
            distils and not pooled,
            "pool",
            "method 'feddf' needs an unlabeled pool, for instance pool = 'cifar100'",
        )
        yield (
            distils and self.stop == "validation" and not labelled,
            "validation",
            "early stopping reads validation data; hold some out (0.1), or set stop = 'held-out-loss' or 'steps'",
        )
        yield (
            distils and self.start == "best" and self.stop == "steps",
            "start",
            "the best is found by a score; set stop = 'validation' or 'held-out-loss'",
        )
        for key in ("drop_worst", "teacher_weights"):
            reads = getattr(self, key) in ("paper", "released", "validation")
            yield reads and not labelled, key, "it reads validation data; set validation above 0"
        yield (
            self.batchnorm == "recalibrate" and not pooled,
            "batchnorm",
            "statistics are estimated again on unlabeled data; name a pool",
        )
        yield self.pool_augment and self.mode == "cached", "pool_augment", "only with mode = 'online'"
        yield self.swag_samples > 0 and self.mode == "online", "swag_samples", "only with mode = 'cached'"
        yield (
            self.method == "fedma" and (self.server_momentum > 0 or self.drop_worst != "none"),
            "method",
            "its layers grow and are matched one by one, so neither server_momentum nor drop_worst can be used",
        )
        yield (
            self.method == "fedma" and (self.batchnorm != "average" or self.average_weights != "examples"),
            "method",
            "it has averages of its own and no BatchNorm, so neither batchnorm nor average_weights can be chosen",
        )
        yield (
            self.swag_samples > 0 and self.teacher_weights == "validation",
            "teacher_weights",
            "sampled teachers have no validation accuracy of their own; use another weight, or swag_samples = 0",
        )
        yield (
            self.ray_address is not None and self.engine != "ray",
            "ray_address",
            "it is the address of a Ray cluster; set engine = 'ray'",
        )
        yield (
            sample_size(self.clients, self.fraction) < 1,
            "fraction",
            f"no client would be sampled from {self.clients}; it must be above {0.5 / self.clients:g}",
        )


def shown(value: object) -> str:
    """Return a value as an error shows it."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
