"""The server's unlabeled pool: inputs from another source, in the form that the federation's models expect.

Sources are other data sets or some of their classes, noise, and frozen generators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddf.config.errors import one_line
from feddf.evaluate import evaluation_mode
from feddf.runtime.atomic import check_program
from feddf.runtime.device import CPU, device_of, moved, threads
from feddf.runtime.packages import silence
from feddf.seeds import derive, numpy_generator, torch_generator
from feddf.types import Inputs, Rows

Make = Callable[[Tensor], Tensor]
"""A generator: latents, N × their shape, to images in [−1, 1], N × C × H × W."""

Classes = Sequence[str | int]
"""Some classes, by name or number."""

LATENTS = 256
"""How many images a generator is asked for at a time."""


def match_inputs(source: Tensor, like: Inputs) -> Inputs:
    """Return ``source``'s images in the shape of ``like``'s, encoded as ``like``'s are.

    The models' own normalization is used, not that of the source: the pool stands in for the inputs that the models
    will see. (The released code normalizes the pool with its own statistics.)
    """
    return Inputs(resize(source, tuple(like.raw.shape[1:]), like.raw.dtype), like.encode)


def resize(source: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return raw inputs in a shape; inputs of another type, or of no images, must have it already.

    Images are resized bilinearly; gray ones become colored by repetition and colored ones gray by their mean.
    """
    if source.dtype != dtype:
        raise ValueError(f"inputs of type {source.dtype} cannot stand in for inputs of type {dtype}")
    if tuple(source.shape[1:]) == shape:
        return source
    if source.ndim != 4 or len(shape) != 3:
        raise ValueError(f"inputs of shape {tuple(source.shape[1:])} cannot stand in for inputs of shape {shape}")
    parts = [_resize(part, shape) for part in source.split(4096)]  # floats take four times the room of bytes
    return torch.cat(parts).to(dtype)


