"""A generator's folder: what was asked for, how far the training is, and what came of it.

::

    generator.toml                 the settings, what the images were, and the versions that it was trained with
    checkpoints/step-0000500.safetensors, .sha256
    losses.jsonl                   one JSON object every few steps
    samples.png                    images of the newest checkpoint, always of the same latents
    generator.safetensors, .sha256 the final weights, once the training has ended
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import tomli_w
import torch
from torch import Tensor

from feddf.config.errors import FeddfError, first_line
from feddf.models.dcgan import Generator
from feddf.runtime.atomic import (
    append_line,
    held,
    keep_lines,
    read_checked,
    real_folder,
    refuse_links,
    remove_leftovers,
    write_atomically,
    write_checked,
)
from feddf.runtime.device import CPU, described
from feddf.types import State

KEEP = 2
"""How many checkpoints are kept: the newest, and the one before it in case the newest is damaged."""


class GeneratorError(FeddfError):
    """A generator cannot be trained, loaded or used as asked; one line says why and what would be right."""


@dataclass(frozen=True)
class GeneratorSettings:
    """Everything that decides the final weights, and so all that must be the same when a training goes on."""

    images: str
    steps: int
    batch: int
    rate: float
    latent: int
    width: int
    channels: int
    seed: int
    threads: int

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "latent", "width", "channels", "seed", "threads"):
            value, least = getattr(self, name), {"batch": 2, "seed": 0}.get(name, 1)  # one image has no variance
            if type(value) is not int or value < least:
                raise ValueError(f"{name} = {value!r}: must be a whole number of at least {least}")
        if type(self.rate) is not float or not 0 < self.rate < float("inf"):
            raise ValueError(f"rate = {self.rate}: must be a number above 0, for instance 0.0002")

    def build(self) -> Generator:
        """Return a generator of this size, with weights that torch's global generator draws."""
        return Generator(latent=self.latent, width=self.width, channels=self.channels)


def fingerprint(images: Tensor) -> str:
    """Return a few words that tell one set of images from another."""
    size = " × ".join(str(side) for side in images.shape)
    return f"{size}, SHA-256 {hashlib.sha256(images.contiguous().numpy().data).hexdigest()[:16]}"


def generator_versions(device: torch.device = CPU) -> dict[str, str]:
    """Return what the final bytes may depend on besides the settings."""
    packages = {name: version(name) for name in ("feddf", "torch")}
    return {**packages, "cpu": torch.backends.cpu.get_cpu_capability(), "device": described(device)}


