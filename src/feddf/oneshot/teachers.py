"""A teacher: a model that was trained already, in whatever format. Its file is opened when it is asked."""

from __future__ import annotations

import hashlib
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
from feddf.config.names import MODELS, TEACHER_FORMATS
from feddf.evaluate import evaluating, folded
from feddf.runtime.device import device_of
from feddf.saved.model import ModelSpec, fitting
from feddf.saved.model_folder import at_home, description, read_weights, specs
from feddf.saved.preprocess import Features, Images, Preprocess, Tokens
from feddf.types import State

Ask = Callable[[Tensor], Tensor]
"""Encoded inputs -> outputs, one row an input, both on the device that the teacher was opened on."""

Outputs = Literal["logits", "probabilities"]


class TeacherError(FeddfError):
    """A teacher cannot be used; one line says which, why and what would be right."""

    exit_code = 2


@dataclass(frozen=True)
class TrainedModel:
    """One model to fuse.

    ``opened`` makes it ready on a device inside a block; without ``moves`` it works on the CPU only. ``content`` is a
    hash of its files: answers of a teacher without one (a module in memory) are not remembered on disk. ``preprocess``
    is ``None`` where it takes what the student takes, and ``classes`` are empty where nobody said what its outputs
    mean. ``takes`` are the sizes of one input that a file prescribes, ``None`` where any will do. ``spec`` and
    ``state`` are those of an architecture of feddf, which a student can start as.
    """

    id: str
    opened: Callable[[torch.device], AbstractContextManager[Ask]]
    classes: tuple[str, ...] = ()
    preprocess: Preprocess | None = None
    outputs: Outputs = "logits"
    examples: int = 1
    content: str | None = None
    source: str = "a module in memory"
    takes: tuple[int | None, ...] = ()
    spec: ModelSpec | None = None
    state: Callable[[], State] | None = None
    moves: bool = True


def of_module(
    module: nn.Module,
    id: str,
    *,
    classes: Sequence[str] = (),
    preprocess: Preprocess | None = None,
    outputs: Outputs = "logits",
    examples: int = 1,
) -> TrainedModel:
    """Return a module in memory as a teacher. It stays where it is: on another device, a copy of it is asked."""

    @contextmanager
    def opened(device: torch.device) -> Iterator[Ask]:
        there = module if device_of(module) == device else deepcopy(module).to(device)
        with evaluating(there):
            yield folded(there)

    return TrainedModel(id, opened, tuple(classes), preprocess, outputs, examples)


def read_teachers(configs: Sequence[TeacherConfig], *, trust: bool = False) -> list[TrainedModel]:
    """Return the teachers that a configuration names, each under a name of its own."""
    _refuse_contradictions(configs)
    found = [teacher for config in configs for teacher in read_teacher(config, trust=trust)]
    names = [teacher.id for teacher in found]
    taken: dict[str, int] = {}
    unique: list[TrainedModel] = []
    for teacher in found:
        number = taken[teacher.id] = taken.get(teacher.id, 0) + 1
        again = names.count(teacher.id) > 1
        unique.append(replace(teacher, id=f"{teacher.id}-{number}") if again else teacher)
    return unique


def _refuse_contradictions(configs: Sequence[TeacherConfig]) -> None:
    """Two maps must not make different classes of one name; numbers are no names: they differ from model to model."""
    meanings: dict[str, tuple[str, str]] = {}
    for config in configs:
        for own, name in config.map.items():
            other, path = meanings.setdefault(own, (name, config.path))
            if other != name and not own.removeprefix("LABEL_").isdigit():
                raise TeacherError(
                    f"two class maps contradict each other: '{own}' is '{other}' for {path}, "
                    f"and '{name}' for {config.path}"
                )


def read_teacher(config: TeacherConfig, *, trust: bool = False) -> list[TrainedModel]:
    """Return the teacher in a file or folder; a run folder of several prototypes gives several.

    With ``trust``, code runs that the file holds (``.pt2``), or that a folder made elsewhere names.
    """
    make = TEACHER_FORMATS[config.format or format_of(Path(config.path).expanduser())]
    return [_as_configured(teacher, config) for teacher in make(config, trust)]


def format_of(path: Path) -> str:
    """Return the format of a file or folder, by what its name ends in, or by what it holds; pickles are refused."""
    if path.is_dir() and description(path) is not None:
        return "feddf"
    if path.suffix in PICKLES:
        raise TeacherError(f"teacher {path}: a {path.suffix} file can run any code when it is read; {_convert(path)}")
    return path.suffix[1:] if path.suffix in (".safetensors", ".onnx", ".pt2") else "hugging-face"


PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".npz", ".npy", ".h5", ".keras")


def _convert(path: Path) -> str:
    if path.suffix in (".npz", ".npy", ".h5", ".keras", ".joblib"):
        return "export the model to .onnx, or save a state dict with safetensors.torch.save_file(state, FILE)"
    return (
        'where you trust it, convert it: python -c "import torch; from safetensors.torch import save_file; '
        f"save_file(torch.load('{path.name}', weights_only=True), '{path.stem}.safetensors')\""
    )


def file_of(config: TeacherConfig) -> Path:
    """Return the file that a teacher is in, if it is there."""
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise TeacherError(f"there is no teacher {path}")
    return path


def _as_configured(teacher: TrainedModel, config: TeacherConfig) -> TrainedModel:
    """Return a teacher with what the configuration says about it instead of what its files say."""
    classes = config.classes or teacher.classes
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise TeacherError(f"teacher {teacher.id}: its class list names '{twice}' twice")
    if unknown := [name for name in config.map if name not in classes]:
        said = nearest(unknown[0], classes) if classes else "it has no class list"
        raise TeacherError(f"teacher {teacher.id}: its map has a class '{unknown[0]}' that it does not know; {said}")
    renamed = tuple(config.map.get(name, name) for name in classes)
    if len(set(renamed)) < len(renamed):
        twice = next(name for name in renamed if renamed.count(name) > 1)
        both = " and ".join(repr(own) for own, name in zip(classes, renamed, strict=True) if name == twice)
        raise TeacherError(f"teacher {teacher.id}: its map makes '{twice}' of {both}; a class has one output")
    outputs = config.outputs if "outputs" in config.model_fields_set else teacher.outputs
    examples = config.examples if "examples" in config.model_fields_set else teacher.examples
    return replace(named(teacher, renamed), outputs=outputs, examples=examples)


def named(teacher: TrainedModel, classes: tuple[str, ...]) -> TrainedModel:
    """Return a teacher with names for its outputs; a student that starts as it has the same."""
    spec = replace(teacher.spec, classes=classes) if teacher.spec is not None and classes else teacher.spec
    return replace(teacher, classes=classes, spec=spec)


# Weights of feddf's own architectures


