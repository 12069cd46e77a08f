"""A device that exists in tests only. To torch it is another device than the CPU; inside, it computes on the CPU.

So a program that runs on it as on the CPU will run on any device, as far as one can tell without having one: its
tensors refuse to be mixed with the CPU's (but for single numbers, as a GPU does), and every transfer is counted. Unlike
on a GPU, a CPU tensor of indices is refused too: it would be sent without anybody having asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from feddf import batches

NAME = "pretend"

READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
"""Operations whose result the host has to wait for, besides copies to it."""


@dataclass
class Transfers:
    """How often something went to the device, and how often the host waited for something from it."""

    to_device: int = 0
    to_host: int = 0


class Backend(backend_registration._DummyBackendModule):
    """What torch and feddf ask about the device; ``free`` bytes of it are free."""

    free = 2**30

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return self.free, 2**31

    def get_device_name(self, device: object = None) -> str:
        return "in tests"


@cache
def registered() -> Backend:
    """Make torch know the device; it cannot be taken back, and harms nobody."""
    backend = Backend()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend)
    return backend


class PretendTensor(Tensor):
    """A tensor on the device. ``inner`` is the CPU tensor that has its values."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> PretendTensor:
        made: PretendTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} was called on the pretend device outside of 'with pretend_device()'")


class _Mode(TorchDispatchMode):
    """Runs every operation on the CPU, and gives what comes out back to the device that it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers = Transfers()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
        named = kwargs.get("device")
        target = torch.device(named) if named is not None else there[0].device if there else torch.device("cpu")
        if not there and target.type != NAME:
            return function(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode, what is made of other operations comes here whole
                return function.decompose(*args, **kwargs)
        self._check(function, args, tensors, there, target)
        if named is not None:
            kwargs["device"] = torch.device("cpu")
        result = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if target.type != NAME:
            return result
        if function._schema.name.endswith("_") and args and isinstance(args[0], PretendTensor):
            return args[0]  # it was changed in place
        return tree_map(lambda leaf: PretendTensor(leaf, target) if isinstance(leaf, Tensor) else leaf, result)

    def _check(
        self, function: Any, args: Any, tensors: list[Tensor], there: list[PretendTensor], target: torch.device
    ) -> None:
        name = function.overloadpacket.__name__
        if name == "_to_copy":
            self.transfers.to_device += int(not there)
            self.transfers.to_host += int(target.type != NAME)
        elif name == "copy_":
            onto, source = (isinstance(one, PretendTensor) for one in args[:2])
            self.transfers.to_device += int(onto and not source)
            self.transfers.to_host += int(source and not onto)
        elif name in READS:
            self.transfers.to_host += 1
        elif any(tensor.ndim and not isinstance(tensor, PretendTensor) for tensor in tensors):
            found = f"found at least two devices, {NAME} and cpu, in {function}"
            raise RuntimeError(f"Expected all tensors to be on the same device, but {found}")


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, PretendTensor) else leaf


@contextmanager
def pretend_device(free: int = 2**30) -> Iterator[Transfers]:
    """Let the device exist inside the block, empty and with so much memory; count the transfers in what is yielded."""
    backend = registered()
    batches.forget()
    before, backend.free = backend.free, free
    try:
        with _Mode() as mode:
            yield mode.transfers
    finally:
        backend.free = before


def counted(work: Callable[[], object], free: int = 2**30) -> Transfers:
    """Return the transfers of a piece of work."""
    with pretend_device(free) as transfers:
        work()
    return transfers
