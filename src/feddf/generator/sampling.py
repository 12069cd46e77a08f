"""Images out of a generator: ours, a user's exported program, or any callable from latents to images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from feddf.config.errors import first_line
from feddf.generator.generator_folder import GeneratorError, GeneratorFolder
from feddf.runtime.device import CPU, device_of, moved
from feddf.runtime.origin import check_program
from feddf.runtime.threads import threads
from feddf.seeds import torch_generator

Make = Callable[[Tensor], Tensor]
"""Latents, N × their shape, to images in [−1, 1], N × C × H × W."""

LATENTS = 256


def sample_images(generator: Make, n: int, latent: tuple[int, ...], seed: int) -> Tensor:
    """Return n images as bytes, N × C × H × W, of latents from N(0, 1) that the seed decides.

    A module answers in eval mode and without gradients, on the device that it is on. It is always asked for whole
    batches: so the first images of a larger sample are, byte by byte, a smaller sample of the same seed. One torch
    thread does it, on any machine.
    """
    if n < 1:
        raise ValueError(f"n = {n}: at least one image must be asked for")
    random, device = torch_generator(seed), device_of(generator) if isinstance(generator, nn.Module) else CPU
    batches: list[Tensor] = []
    with _evaluating(generator), torch.no_grad(), threads(1):
        for _ in range(0, n, LATENTS):
            latents = moved(torch.randn((LATENTS, *latent), generator=random), device)
            batches.append(_bytes(_checked(generator(latents))).to(CPU))
    return torch.cat(batches)[:n]


def _bytes(images: Tensor) -> Tensor:
    """Return round((x + 1) · 255 / 2) of values in [−1, 1]."""
    return ((images.to(torch.float32).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def _checked(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor):
        raise ValueError(f"a generator must give a tensor of images, N × C × H × W, got {type(images).__name__}")
    if images.ndim != 4 or len(images) != LATENTS:
        raise ValueError(
            f"a generator must give N × C × H × W images, got shape {tuple(images.shape)} for {LATENTS} latents"
        )
    if not images.isfinite().all():
        raise ValueError("a generator must give finite images in [−1, 1], got NaN or infinity")
    return images


@contextmanager
def _evaluating(generator: Make) -> Iterator[None]:
    """Put a module into eval mode inside the block; what is no module has no modes."""
    modules = generator.modules() if isinstance(generator, nn.Module) else ()
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def load_generator(path: Path, *, trust: bool = False) -> tuple[Make, tuple[int, ...]]:
    """Return a generator and the shape of one latent, from a folder of ``feddf generator train`` or a ``*.pt2`` file.

    A ``*.pt2`` file holds a program that ``torch.export.save`` wrote; its example input tells the latent's shape. To
    read such a file is to run it, so it needs ``trust``.
    """
    if path.suffix == ".pt2":
        return _load_program(path, trust)
    if not (path / "generator.toml").is_file():
        allowed = "name a folder made by: feddf generator train, or a file that ends in .pt2"
        raise GeneratorError(f"{path} is not a generator: it has no generator.toml; {allowed}")
    folder = GeneratorFolder(path)
    return folder.generator(), (folder.settings().latent,)


@dataclass(frozen=True)
class _Program:
    """An exported program, which may have been exported for one size of batch only."""

    run: Make
    batch: int

    def __call__(self, latents: Tensor) -> Tensor:
        answers = [self._answer(part) for part in latents.split(self.batch)]
        return torch.cat(answers)

    def _answer(self, latents: Tensor) -> Tensor:
        filled = torch.cat([latents, latents.new_zeros((self.batch - len(latents), *latents.shape[1:]))])
        answer = self.run(filled)
        if not isinstance(answer, Tensor) or len(answer) != self.batch:
            raise ValueError(f"a generator must give N × C × H × W images, one for each of {self.batch} latents")
        return answer[: len(latents)]


def _load_program(path: Path, trust: bool) -> tuple[Make, tuple[int, ...]]:
    if not path.is_file():
        raise GeneratorError(f"there is no file {path}")
    check_program(path, trust)
    try:
        program = torch.export.load(path)
        run = program.module()
    except Exception as error:  # a damaged archive can fail in any way
        raise GeneratorError(f"{path} is not a program written by torch.export.save: {first_line(error)}") from error
    arguments, named = cast(tuple[tuple[Any, ...], dict[str, Any]], program.example_inputs or ((), {}))
    if len(arguments) != 1 or named or not isinstance(arguments[0], Tensor) or arguments[0].ndim < 2:
        raise GeneratorError(
            f"{path} must take one argument, a batch of latents, and be exported with an example of it"
        )
    return _Program(run, _batch(program)), tuple(arguments[0].shape[1:])


def _batch(program: torch.export.ExportedProgram) -> int:
    """Return the size of batch that a program takes, the largest up to :data:`LATENTS` if it takes several."""
    (name,) = program.graph_signature.user_inputs
    value = next(node for node in program.graph.nodes if node.name == name).meta["val"]
    size = value.shape[0]
    if isinstance(size, int):
        return size
    allowed = program.range_constraints.get(size.node.expr)
    most = allowed.upper if allowed is not None else LATENTS
    return int(min(LATENTS, most))
