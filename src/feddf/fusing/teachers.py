"""Teachers: models that were trained already, in files that are opened when they predict; and how models are fed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from feddf.config.errors import ConfigError, FeddfError, nearest
from feddf.config.fuse_config import InputsConfig, TeacherConfig
from feddf.config.names import TEACHER_FORMATS
from feddf.evaluate import evaluation_mode, fold_batchnorm
from feddf.runtime.device import device_of
from feddf.saved.model import Features, Images, LoadedModel, ModelSpec, Preprocess, Tokens
from feddf.saved.model_folder import description
from feddf.types import State

PredictBatch = Callable[[Tensor], Tensor]
"""Encoded inputs -> outputs, one row an input, both on the device that the teacher was opened on."""

Sizes = tuple[int | None, ...]
"""The sizes of one input that a file prescribes, ``None`` where any will do."""

OutputKind = Literal["logits", "probabilities"]


class TeacherError(FeddfError):
    """A teacher cannot be used; one line says which, why and what would be right."""

    exit_code = 2


@dataclass(frozen=True)
class TrainedModel:
    """One model to fuse.

    ``open`` loads it onto a device inside a block; without ``moves`` it works on the CPU only. ``content`` is a hash of
    its files: predictions of a teacher without one (a module in memory) are not cached on disk. ``preprocess`` is
    ``None`` where it takes what the student takes, and ``classes`` are empty where its outputs have no names. ``takes``
    are the sizes that a file prescribes which is fed as the student is. ``spec`` and ``state`` are those of an
    architecture of feddf, which a student can start as.
    """

    id: str
    open: Callable[[torch.device], AbstractContextManager[PredictBatch]]
    classes: tuple[str, ...] = ()
    preprocess: Preprocess | None = None
    outputs: OutputKind = "logits"
    examples: int = 1
    content: str | None = None
    source: str = "a module in memory"
    takes: Sizes = ()
    spec: ModelSpec | None = None
    state: Callable[[], State] | None = None
    moves: bool = True

    def fed(self, student: Preprocess | None) -> Preprocess | None:
        """Return how it is fed: its own way, or the student's at the sizes that its file takes."""
        if self.preprocess is None and isinstance(student, Images) and len(self.takes) == 3:
            channels, height, width = (size or given for size, given in zip(self.takes, student.shape, strict=True))
            if channels == student.shape[0]:
                return replace(student, shape=(channels, height, width))
        return self.preprocess or student

    def named(self, classes: tuple[str, ...]) -> TrainedModel:
        """Return it with names for its outputs; a student that starts as it has the same."""
        spec = replace(self.spec, classes=classes) if self.spec is not None and classes else self.spec
        return replace(self, classes=classes, spec=spec)

    def check_outputs(self, count: int) -> None:
        """Raise :class:`TeacherError` where it has more or fewer outputs than it has classes."""
        if self.classes and len(self.classes) != count:
            known = f"its class list (or the student's, if it has none) has {len(self.classes)} names"
            remedy = "say what its outputs mean with classes = [...]"
            raise TeacherError(f"teacher {self.id}: it has {count} outputs, and {known}; {remedy}")


def of_module(
    module: nn.Module,
    id: str,
    *,
    classes: Sequence[str] = (),
    preprocess: Preprocess | None = None,
    outputs: OutputKind = "logits",
    examples: int = 1,
) -> TrainedModel:
    """Return a module in memory as a teacher. It stays where it is: on another device, a copy of it predicts.

    Args:
        module: the model.
        id: its name in the report.
        classes: the names of its outputs, in order.
        preprocess: how raw inputs are encoded for it; ``None`` if as for the student.
        outputs: whether it returns logits or probabilities.
        examples: n_k, the number of examples that it was trained on, for the weights ``examples``.
    """

    def open_module(device: torch.device) -> AbstractContextManager[PredictBatch]:
        return predicting(module if device_of(module) == device else deepcopy(module).to(device))

    return TrainedModel(id, open_module, tuple(classes), preprocess, outputs, examples)


@contextmanager
def predicting(module: nn.Module) -> Iterator[PredictBatch]:
    """Let a module predict inside the block."""
    with evaluation_mode(module):
        yield fold_batchnorm(module)


