"""The configuration of ``feddf fuse``: whom to fuse into what, on which unlabeled inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from feddf.config.errors import ConfigError
from feddf.config.experiment import parse, read
from feddf.config.names import DATASETS, DROP_RULES, MODELS, TARGETS, TEACHER_FORMATS, TEACHER_WEIGHTS
from feddf.config.sections import DistillConfig, PoolConfig, RunConfig, Section, key, method_key

TEACHER_FILES = (".safetensors", ".onnx", ".pt2", ".answers")


class InputsConfig(Section):
    """What a model is fed with: images of a size, normalized, or the tokens of a text."""

    size: int | None = key(None, "the side of its images (default: the model's own, or the student's)", ge=1)
    channels: Literal[1, 3] | None = key(None, "1 for gray images, 3 for color")
    mean: tuple[float, ...] | None = key(None, "what is subtracted from each channel, once bytes are divided by 255")
    std: tuple[float, ...] | None = key(None, "what each channel is then divided by")
    order: Literal["RGB", "BGR"] | None = key(None, "the order of the colors (default: what its files say, or RGB)")
    tokenizer: str | None = key(None, "a tokenizer's folder or name, for texts")
    max_tokens: int | None = key(None, "the length to which texts are cut (default: its files', or 64)", ge=2)


class TeacherConfig(InputsConfig):
    """``[[teachers]]``: one model that was trained already, and what has to be known about it."""

    place = "teachers"
    word = "path"

    path: str = key(
        ..., "a folder of feddf or Hugging Face (or its name), or a .safetensors, .pt2, .onnx, .answers or table file"
    )
    name: str = key("", "its name in the report (default: from its path)", max_length=64)
    format: str | None = key(None, "what it is (default: by its path)", names=TEACHER_FORMATS)
    model: str | None = key(None, "the architecture of a .safetensors file", names=MODELS)
    options: dict[str, Any] = key({}, "the options of that architecture")
    prototype: str | None = key(None, "one prototype of a run folder (default: all of them)")
    classes: tuple[str, ...] = key((), "the names of its outputs, in order (default: what its files say)")
    map: dict[str, str] = key({}, "its own class names, where they differ from those of the others")
    kind: Literal["classes", "labels", "values"] | None = key(
        None, "what its answers are: one class, any labels, or values (default: what its files say, or classes)"
    )
    outputs: Literal["logits", "probabilities"] | None = key(None, "what it returns (default: as its answers look)")
    examples: int = key(1, "n_k, the examples that it learned from (for weights 'examples')", ge=1)

    @property
    def file(self) -> Path:
        """Where it lies: a file, or a folder."""
        return Path(self.path).expanduser()

    @property
    def id(self) -> str:
        """Its name, or that of its file or folder."""
        return self.name or (self.file.stem if self.file.suffix in TEACHER_FILES else self.file.resolve().name)


class StudentConfig(InputsConfig):
    """``[student]``: what the teachers are fused into."""

    place = "student"
    word = "model"

    model: str | None = key(None, "its architecture (default: that of the teacher that it starts as)", names=MODELS)
    options: dict[str, Any] = key({}, "the options of that architecture")
    init: str = key("new", "its first weights: 'new', 'average' (of the teachers like it), or a teacher's name")
    classes: tuple[str, ...] = key((), "its classes, in order (default: all that some teacher knows)")
    background: str | None = key(
        None, "in masks, the class of whatever is none of the others (default: what files say, or 'background')"
    )


class LabeledConfig(Section):
    """``[validation]`` and ``[test]``: labeled examples, by the name of a data set."""

    word = "name"

    name: str = key(..., "the data set", names=DATASETS)
    folder: str | None = key(None, "the folder of all data sets (default: FEDDF_DATA, or data)", kind="execution")
    part: Literal["train", "test", "all"] = key("test", "which part (a fifth of an image folder is its test part)")
    size: int | None = key(None, "use only so many examples, chosen at random", ge=2)
    classes: tuple[str, ...] = key((), "the names of its classes, in order (default: what the data set says)")


class FuseEnsembleConfig(Section):
    """``[ensemble]``: how the teachers' predictions become one."""

    place = "ensemble"

    combine: str = method_key("probabilities", "how predictions are combined: a mean, or a robust rule", names=TARGETS)
    weights: str = method_key("uniform", "how much each teacher counts", names=TEACHER_WEIGHTS)
    drop_worst: str = method_key("none", "leave out teachers that know nothing", names=DROP_RULES, also="none")


