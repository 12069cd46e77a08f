"""Teachers: models that were trained already, in files that are opened when they predict; and how models are fed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from feddf.config.errors import ConfigError, FeddfError, nearest, one_line
from feddf.config.fuse_config import TEACHER_FILES, TeacherConfig
from feddf.config.names import TEACHER_FORMATS
from feddf.data.tables import SUFFIXES
from feddf.evaluate import evaluation_mode, fold_batchnorm
from feddf.fusing.beside import BUNDLE, About
from feddf.fusing.feeding import HAND, Feeding, fed_as
from feddf.fusing.pickles import OTHERS, remedy
from feddf.outputs import Outputs, from_description
from feddf.runtime.device import device_of
from feddf.saved.model import LoadedModel, ModelSpec, Preprocess
from feddf.saved.model_folder import description, read_json
from feddf.types import State

PredictBatch = Callable[[Tensor], Tensor]
"""Encoded inputs -> outputs, one row an input, both on the device that the teacher was opened on."""

Opens = Callable[[torch.device], AbstractContextManager[PredictBatch]]
"""Loads a model onto a device inside a block."""

OutputKind = Literal["logits", "probabilities"]


class TeacherError(FeddfError):
    """A teacher cannot be used; one line says which, why and what would be right."""

    exit_code = 2


@dataclass(frozen=True)
class TrainedModel:
    """One model to fuse.

    ``open`` loads it onto a device inside a block; without ``moves`` it works on the CPU only. ``content`` is a hash of
    its files: predictions of a teacher without one (a module in memory) are not cached on disk. ``feeding`` is what is
    known of how it is fed; the student says the rest. ``classes`` are empty where its outputs have no names, and
    ``outputs`` is ``None`` where its answers will show what they are; ``form`` is what its files say about
    the meaning of its outputs, as :meth:`feddf.Outputs.describe` does. ``spec`` and ``state`` are those of an
    architecture of feddf, which a student can start as; ``license`` and ``datasets`` are those of its card, and
    ``size`` the bytes of its files; ``takes`` is the form of its input that a file prescribes. With a ``table`` it has
    answered already, for the pool alone: (the number of inputs, the pool's identity where it is known) -> outputs.
    """

    id: str
    open: Opens
    classes: tuple[str, ...] = ()
    feeding: Feeding = Feeding()
    outputs: OutputKind | None = None
    examples: int = 1
    content: str | None = None
    source: str = "a module in memory"
    spec: ModelSpec | None = None
    state: Callable[[], State] | None = None
    moves: bool = True
    license: str = ""
    datasets: tuple[str, ...] = ()
    size: int = 0
    takes: str = ""
    table: Callable[..., Tensor] | None = None
    form: Mapping[str, Any] = field(default_factory=dict)

    @property
    def preprocess(self) -> Preprocess | None:
        """How it is fed, where that is known."""
        with one_line(TeacherError, f"teacher {self.id}", ConfigError):
            return self.feeding.preprocess

    @classmethod
    def of_files(cls, id: str, open: Opens, files: Sequence[Path], said: About, more: str = "", **rest: Any) -> Self:
        """Return the model in some files, with what is said about it; ``more`` is what else their meaning depends on.

        Its content is the SHA-256 of all that.
        """
        sha = hashlib.sha256(more.encode())
        for path in files:
            with path.open("rb") as file:
                sha.update(hashlib.file_digest(file, "sha256").digest())
        rest |= {"content": sha.hexdigest(), "size": sum(path.stat().st_size for path in files)}
        return cls(id, open, said.classes, said.feeding, license=said.license, datasets=said.datasets, **rest)

    def fed_like(self, student: Feeding) -> Self:
        """Return it with all of how it is fed: as is said of it, else as the student is; a table is not fed."""
        if self.table is not None:
            return self
        with one_line(TeacherError, f"teacher {self.id}", ConfigError):
            return replace(self, feeding=fed_as(self.feeding, student))

    def named(self, classes: tuple[str, ...]) -> TrainedModel:
        """Return it with names for its outputs; a student that starts as it has the same."""
        spec = self.spec.with_classes(classes) if self.spec is not None and classes else self.spec
        return replace(self, classes=classes, spec=spec)

    def meaning(self, shape: Sequence[int]) -> Outputs:
        """Return what its outputs of this shape (inputs, channels, positions) mean; one class, unless it says more."""
        numbers = 2 if self.form.get("variance") else 1
        seen = {"channels": shape[1] // numbers, "positions": shape[2:]}
        with one_line(
            TeacherError, f"teacher {self.id}: its outputs have another meaning than is said", (ValueError, TypeError)
        ):
            return from_description({"kind": "classes", **self.form, **seen})

    def check_outputs(self, count: int) -> None:
        """Raise :class:`TeacherError` where it has more or fewer outputs than it has classes."""
        if self.classes and len(self.classes) != count:
            known = f"its class list (or the student's, if it has none) has {len(self.classes)} names"
            said = f"it has {count} outputs, and {known}; say what its outputs mean with classes = [...]"
            raise TeacherError(f"teacher {self.id}: {said}")


def of_module(
    module: nn.Module,
    id: str,
    *,
    classes: Sequence[str] = (),
    preprocess: Preprocess | None = None,
    outputs: OutputKind | None = None,
    examples: int = 1,
    form: Mapping[str, Any] = {},
) -> TrainedModel:
    """Return a module in memory as a teacher. It stays where it is: on another device, a copy of it predicts.

    Args:
        module: the model.
        id: its name in the report.
        classes: the names of its outputs, in order.
        preprocess: how raw inputs are encoded for it; ``None`` if as for the student.
        outputs: whether it returns logits or probabilities; ``None`` if its answers are to show it.
        examples: n_k, the number of examples that it was trained on, for the weights ``examples``.
        form: what its outputs mean, where they are not one class for each input: ``feddf.labels(3).describe()``.
    """

    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    opens, fed = partial(predicting, module), Feeding.of(preprocess, HAND)
    return TrainedModel(id, opens, tuple(classes), fed, outputs, examples, size=size, form=form)


@contextmanager
def predicting(module: nn.Module, device: torch.device) -> Iterator[PredictBatch]:
    """Let a module, or a copy of it on another device, predict inside the block."""
    here = module if device_of(module) == device else deepcopy(module).to(device)
    with evaluation_mode(here):
        yield fold_batchnorm(here)


def as_teachers(given: Sequence[TrainedModel | nn.Module | str | Path], trust: bool) -> list[TrainedModel]:
    """Return what a program hands over as teachers, each under a name of its own."""
    found: list[TrainedModel] = []
    for number, one in enumerate(given, 1):
        if isinstance(one, TrainedModel):
            found.append(one)
        elif isinstance(one, nn.Module):
            said: dict[str, Any] = {}
            if isinstance(one, LoadedModel):
                said = {"classes": one.classes, "preprocess": one.preprocess, "form": one.spec.form}
            found.append(of_module(one, f"teacher-{number}", **said))
        else:
            found += read_teachers([TeacherConfig(path=str(one))], trust=trust)
    if not found:
        raise TeacherError("there is no teacher to learn from")
    return _distinct(found)


def _distinct(found: Sequence[TrainedModel]) -> list[TrainedModel]:
    """Return teachers, of which those that share a name are numbered."""
    names = [teacher.id for teacher in found]
    shared = [
        f"{name}-{names[: place + 1].count(name)}" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]
    return [replace(one, id=name) for one, name in zip(found, shared, strict=True)]


def read_teachers(configs: Sequence[TeacherConfig], *, trust: bool = False) -> list[TrainedModel]:
    """Return the teachers that a configuration names, each under a name of its own.

    Two maps must not make different classes of one name; numbers are no names: they differ from model to model.
    """
    meanings: dict[str, tuple[str, str]] = {}
    for own, name, path in ((own, name, config.path) for config in configs for own, name in config.map.items()):
        other, first = meanings.setdefault(own, (name, path))
        if other != name and not own.removeprefix("LABEL_").isdigit():
            both = f"'{own}' is '{other}' for {first}, and '{name}' for {path}"
            raise TeacherError(f"two class maps contradict each other: {both}")
    return _distinct([teacher for config in configs for teacher in read_teacher(config, trust=trust)])


def read_teacher(config: TeacherConfig, *, trust: bool = False) -> list[TrainedModel]:
    """Return the teachers in a file or folder (a run may have several); with ``trust``, code of theirs runs."""
    make = TEACHER_FORMATS[config.format or format_of(config.file)]
    with one_line(TeacherError, f"teacher {config.name or config.path}", ConfigError):  # what is said does not fit
        return [_as_configured(teacher, config) for teacher in make(config, trust)]


def format_of(path: Path) -> str:
    """Return the format of a file or folder, by what its name ends in, or by what it holds; pickles are refused."""
    if path.is_dir() and description(path) is not None:
        return "feddf"
    if path.is_dir() and (path / BUNDLE).is_file():
        return "monai"
    if path.is_dir() and "architecture" in read_json(path / "config.json"):
        return "timm"
    if not path.is_dir() and (help := remedy(path)):
        what = "can run any code when it is read" if path.suffix not in OTHERS else "is no model that can be read here"
        raise TeacherError(f"teacher {path}: a {path.suffix} file {what}; {help}")
    if path.suffix.lower() in SUFFIXES:
        return "table"
    return path.suffix[1:] if path.suffix in TEACHER_FILES else "hugging-face"


def _as_configured(teacher: TrainedModel, config: TeacherConfig) -> TrainedModel:
    """Return a teacher with what the configuration says about it instead of what its files say."""
    classes = config.classes or teacher.classes
    if twice := [name for name, times in Counter(classes).items() if times > 1]:
        raise TeacherError(f"teacher {teacher.id}: its class list names '{twice[0]}' twice")
    if unknown := [name for name in config.map if name not in classes]:
        said = nearest(unknown[0], classes) if classes else "it has no class list"
        raise TeacherError(f"teacher {teacher.id}: its map has a class '{unknown[0]}' that it does not know; {said}")
    renamed = tuple(config.map.get(name, name) for name in classes)
    if twice := [name for name, times in Counter(renamed).items() if times > 1]:
        both = " and ".join(repr(own) for own, name in zip(classes, renamed, strict=True) if name == twice[0])
        raise TeacherError(f"teacher {teacher.id}: its map makes '{twice[0]}' of {both}; a class has one output")
    examples = config.examples if "examples" in config.model_fields_set else teacher.examples
    kind = {"kind": config.kind} if config.kind else {}
    outputs = config.outputs or teacher.outputs
    return replace(teacher.named(renamed), outputs=outputs, examples=examples, form={**teacher.form, **kind})