def _resize(images: Tensor, wanted: tuple[int, ...]) -> Tensor:
    channels, pixels = wanted[0], images.to(torch.float32)
    if channels == 1:
        pixels = pixels.mean(dim=1, keepdim=True)
    elif pixels.shape[1] == 1:
        pixels = pixels.expand(-1, channels, -1, -1)
    if pixels.shape[1] != channels:
        raise ValueError(f"images of {images.shape[1]} channels cannot stand in for images of {channels}")
    resized = F.interpolate(pixels, size=wanted[1:], mode="bilinear", align_corners=False, antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else resized


def all_rows(rows: Rows) -> Tensor:
    """Return raw inputs as a tensor; those in a file are read."""
    return rows if isinstance(rows, Tensor) else rows[torch.arange(len(rows))]


def choose(source: Rows, size: int | None, seed: int) -> Tensor:
    """Return ``size`` of the source's inputs, chosen at random without repetition (all of them for ``None``)."""
    if size is None or size == len(source):
        return all_rows(source)
    if size > len(source):
        raise ValueError(f"{size} inputs were asked for, and the source has {len(source)}")
    chosen = numpy_generator(seed).choice(len(source), size, replace=False)
    return source[torch.from_numpy(chosen).sort().values]


def with_views(images: Tensor, views: int, flips: bool, seed: int) -> Tensor:
    """Return the images, and after them ``views`` − 1 times a shifted copy of each; they are the same every time."""
    generator = torch_generator(seed)
    copies = [shifted(part, generator, flips) for _ in range(views - 1) for part in images.split(4096)]
    return torch.cat([images, *copies])


def shifted(images: Tensor, generator: torch.Generator, flips: bool) -> Tensor:
    """Return each image moved by up to a quarter of its sides, and with ``flips`` mirrored with probability ½.

    What moves in at an edge is reflected, so that no pixel has a value that images do not have. One gather serves a
    whole batch.
    """
    n, _, height, width = images.shape
    rows, columns = (_reflected(n, size, generator) for size in (height, width))
    moved_down = images.gather(2, rows.view(n, 1, height, 1).expand_as(images))
    found = moved_down.gather(3, columns.view(n, 1, 1, width).expand_as(images))
    if not flips:
        return found
    mirrored = torch.rand((n, 1, 1, 1), generator=generator) < 0.5
    return torch.where(mirrored, found.flip(3), found)


def _reflected(n: int, size: int, generator: torch.Generator) -> Tensor:
    """Return for n images which row (or column) moves to each place."""
    reach = size // 4
    places = torch.arange(size) + torch.randint(-reach, reach + 1, (n, 1), generator=generator)
    return (size - 1) - ((size - 1) - places.abs()).abs()


def of_classes(
    labels: Tensor, n_classes: int, names: Sequence[str], wanted: int | Classes | None, avoid: Classes, seed: int
) -> Tensor:
    """Return the indices of the examples of some classes: so many chosen at random, or those named or numbered.

    ``names`` are those of the classes; where they have none (downsampled ImageNet), classes are chosen and avoided by
    number. Classes that share a word with a name in ``avoid`` are left out: the paper distills on "classes without
    overlap" (section 5). It compared synonyms, hyponyms and hypernyms; here words are compared, so "maple tree" and
    "oak tree" overlap, and "lorry" and "truck" do not: name what else must go.
    """
    if not names and any(isinstance(one, str) for one in (*avoid, *(wanted if isinstance(wanted, Sequence) else ()))):
        raise ValueError("its classes have no names: choose and avoid them by number")
    taken = {word for one in avoid if isinstance(one, str) for word in words(one)}
    known = list(names) or [""] * n_classes
    free = [number for number, name in enumerate(known) if number not in avoid and not words(name) & taken]
    if wanted is None:
        chosen = free
    elif isinstance(wanted, int):
        if wanted > len(free):
            raise ValueError(f"{wanted} classes were asked for, and {len(free)} have no word in common with the others")
        chosen = sorted(numpy_generator(derive(seed, "classes")).permutation(free)[:wanted].tolist())
    else:
        unknown = [one for one in wanted if one not in (known if isinstance(one, str) else range(n_classes))]
        if unknown:
            raise ValueError(f"the source has no class {unknown[0]!r}; it has {', '.join(known[:8])}, ...")
        chosen = [number for number in free if number in wanted or known[number] in wanted]
    indices = torch.isin(labels, torch.tensor(chosen, dtype=torch.int64)).nonzero().flatten()
    if not len(indices):
        raise ValueError("no class is left")
    return indices


def words(name: str) -> set[str]:
    """Return the words of a class name, without case, punctuation and a plural's s.

    >>> sorted(words("Aquarium_fish, Sharks"))
    ['aquarium', 'fish', 'shark']
    """
    found = re.findall(r"[a-z]+", name.lower())
    return {word.removesuffix("s") if len(word) > 3 else word for word in found}


def noise(shape: tuple[int, ...], dtype: torch.dtype, size: int, seed: int) -> Tensor:
    """Return uniform noise: bytes for images, features from (−3, 3); token numbers are not noise worth having."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, (size, *shape), generator=torch_generator(seed), dtype=torch.uint8)
    if dtype != torch.float32:
        raise ValueError(f"there is no noise for inputs of type {dtype}")
    return -3.0 + 6.0 * torch.rand((size, *shape), generator=torch_generator(seed))


def sample_images(generator: Make, n: int, latent: tuple[int, ...], seed: int) -> Tensor:
    """Return n images as bytes, N × C × H × W, of latents from N(0, 1) that the seed decides.

    A value x in [−1, 1] becomes the byte round((x + 1) · 255 / 2). A module is used in eval mode and without gradients,
    on the device that it is on. Only whole batches are asked for: so the first images of a larger sample are, byte by
    byte, a smaller sample of the same seed. One torch thread is used on any machine, because sums split over threads
    round differently.
    """
    random, device, batches = torch_generator(seed), CPU, list[Tensor]()
    mode: AbstractContextManager[Any] = torch.no_grad()
    if isinstance(generator, nn.Module):
        device, mode = device_of(generator), evaluation_mode(generator)
    with mode, threads(1):
        for _ in range(0, n, LATENTS):
            latents = moved(torch.randn((LATENTS, *latent), generator=random), device)
            images = _check_images(generator(latents), LATENTS).to(torch.float32).clamp(-1, 1)
            batches.append(((images + 1) * 127.5).round().to(torch.uint8).to(CPU))
    return torch.cat(batches)[:n]


def _check_images(images: Tensor, n: int) -> Tensor:
    if not isinstance(images, Tensor) or images.ndim != 4 or len(images) != n:
        given = f"shape {tuple(images.shape)}" if isinstance(images, Tensor) else f"a {type(images).__name__}"
        raise ValueError(f"a generator must give a tensor of N × C × H × W images, got {given} for {n} latents")
    if not images.isfinite().all():
        raise ValueError("a generator must give finite images in [−1, 1], got NaN or infinity")
    return images


def load_generator(path: Path, *, trust: bool = False) -> tuple[Make, tuple[int, ...]]:
    """Return a generator and the shape of one latent from a ``.pt2`` file.

    The file holds a program that ``torch.export.save`` wrote; its example input tells the latent's shape. To read such
    a file is to run it, so it needs ``trust``.
    """
    if path.suffix != ".pt2" or not path.is_file():
        raise ValueError(f"{path} is not a generator: name a .pt2 file (examples/train_generator.py writes one)")
    check_program(path, trust)
    program, (size, *_) = read_program(path, "latents")
    example, run = next(iter((program.example_inputs or [()])[0]), None), program.module()
    if not isinstance(example, Tensor) or example.ndim < 2:
        raise ValueError(f"{path} must be exported with an example of a batch of latents as its argument")
    if not isinstance(size, int):  # it takes several
        allowed = program.range_constraints.get(size.node.expr)
        size = int(min(LATENTS, allowed.upper if allowed is not None else LATENTS))

    def make(latents: Tensor) -> Tensor:
        return in_batches(lambda part: _check_images(run(part), size), latents, size)

    return make, tuple(example.shape[1:])


def read_program(path: Path, what: str) -> tuple[Any, Sequence[Any]]:
    """Return a program that ``torch.export.save`` wrote, and the sizes of a batch of ``what``, its one argument.

    A size that is no number stands for several.
    """
    with one_line(ValueError, f"{path} is not a whole program of torch.export.save"), silence():
        program = torch.export.load(path)
    inputs = program.graph_signature.user_inputs
    if len(inputs) != 1:
        raise ValueError(f"{path} must take one argument, a batch of {what}, and takes {len(inputs)}")
    return program, next(node for node in program.graph.nodes if node.name == inputs[0]).meta["val"].shape


def in_batches(run: Make, inputs: Tensor, size: int) -> Tensor:
    """Run a program that takes batches of one size; the last is filled up with copies, whose outputs are left out."""
    parts = [(part, part[-1:].expand(size - len(part), *part.shape[1:])) for part in inputs.split(size)]
    return torch.cat([run(torch.cat([part, copies]))[: len(part)] for part, copies in parts])