class GeneratorFolder:
    """A generator's folder on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.losses = path / "losses.jsonl"
        self.weights = path / "generator.safetensors"

    @classmethod
    def prepare(cls, path: Path, settings: GeneratorSettings, device: torch.device = CPU) -> GeneratorFolder:
        """Make the folder, or open one that was made with the same settings."""
        folder = cls(path)
        if (path / "generator.toml").exists():
            folder._refuse_other(settings)
        elif path.exists() and not path.is_dir():
            raise GeneratorError(f"{path} is a file; name a folder for the generator")
        elif path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise GeneratorError(f"{path} holds other files than a generator's; name a new folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            refuse_links(path)
            if not (path / "generator.toml").exists():  # the first file: what it says about the others is true
                text = tomli_w.dumps({**asdict(settings), "versions": generator_versions(device)})
                write_atomically(path / "generator.toml", text.encode())
            real_folder(folder.checkpoints)
        except OSError as error:
            raise GeneratorError(f"cannot write to the folder {path}: {error.strerror or error}") from error
        return folder

    def settings(self) -> GeneratorSettings:
        """Return the settings that the training was started with."""
        values = self._values()
        values.pop("versions", None)
        try:
            return GeneratorSettings(**values)
        except (TypeError, ValueError) as error:
            raise GeneratorError(f"{self.path / 'generator.toml'} is not a generator's: {error}") from error

    def changed_versions(self, device: torch.device = CPU) -> list[str]:
        """Return what has another version than when the training was started."""
        then = {"device": "cpu", **self._values().get("versions", {})}  # older ones knew no other device
        return [
            f"{key} {then.get(key, 'unknown')} -> {now}"
            for key, now in generator_versions(device).items()
            if then.get(key) != now
        ]

    def _values(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.path / "generator.toml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise GeneratorError(f"cannot read {self.path / 'generator.toml'}: {error}") from error

    def _refuse_other(self, settings: GeneratorSettings) -> None:
        before, after = asdict(self.settings()), asdict(settings)
        changed = [
            f"{key}: {before[key]!r} -> {after[key]!r}"
            for key in before
            if before[key] != after[key] and not (key == "steps" and before[key] < after[key])
        ]
        if changed:
            raise GeneratorError(f"{self.path} was started with other settings: {'; '.join(changed)}")

    def extend(self, settings: GeneratorSettings) -> None:
        """Plan more steps: the rate is constant and every choice follows from its step's number, so no byte changes."""
        if settings.steps > self.settings().steps:
            self.weights.unlink(missing_ok=True)  # first: they are those of fewer steps
            text = tomli_w.dumps({**self._values(), "steps": settings.steps})
            write_atomically(self.path / "generator.toml", text.encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one process: a second one is refused. The lock ends with the process."""
        with held(self.path / ".lock", GeneratorError(f"another process is training in {self.path}")):
            for folder in (self.path, self.checkpoints):
                remove_leftovers(folder)
            yield

    def save(self, step: int, tensors: State) -> None:
        """Write a checkpoint, then remove all but the newest :data:`KEEP`."""
        # one metadata entry only: safetensors does not keep the order of several
        content = safetensors.torch.save(dict(tensors), {"feddf": json.dumps({"step": step})})
        write_checked(self.checkpoints / f"step-{step:07d}.safetensors", content)
        self._remove(self._checkpoint_files()[KEEP:])

    def latest(self) -> tuple[int, State | None, list[str]]:
        """Return step and tensors of the newest whole checkpoint (0, ``None`` without one), and what was wrong."""
        complaints: list[str] = []
        for path in self._checkpoint_files():
            try:
                return _step(path), safetensors.torch.load(read_checked(path)), complaints
            except (OSError, ValueError, safetensors.SafetensorError) as error:
                complaints.append(f"{path.name} is damaged ({error}); going back to an earlier step")
        return 0, None, complaints

    def forget_after(self, step: int) -> None:
        """Drop what belongs to steps later than ``step``: damaged checkpoints and lines of the log."""
        self._remove([path for path in self._checkpoint_files() if _step(path) > step])
        keep_lines(self.losses, lambda record: bool(record["step"] <= step))

    def append(self, record: Mapping[str, float]) -> None:
        """Add a line to the log, on disk when this returns."""
        append_line(self.losses, json.dumps(record))

    def finish(self, state: State) -> None:
        """Write the final weights as a plain state dict."""
        write_checked(self.weights, safetensors.torch.save(dict(state)))

    def generator(self) -> Generator:
        """Return the trained generator in eval mode."""
        settings = self.settings()
        if not self.weights.is_file():
            raise GeneratorError(f"{self.path} holds no trained generator yet: it has no {self.weights.name}")
        with torch.random.fork_rng(devices=[]):  # building draws initial weights that are thrown away
            generator = settings.build()
        try:
            whole = self.weights.with_suffix(".sha256").exists()  # who copies two files only may use them
            content = read_checked(self.weights) if whole else self.weights.read_bytes()
            generator.load_state_dict(safetensors.torch.load(content))
        except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
            raise GeneratorError(f"{self.weights} is damaged ({first_line(error)})") from error
        return generator.eval()

    def _checkpoint_files(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*.safetensors"), key=_step, reverse=True)

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink()
            path.with_suffix(".sha256").unlink(missing_ok=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
