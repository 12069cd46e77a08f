"""Raw batches where the model is: looked up on its device if the data fit there, else copied to it ahead of use."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from feddf.runtime.device import fits, moved
from feddf.types import Rows


def batches(rows: Rows, order: Iterable[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (indices, the rows at them), both on the device, for every batch of indices in ``order``.

    Rows in memory move to an accelerator whole, once, if they fit (:func:`feddf.runtime.device.fits`); of others, each
    batch is on its way from pinned memory before the one before it is used. On the CPU nothing is copied twice.
    """
    if device.type == "cpu":
        for chosen in order:
            yield chosen, rows[chosen]
        return
    if isinstance(rows, Tensor) and ((id(rows), device) in _there or fits(rows.numel() * rows.element_size(), device)):
        there = device_copy(rows, device)
        for chosen in order:
            at = moved(chosen, device)
            yield at, there[at]
        return
    ahead: tuple[Tensor, Tensor] | None = None
    for chosen in order:
        sent = moved(chosen, device), moved(rows[chosen], device)
        if ahead is not None:
            yield ahead
        ahead = sent
    if ahead is not None:
        yield ahead


_there: dict[tuple[int, torch.device], Tensor] = {}
"""What is on a device already, by the ``id`` of the tensor on the CPU that it is a copy of."""


def device_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the copy is kept for as long as the tensor itself lives in this process."""
    if tensor.device == device:
        return tensor
    place = id(tensor), device
    if place not in _there:
        with torch.inference_mode(mode=False):  # it may be learned from later
            _there[place] = moved(tensor, device)
        weakref.finalize(tensor, _there.pop, place, None)
    return _there[place]


def resident_bytes() -> int:
    """Return how many bytes of data this process keeps on devices."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _there.values())


def forget() -> None:
    """Let go of all data on devices; they move there again when they are asked for."""
    _there.clear()
