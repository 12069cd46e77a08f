"""Where torch computes: which devices are here, whether they work, which one is this worker's, and how full it is.

A device has torch's name. One without a number (``cuda``) stands for all of its kind: worker k takes number k modulo
their count. Nothing here changes torch's own default device. (A sum split over two threads rounds differently: so the
number of threads is part of where.)
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from feddf.config.errors import ConfigError

CPU = torch.device("cpu")

ACCELERATORS = "cuda", "xpu", "mps"  # the kinds that ``auto`` tries, in this order

WORKERS_A_DEVICE = 2
"""How many workers share an accelerator unless a run says otherwise: while one prepares a step, the other computes."""


def choose(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is the first accelerator that passes a self-test, else the CPU.

    >>> choose("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return next((torch.device(kind) for kind in ACCELERATORS if count(kind) and works(kind, "float32")), CPU)
    with suppress(RuntimeError):  # torch's, for a name that it does not know
        device = torch.device(name)
        if count(device.type) > (device.index or 0):
            return device
    here = ", ".join(kind if n == 1 else f"{kind} ({n} of them)" for kind, n in present().items())
    allowed = f"this machine's torch ({torch.__version__}) has no such device; it has: {here}"
    raise ConfigError.at("run.device", name, allowed)


def present() -> dict[str, int]:
    """Return how many devices of each kind torch finds here; the CPU is one."""
    return {kind: found for kind in ("cpu", *ACCELERATORS) if (found := count(kind))}


def count(kind: str) -> int:
    """Return how many devices of a kind torch finds here."""
    try:
        return 1 if kind == "cpu" else int(torch.get_device_module(kind).device_count())
    except (RuntimeError, AttributeError):  # a kind that this torch was not built for
        return 0


@cache
def works(name: str, precision: str) -> bool:
    """Say whether a short training on the device agrees with the CPU's: in a child process, which may well crash."""
    command = [sys.executable, str(Path(__file__).with_name("trial.py")), name, precision]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=300).returncode == 0
    except subprocess.TimeoutExpired:
        return False


_worker = 0


def this_is_worker(number: int) -> None:
    """Tell this process which of several workers it is: the devices of a kind are dealt to them in turn."""
    global _worker
    _worker = number


def placed(device: torch.device) -> torch.device:
    """Return the device that this process uses: that of the name, or this worker's where the name has no number."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, _worker % max(1, count(device.type)))


def device_of(model: nn.Module) -> torch.device:
    """Return where a model is; one without any tensor is on the CPU."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return CPU if first is None else first.device


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without waiting for it where that is safe: from pinned memory."""
    if tensor.device == device:
        return tensor
    if device.type in ("cuda", "xpu") and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type that a device adds up in: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on ``count`` torch threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(model: nn.Module, example: Tensor, batch: int) -> int:
    """Return on how many threads a lone model trains: two if a step has work for both, else one.

    Two threads wait for each other several times in each step. A small model gains nothing by the second one, and on a
    busy machine, where one of them is often without a core, both are many times slower than one alone. The number
    depends on the model and the batch and never on the machine: bytes must be the same everywhere.

    ``example`` is a batch of one. From 100 million operations of a forward pass over a batch on, a second thread pays
    (docs/decisions/one-thread.md).

    >>> threads_for(nn.Linear(2, 3), torch.zeros(1, 2), 128)
    1
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model.eval()(example)
    return 2 if counted.get_total_flops() * batch >= 100_000_000 else 1


# Memory


def memory(device: torch.device) -> tuple[int, int] | None:
    """Return the free and the whole memory of an accelerator in bytes, where torch can tell."""
    module: Any = getattr(torch, device.type, None)
    if device.type == "mps":
        whole = int(module.recommended_max_memory())
        return whole - int(module.driver_allocated_memory()), whole
    told = getattr(module, "mem_get_info", None)
    if told is None:
        return None
    free, whole = told(device)
    return int(free), int(whole)


def fits(n_bytes: int, device: torch.device) -> bool:
    """Say whether data of this size may stay on an accelerator: in a quarter of its free memory."""
    found = memory(device)
    return found is not None and n_bytes <= 0.25 * found[0]


def release_if_scarce(device: torch.device) -> None:
    """Give back what torch keeps in reserve on an accelerator if less than a fifth is left: other workers need it."""
    found = memory(device)
    if found is not None and found[0] < 0.2 * found[1]:
        release_reserve(device.type)


def release_reserve(*kinds: str) -> None:
    """Give back what torch keeps in reserve on accelerators of these kinds."""
    for kind in kinds:
        getattr(getattr(torch, kind, None), "empty_cache", lambda: None)()


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that a device's memory is full; Apple's GPUs have no type of error for it."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "MPS backend out of memory" in str(error)


def described(device: torch.device) -> str:
    """Return a device's kind and, for an accelerator, its maker's name: what the last bits of a result depend on."""
    if not count(device.type) or device.type == "cpu":  # a Ray cluster's devices need not be here
        return device.type
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return f"{device.type} ({name(placed(device))})" if name is not None else device.type