def of_feddf(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return the models of a folder that feddf wrote: all prototypes of a run, or the one that is named."""
    path = Path(config.path).expanduser()
    found = specs(path, trust=trust)
    if config.prototype is not None and config.prototype not in found:
        raise TeacherError(f"teacher {path}: no prototype '{config.prototype}'; it has {', '.join(found)}")
    names = [config.prototype] if config.prototype is not None else list(found)
    several = len(found) > 1
    own = config.name or path.resolve().name
    return [
        of_weights(found[name][1], _fed(found[name][0], config), f"{own}-{name}" if several else own, path)
        for name in names
    ]


def of_safetensors(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return weights of an architecture that the configuration names."""
    path = Path(config.path).expanduser()
    if config.model is None:
        allowed = f"say which architecture its weights are of, with model = ... ({', '.join(MODELS)})"
        raise TeacherError(f"teacher {path}: {allowed}")
    if not config.size and config.tokenizer is None:
        raise TeacherError(
            f"teacher {path}: say how large its images are, with size = 32 for instance (or a tokenizer)"
        )
    id, state = config.name or path.stem, read_weights(file_of(config))
    preprocess = preprocess_of(config)
    assert preprocess is not None, "it has a size or a tokenizer"
    spec = ModelSpec(config.model, preprocess.shape, config.classes, preprocess, config.options)
    count = _outputs_of(spec, state)
    if config.classes and count not in (None, len(config.classes)):
        raise TeacherError(f"teacher {id}: it has {count} outputs, and its class list has {len(config.classes)} names")
    classes = config.classes or tuple(str(number) for number in range(count or 2))
    teacher = of_weights(path, replace(spec, classes=classes), id, None)
    return [teacher if config.classes else replace(teacher, classes=())]


def of_weights(path: Path, spec: ModelSpec, id: str, home: Path | None) -> TrainedModel:
    """Return weights of one of feddf's architectures as a teacher; they are tried on one input before all others."""
    if not path.is_file():
        raise TeacherError(f"teacher {id}: there are no weights {path}")
    here, _ = at_home(spec, {}, home or path.parent)

    def state() -> State:
        return at_home(spec, read_weights(path), home or path.parent)[1]

    @contextmanager
    def opened(device: torch.device) -> Iterator[Ask]:
        try:
            module = here.prototype.load(state(), device)
        except FeddfError:
            raise
        except Exception as error:
            raise TeacherError(
                f"teacher {id}: {path} does not fit the model '{spec.model}': {fitting(error)}"
            ) from error
        with evaluating(module):
            yield folded(module)

    content = file_hash([path], repr((spec.model, sorted(spec.options.items()), spec.shape)))
    return TrainedModel(id, opened, spec.classes, here.preprocess, "logits", 1, content, str(path), (), here, state)


def _outputs_of(spec: ModelSpec, state: State) -> int | None:
    """Return how many outputs the architecture has if its weights are to fit; ``None`` if none will do.

    What is wrong then will be said when the teacher is asked.
    """
    shapes = {key: tensor.shape for key, tensor in state.items()}
    counts = sorted({len(tensor) for tensor in state.values() if tensor.ndim in (1, 2)})
    for count in sorted(counts, key=lambda one: one != len(spec.classes)):  # what the user says is tried first
        tried = replace(spec, classes=tuple(str(number) for number in range(count)))
        try:
            with torch.random.fork_rng(devices=[]):
                found = tried.prototype.build().state_dict()
        except Exception:
            return None
        if {key: tensor.shape for key, tensor in found.items()} == shapes:
            return count
    return None


def _fed(spec: ModelSpec, config: TeacherConfig) -> ModelSpec:
    """Return a description with the preprocessing that the configuration asks for, where it does."""
    given = preprocess_of(config, spec.preprocess)
    return replace(spec, preprocess=given) if given is not None else spec


def preprocess_of(
    config: InputsConfig, otherwise: Preprocess | None = None, like: Images | None = None
) -> Preprocess | None:
    """Return the preprocessing that a configuration asks for, on top of what files say; ``None`` if none says anything.

    ``like`` is asked for what nobody said: the form of the student's images.
    """
    if config.tokenizer is not None:
        return Tokens(config.tokenizer, config.max_tokens)
    asked = config.model_fields_set & {"size", "channels", "mean", "std", "order"}
    if not asked or isinstance(otherwise, Tokens | Features):
        return otherwise
    known = otherwise if isinstance(otherwise, Images) else like
    channels = config.channels or (known.shape[0] if known else 3)
    height, width = (config.size, config.size) if config.size else (known.shape[1:] if known else (0, 0))
    if not height or not width:
        raise ConfigError("the side of the images is not known; say it with size = 32 for instance")
    same = known is not None and known.shape[0] == channels
    mean = config.mean or (known.mean if known and same else (0.5,) * channels)
    std = config.std or (known.std if known and same else (0.5,) * channels)
    try:
        return Images((channels, height, width), mean, std, config.order)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def fed(teacher: TrainedModel, otherwise: Preprocess | None) -> Preprocess | None:
    """Return what a teacher is fed with: its own preprocessing, or the student's at the size that the teacher takes."""
    if teacher.preprocess is None and isinstance(otherwise, Images) and len(teacher.takes) == 3:
        channels, height, width = (size or given for size, given in zip(teacher.takes, otherwise.shape, strict=True))
        if channels == otherwise.shape[0]:
            return replace(otherwise, shape=(channels, height, width))
    return teacher.preprocess or otherwise


def check_sizes(teacher: TrainedModel, preprocess: Preprocess | None) -> None:
    """Raise :class:`TeacherError` where a preprocessing does not fit the sizes that a teacher's file takes."""
    if preprocess is None or not teacher.takes:
        return
    shape = preprocess.shape
    if len(teacher.takes) != len(shape) or any(
        size not in (None, given) for size, given in zip(teacher.takes, shape, strict=True)
    ):
        takes, given = ("×".join(str(size or "any") for size in sizes) for sizes in (teacher.takes, shape))
        key = "max_tokens" if isinstance(preprocess, Tokens) else "size and channels"
        raise TeacherError(
            f"teacher {teacher.id}: its file takes inputs of {takes}, and it would be fed {given}; "
            f"say how it is fed with {key}"
        )


def file_hash(paths: Sequence[Path], more: str = "") -> str:
    """Return the SHA-256 of some files and of what else their meaning depends on."""
    sha = hashlib.sha256(more.encode())
    for path in paths:
        with path.open("rb") as file:
            sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()
