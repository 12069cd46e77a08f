"""Images of a frozen generator: an exported program (``.pt2``), or any callable from latents to images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from feddf.config.errors import first_line
from feddf.runtime.atomic import check_program
from feddf.runtime.device import CPU, device_of, moved, threads
from feddf.seeds import torch_generator

Make = Callable[[Tensor], Tensor]
"""Latents, N × their shape, to images in [−1, 1], N × C × H × W."""

LATENTS = 256
"""How many images are asked for at a time."""


def sample_images(generator: Make, n: int, latent: tuple[int, ...], seed: int) -> Tensor:
    """Return n images as bytes, N × C × H × W, of latents from N(0, 1) that the seed decides.

    A module is used in eval mode and without gradients, on the device that it is on. Only whole batches are asked for:
    so the first images of a larger sample are, byte by byte, a smaller sample of the same seed. One torch thread is
    used on any machine, because sums split over threads round differently.
    """
    random, device = torch_generator(seed), device_of(generator) if isinstance(generator, nn.Module) else CPU
    batches: list[Tensor] = []
    with _eval_mode(generator), torch.no_grad(), threads(1):
        for _ in range(0, n, LATENTS):
            latents = moved(torch.randn((LATENTS, *latent), generator=random), device)
            batches.append(_to_bytes(_check_images(generator(latents), LATENTS)).to(CPU))
    return torch.cat(batches)[:n]


def _to_bytes(images: Tensor) -> Tensor:
    """Return round((x + 1) · 255 / 2) of values in [−1, 1]."""
    return ((images.to(torch.float32).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def _check_images(images: Tensor, n: int) -> Tensor:
    if not isinstance(images, Tensor) or images.ndim != 4 or len(images) != n:
        given = f"shape {tuple(images.shape)}" if isinstance(images, Tensor) else f"a {type(images).__name__}"
        raise ValueError(f"a generator must give a tensor of N × C × H × W images, got {given} for {n} latents")
    if not images.isfinite().all():
        raise ValueError("a generator must give finite images in [−1, 1], got NaN or infinity")
    return images


@contextmanager
def _eval_mode(generator: Make) -> Iterator[None]:
    """Put a module and its parts into eval mode inside the block; other callables have no modes."""
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
    """Return a generator and the shape of one latent from a ``.pt2`` file.

    The file holds a program that ``torch.export.save`` wrote; its example input tells the latent's shape. To read such
    a file is to run it, so it needs ``trust``.
    """
    if path.suffix != ".pt2" or not path.is_file():
        raise ValueError(f"{path} is not a generator: name a .pt2 file (examples/train_generator.py writes one)")
    check_program(path, trust)
    try:
        program = torch.export.load(path)
        run = program.module()
    except Exception as error:  # a damaged archive can fail in any way
        raise ValueError(f"{path} is not a program written by torch.export.save: {first_line(error)}") from error
    arguments, named = cast(tuple[tuple[Any, ...], dict[str, Any]], program.example_inputs or ((), {}))
    if len(arguments) != 1 or named or not isinstance(arguments[0], Tensor) or arguments[0].ndim < 2:
        raise ValueError(f"{path} must take one argument, a batch of latents, and be exported with an example of it")
    return _in_batches(run, _batch_size(program)), tuple(arguments[0].shape[1:])


def _in_batches(run: Make, size: int) -> Make:
    """Return a program that takes batches of any size; the exported one may take a single size only."""

    def make(latents: Tensor) -> Tensor:
        short = -len(latents) % size
        filled = torch.cat([latents, latents.new_zeros((short, *latents.shape[1:]))])
        return torch.cat([_check_images(run(part), size) for part in filled.split(size)])[: len(latents)]

    return make


def _batch_size(program: torch.export.ExportedProgram) -> int:
    """Return the size of batch that a program takes, the largest up to :data:`LATENTS` if it takes several."""
    (name,) = program.graph_signature.user_inputs
    value = next(node for node in program.graph.nodes if node.name == name).meta["val"]
    size = value.shape[0]
    if isinstance(size, int):
        return size
    allowed = program.range_constraints.get(size.node.expr)
    return int(min(LATENTS, allowed.upper if allowed is not None else LATENTS))