class FuseConfig(Section):
    """Everything that determines a fusion of trained models."""

    name: str = key("fused", "a name for the model card", pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)
    description: str = key("", "one line about the fusion")
    seed: int = key(0, "every random choice follows from it", ge=0)
    teachers: tuple[TeacherConfig, ...] = key(..., "the models to fuse", min_length=1)
    student: StudentConfig
    pool: PoolConfig = PoolConfig()
    folder: str | None = key(None, "the folder of all data sets (default: FEDDF_DATA, or data)", kind="execution")
    ensemble: FuseEnsembleConfig = FuseEnsembleConfig()
    distill: DistillConfig = DistillConfig()
    validation: LabeledConfig | None = key(None, "labeled examples for early stopping, drop_worst and weights")
    test: LabeledConfig | None = key(None, "labeled examples that are looked at in the report only")
    onnx: bool = key(False, "write the student as model.onnx too", kind="execution")
    cache: str | None = key(None, "the folder of cached predictions (default: the user's cache)", kind="execution")
    run: RunConfig = RunConfig()

    @property
    def labeled(self) -> dict[str, LabeledConfig]:
        """The labeled examples that are named, by what they are for."""
        given = {"validation": self.validation, "test": self.test}
        return {key: one for key, one in given.items() if one is not None}

    @field_validator("teachers", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str | dict) else given

    @model_validator(mode="before")
    @classmethod
    def _stops_without_labels(cls, given: Any) -> Any:
        """Without labeled examples a student is stopped by the loss on inputs that are held out."""
        distill = given.get("distill", {}) if isinstance(given, dict) else None
        if not isinstance(distill, dict) or given.get("validation") is not None:
            return given
        return {**given, "distill": {"early_stopping": "held-out-loss", **distill}}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        pool, student, ensemble, stop = self.pool, self.student, self.ensemble, self.distill.early_stopping
        none, needs = self.validation is None, "it needs labeled examples; name some with validation.name"
        twice = [name for name in student.classes if student.classes.count(name) > 1]
        unnamed = student.model is None and student.init in ("new", "average")
        for wrong, name, given, allowed in (
            (
                not pool.sources,
                "pool.sources",
                None,
                "name unlabeled inputs: a data set, or images:DIR (--unlabeled DIR)",
            ),
            (self.distill.init != "average", "distill.init", self.distill.init, "say it with student.init"),
            (unnamed, "student.model", None, "name an architecture, or a teacher as student.init"),
            (twice, "student.classes", list(student.classes), f"'{''.join(twice[:1])}' is named twice"),
            (pool.augment, "pool.augment", True, "teachers predict once, so the pool stays as it is"),
            (none and stop == "validation", "distill.early_stopping", stop, needs),
            (none and ensemble.weights == "validation", "ensemble.weights", ensemble.weights, needs),
            (none and ensemble.drop_worst != "none", "ensemble.drop_worst", ensemble.drop_worst, needs),
        ):
            if wrong:
                raise ConfigError.at(name, given, allowed)
        return self


def load_fuse(file: str | None, values: dict[str, Any], overrides: Sequence[str] = ()) -> FuseConfig:
    """Return the configuration in a TOML file (or none), with ``values`` on top and ``key=value`` overrides."""
    return parse({**(read(file) if file else {}), **values}, FuseConfig, overrides=overrides)