def as_teachers(given: Sequence[TrainedModel | nn.Module | str | Path], trust: bool) -> list[TrainedModel]:
    """Return what a program hands over as teachers, each under a name of its own."""
    found: list[TrainedModel] = []
    for number, one in enumerate(given, 1):
        if isinstance(one, TrainedModel):
            found.append(one)
        elif isinstance(one, nn.Module):
            classes, fed = (one.classes, one.preprocess) if isinstance(one, LoadedModel) else ((), None)
            found.append(of_module(one, f"teacher-{number}", classes=classes, preprocess=fed))
        else:
            found += read_teachers([TeacherConfig(path=str(one))], trust=trust)
    if not found:
        raise TeacherError("there is no teacher to learn from")
    if len({teacher.id for teacher in found}) < len(found):
        return [replace(one, id=f"{one.id}-{number}") for number, one in enumerate(found, 1)]
    return found


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
    found = [teacher for config in configs for teacher in read_teacher(config, trust=trust)]
    names = [teacher.id for teacher in found]
    return [
        replace(one, id=f"{one.id}-{names[: place + 1].count(one.id)}") if names.count(one.id) > 1 else one
        for place, one in enumerate(found)
    ]


def read_teacher(config: TeacherConfig, *, trust: bool = False) -> list[TrainedModel]:
    """Return the teachers in a file or folder (a run may have several); with ``trust``, code of theirs runs."""
    make = TEACHER_FORMATS[config.format or format_of(Path(config.path).expanduser())]
    return [_as_configured(teacher, config) for teacher in make(config, trust)]


def format_of(path: Path) -> str:
    """Return the format of a file or folder, by what its name ends in, or by what it holds; pickles are refused."""
    if path.is_dir() and description(path) is not None:
        return "feddf"
    if path.suffix in (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt"):
        remedy = (
            'where you trust it, convert it: python -c "import torch; from safetensors.torch import save_file; '
            f"save_file(torch.load('{path.name}', weights_only=True), '{path.stem}.safetensors')\""
        )
    elif path.suffix in (".joblib", ".npz", ".npy", ".h5", ".keras"):
        remedy = "export the model to .onnx, or save a state dict with safetensors.torch.save_file(state, FILE)"
    else:
        return path.suffix[1:] if path.suffix in (".safetensors", ".onnx", ".pt2") else "hugging-face"
    raise TeacherError(f"teacher {path}: a {path.suffix} file can run any code when it is read; {remedy}")


def _as_configured(teacher: TrainedModel, config: TeacherConfig) -> TrainedModel:
    """Return a teacher with what the configuration says about it instead of what its files say."""
    classes = config.classes or teacher.classes
    if twice := [name for name in classes if classes.count(name) > 1]:
        raise TeacherError(f"teacher {teacher.id}: its class list names '{twice[0]}' twice")
    if unknown := [name for name in config.map if name not in classes]:
        said = nearest(unknown[0], classes) if classes else "it has no class list"
        raise TeacherError(f"teacher {teacher.id}: its map has a class '{unknown[0]}' that it does not know; {said}")
    renamed = tuple(config.map.get(name, name) for name in classes)
    if twice := [name for name in renamed if renamed.count(name) > 1]:
        both = " and ".join(repr(own) for own, name in zip(classes, renamed, strict=True) if name == twice[0])
        raise TeacherError(f"teacher {teacher.id}: its map makes '{twice[0]}' of {both}; a class has one output")
    said_so = {name: getattr(config, name) for name in ("outputs", "examples") if name in config.model_fields_set}
    return replace(teacher.named(renamed), **said_so)


def same(name: str) -> str:
    """Return what two spellings of a class have in common: case and spaces around it do not matter."""
    return name.strip().casefold()


def columns_of(names: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Return where names stand in a list of classes: −1 for a name that is not in it."""
    places = {same(name): number for number, name in enumerate(classes)}
    return torch.tensor([places.get(same(name), -1) for name in names])


def preprocess_of(config: InputsConfig, otherwise: Preprocess | None = None) -> Preprocess | None:
    """Return the preprocessing that a configuration asks for, on top of what files say; ``None`` if neither does."""
    if config.tokenizer is not None:
        return Tokens(config.tokenizer, config.max_tokens)
    asked = config.model_fields_set & {"size", "channels", "mean", "std", "order"}
    if not asked or isinstance(otherwise, Tokens | Features):
        return otherwise
    channels = config.channels or (otherwise.shape[0] if otherwise else 3)
    side = (config.size, config.size) if config.size else (otherwise.shape[1:] if otherwise else None)
    if side is None:
        raise ConfigError("the side of the images is not known; say it with size = 32 for instance")
    half = (0.5,) * channels
    mean, std = (otherwise.mean, otherwise.std) if otherwise and otherwise.shape[0] == channels else (half, half)
    try:
        return Images((channels, *side), config.mean or mean, config.std or std, config.order)
    except ValueError as error:
        raise ConfigError(str(error)) from error
