"""How a model is fed: the one place where it is decided which preprocessing a teacher and the student get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from feddf.config.errors import ConfigError, FeddfError
from feddf.config.fuse_config import InputsConfig, StudentConfig
from feddf.saved.preprocess import Features, Images, Preprocess, Tokens

Sizes = tuple[int | None, ...]
"""The sizes of one input that a file prescribes, ``None`` where any will do."""


class TeacherError(FeddfError):
    """A teacher cannot be used; one line says which, why and what would be right."""

    exit_code = 2


def preprocess_of(config: InputsConfig, otherwise: Preprocess | None = None) -> Preprocess | None:
    """Return the preprocessing that a configuration asks for, on top of what files say; ``None`` if neither does."""
    if config.tokenizer is not None:
        return Tokens(config.tokenizer, config.max_tokens)
    asked = config.model_fields_set & {"size", "channels", "mean", "std", "order"}
    if not asked or isinstance(otherwise, Tokens | Features):
        return otherwise
    channels = config.channels or (otherwise.shape[0] if otherwise else 3)
    height, width = (config.size, config.size) if config.size else (otherwise.shape[1:] if otherwise else (0, 0))
    if not height or not width:
        raise ConfigError("the side of the images is not known; say it with size = 32 for instance")
    known = otherwise if otherwise is not None and otherwise.shape[0] == channels else None
    mean = config.mean or (known.mean if known else (0.5,) * channels)
    std = config.std or (known.std if known else (0.5,) * channels)
    try:
        return Images((channels, height, width), mean, std, config.order)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def student_preprocess(config: StudentConfig, teachers: Sequence[Preprocess | None]) -> Preprocess:
    """Return how a student is fed: as the first teacher that says how, where its own section says no more."""
    found = preprocess_of(config, next((one for one in teachers if one is not None), None))
    if found is None:
        raise ConfigError.at("student.size", None, "no model says how large images are; set it, or a student.tokenizer")
    return found


def teacher_preprocess(own: Preprocess | None, takes: Sizes, student: Preprocess | None) -> Preprocess | None:
    """Return how a teacher is fed: its own way, or the student's at the sizes that the teacher's file takes."""
    if own is None and isinstance(student, Images) and len(takes) == 3:
        channels, height, width = (size or given for size, given in zip(takes, student.shape, strict=True))
        if channels == student.shape[0]:
            return replace(student, shape=(channels, height, width))
    return own or student


def check_sizes(teacher: str, takes: Sizes, preprocess: Preprocess | None) -> None:
    """Raise :class:`TeacherError` where a preprocessing does not fit the sizes that a teacher's file takes."""
    if preprocess is None or not takes:
        return
    shape = preprocess.shape
    if len(takes) != len(shape) or any(size not in (None, given) for size, given in zip(takes, shape, strict=True)):
        wanted, given = ("×".join(str(size or "any") for size in sizes) for sizes in (takes, shape))
        key = "max_tokens" if isinstance(preprocess, Tokens) else "size and channels"
        raise TeacherError(
            f"teacher {teacher}: its file takes inputs of {wanted}, and it would be fed {given}; say how it is fed "
            f"with {key}"
        )
