"""How a piece of training is executed: on which device, in which precision, on how many threads, compiled or not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.utils.deterministic

from feddf.config.sections import Precision, RunConfig
from feddf.runtime.compile import can_compile
from feddf.runtime.device import check_precision, choose, placed, release_if_scarce


@dataclass(frozen=True)
class Execution:
    """How training steps run; all of it changes the last bits of a result.

    ``device`` is a name as torch has it, or ``auto``; ``deterministic`` is about accelerators: the CPU always is.
    """

    threads: int = 1
    compile: bool = False
    device: str = "cpu"
    precision: Precision = "float32"
    deterministic: bool = True

    @contextmanager
    def begun(self) -> Iterator[torch.device]:
        """Let torch compute inside the block as is said here, and as before after it; yield this worker's device."""
        device = placed(choose(self.device))
        if device.type == "cpu":
            yield device
            return
        with _accelerator_flags(self.precision, self.deterministic):
            try:
                yield device
            finally:
                release_if_scarce(device)


@contextmanager
def _accelerator_flags(precision: Precision, deterministic: bool) -> Iterator[None]:
    """Set torch's global switches inside the block, and restore them after it.

    float32 numbers are multiplied as such, or in TF32 (by itself torch does the latter in convolutions). If
    ``deterministic``, only algorithms are used that give the same bits every time; what has none raises.
    """
    cudnn, filling = torch.backends.cudnn, torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    matmul, fill = torch.get_float32_matmul_precision(), getattr(filling, _FILL)
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    cudnn.allow_tf32 = precision == "tf32"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to promise anything
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        setattr(filling, _FILL, False)  # memory that is not written is not read here either
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(enabled, warn_only=only_warn)
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
        setattr(filling, _FILL, fill)


_FILL = "fill_uninitialized_memory"


def of_answers(run: RunConfig) -> Execution:
    """Return how models answer: each on one thread, so that the same bytes come out anywhere."""
    return Execution(device=device_for(run), precision=run.precision, deterministic=run.deterministic)


def of_clients(run: RunConfig) -> Execution:
    """Return how clients train: as models answer, and compiled where that is asked for."""
    plain = of_answers(run)
    return replace(plain, compile=_compiles(run, plain.device))


def of_students(run: RunConfig, students: int, lone: Callable[[], int]) -> Execution:
    """Return how students learn: several on one thread each, one alone on ``lone()``: the machine has no say.

    On an accelerator a student needs no more than one thread.
    """
    plain = of_clients(run)
    alone = students == 1 and plain.device == "cpu"
    return replace(plain, threads=run.threads or (lone() if alone else 1))


def device_for(run: RunConfig) -> str:
    """Return the name of the device that a run uses; a device or precision that is not here is refused.

    On a Ray cluster elsewhere, this machine cannot tell which devices the nodes have: the name is taken as it is.
    """
    if run.ray_address is not None and run.device != "auto":
        return run.device
    device = choose(run.device)
    check_precision(device, run.precision)
    return str(device)


def _compiles(run: RunConfig, device: str) -> bool:
    if run.compile and not can_compile(device):
        warnings.warn("this machine cannot compile (is a C++ compiler installed?); going on without", stacklevel=3)
        return False
    return run.compile
