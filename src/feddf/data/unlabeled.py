"""The server's unlabeled pool: inputs from another source, in the form that the federation's models expect."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from feddf.data.augment import shifted
from feddf.seeds import derive, numpy_generator, torch_generator
from feddf.types import Inputs, Rows


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


def all_rows(rows: Rows) -> Tensor:
    """Return raw inputs as a tensor; those in a file are read."""
    return rows if isinstance(rows, Tensor) else rows[torch.arange(len(rows))]


def _resize(images: Tensor, wanted: tuple[int, ...]) -> Tensor:
    channels = wanted[0]
    pixels = images.to(torch.float32)
    if channels == 1:
        pixels = pixels.mean(dim=1, keepdim=True)
    elif pixels.shape[1] == 1:
        pixels = pixels.expand(-1, channels, -1, -1)
    if pixels.shape[1] != channels:
        raise ValueError(f"images of {images.shape[1]} channels cannot stand in for images of {channels}")
    resized = F.interpolate(pixels, size=wanted[1:], mode="bilinear", align_corners=False, antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8) if images.dtype == torch.uint8 else resized


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


def of_classes(
    labels: Tensor,
    n_classes: int,
    names: Sequence[str],
    wanted: int | Sequence[str | int] | None,
    avoid: Sequence[str | int],
    seed: int,
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


def uniform_points(shape: tuple[int, ...], size: int, low: float, high: float, seed: int) -> Tensor:
    """Return features drawn uniformly from (low, high): the pool of the paper's toy is 60 points in (−3, 3)²."""
    return low + (high - low) * torch.rand((size, *shape), generator=torch_generator(seed))


def noise(shape: tuple[int, ...], dtype: torch.dtype, size: int, seed: int) -> Tensor:
    """Return uniform noise: bytes for images, features from (−3, 3); token numbers are not noise worth having."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, (size, *shape), generator=torch_generator(seed), dtype=torch.uint8)
    if dtype != torch.float32:
        raise ValueError(f"there is no noise for inputs of type {dtype}")
    return uniform_points(shape, size, -3.0, 3.0, seed)
