"""How a piece of training is executed: on which device, in which precision, on how many threads, compiled or not.

``torch.compile`` (``run.compile = true``) needs a C++ compiler and takes ten seconds or more for each architecture and
mode, and again for very small or large batches. Its code is kept in torch's cache on disk, shared by workers and runs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
import torch.utils.deterministic
from torch import Tensor, nn
from torch.nn.utils import parametrize

from feddf.config.errors import ConfigError
from feddf.config.sections import Precision, RunConfig
from feddf.runtime.device import choose, placed, release_if_scarce, works

Forward = Callable[[Tensor], Tensor]


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
    cudnn, filling = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    matmul, fill = torch.get_float32_matmul_precision(), filling.fill_uninitialized_memory
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    cudnn.allow_tf32 = precision == "tf32"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to promise anything
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        filling.fill_uninitialized_memory = False  # memory that is not written is not read here either
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(enabled, warn_only=only_warn)
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
        filling.fill_uninitialized_memory = fill


def of_answers(run: RunConfig) -> Execution:
    """Return how models answer: each on one thread, so that the same bytes come out anywhere."""
    return Execution(device=device_for(run), precision=run.precision, deterministic=run.deterministic)


def of_clients(run: RunConfig) -> Execution:
    """Return how clients train: as models answer, and compiled where that is asked for and possible."""
    plain = of_answers(run)
    if run.compile and not can_compile(plain.device):
        warnings.warn("this machine cannot compile (is a C++ compiler installed?); going on without", stacklevel=2)
        return plain
    return replace(plain, compile=run.compile)


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
    device, precision = choose(run.device), run.precision
    if precision == "tf32" and device.type != "cuda":
        raise ConfigError.at("run.precision", precision, f"only NVIDIA's GPUs have it, and the device is {device}")
    if precision != "float32" and not works(str(device), precision):
        allowed = f"a short training with it on {device} crashed or went wrong here; use 'float32'"
        raise ConfigError.at("run.precision", precision, allowed)
    return str(device)


def can_compile(device: str = "cpu") -> bool:
    """Say whether this machine can compile for a device, tried out in a child process, where a crash does no harm."""
    return works(device, "compile")


# How a model is called


def forward_of(model: nn.Module, compile: bool, precision: str = "float32") -> Forward:
    """Return how to call the model: as it is, or through compiled code that all models of its architecture share.

    A parametrized model (a binarized one) is of a class of its own and would be compiled again every time: it is called
    as it is.
    """
    parametrized = any(parametrize.is_parametrized(module) for module in model.modules())
    return in_precision(_compiled(model) if compile and not parametrized else model, precision)


def in_precision(forward: Forward, precision: str) -> Forward:
    """Return a forward pass in this precision. In bfloat16, weights stay in float32 and so do the logits."""
    if precision != "bfloat16":
        return forward

    def cast(inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            logits = forward(inputs)
        return logits.float()  # losses and means are computed in float32 or wider

    return cast


def _compiled(model: nn.Module) -> Forward:
    torch._dynamo.config.cache_size_limit = 64  # several architectures share one function
    call = _compiled_call()

    def forward(inputs: Tensor) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(inputs, 0)
        return call(model, inputs)

    return forward


@cache
def _compiled_call() -> Callable[[nn.Module, Tensor], Tensor]:
    """Return one compiled function for all models: wrapping each of a thousand small clients would cost more."""
    return torch.compile(_call)


def _call(model: nn.Module, inputs: Tensor) -> Tensor:
    logits: Tensor = model(inputs)
    return logits


SAFE_CHANNELS = 8
"""The least input channels of a strided 1×1 convolution whose gradient may be computed with channels last.

torch 2.13 on a CPU whose widest vectors have 256 bits (AVX2) writes beyond the gradient of the weights if there are
fewer, and corrupts the heap::

    x = torch.randn(3, 4, 14, 14).contiguous(memory_format=torch.channels_last)
    w = torch.randn(8, 4, 1, 1, requires_grad=True)
    torch.nn.functional.conv2d(x, w, stride=2).sum().backward()

Outputs and gradients of all other widths (1 to 64), kernels, strides, sides and batches agree with the plain order, and
leave the heap whole (``tests/runtime/test_layout.py``).
"""


def put_channels_last(model: nn.Module) -> None:
    """Reorder the weights of the model's convolutions, which are a third faster then; the values stay as they are.

    What a convolution returns has the order of its weights, and so has all that follows. So a model stays as it is if
    one of its convolutions is unsafe, or is none of torch's own modules.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    known = {id(module.weight) for module in convolutions}
    if any(map(_is_unsafe, convolutions)) or any(w.ndim == 4 and id(w) not in known for w in model.parameters()):
        return
    for module in convolutions:
        module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)


def _is_unsafe(convolution: nn.Conv2d) -> bool:
    strided_pointwise = max(convolution.kernel_size) == 1 and max(convolution.stride) > 1
    return strided_pointwise and convolution.in_channels // convolution.groups < SAFE_CHANNELS


# Models are copied instead of built again: building draws initial weights, which are thrown away


def copier(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Return how to copy a model that was built for this, with weights of any value; ``None`` if it may not be copied.

    The original itself computes nothing, so no state of one copy can reach another. A network's own class may hold
    anything: only those of torch and feddf are copied, and only while all that they hold besides tensors are values.
    """
    if not all(map(_is_plain, model.modules())):
        return None
    shapes = {weight: (weight.shape, weight.dtype, weight.requires_grad) for weight in model.parameters()}
    for weight in shapes:
        weight.data = weight.data.new_empty(0)  # a copy's are its own

    def copied() -> nn.Module:
        done: dict[Any, Any] = {}
        for weight, (shape, dtype, learned) in shapes.items():
            done[weight] = nn.Parameter(torch.empty(shape, dtype=dtype), learned)
        new: nn.Module = _copied(model, done)
        return new

    return copied


_VALUES = bool, int, float, str, type(None), torch.dtype


def _is_plain(module: nn.Module) -> bool:
    own = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}
    values = [one for value in own.values() for one in (value if isinstance(value, tuple | list) else [value])]
    ours = type(module).__module__.startswith(("torch.nn.modules.", "feddf."))
    weights = all(weight is None or type(weight) is nn.Parameter for weight in module._parameters.values())
    return ours and weights and all(isinstance(one, _VALUES) or one in ({}, set()) for one in values)


def _copied(thing: Any, done: dict[Any, Any]) -> Any:
    """Return a plain module's copy; weights and modules that occur twice are ``done`` once."""
    if thing is None or thing in done:
        return done.get(thing)
    if not isinstance(thing, nn.Module):
        return done.setdefault(thing, thing.clone())
    new = done[thing] = object.__new__(type(thing))
    for name, value in vars(thing).items():
        if name in ("_parameters", "_buffers", "_modules"):
            value = {key: _copied(one, done) for key, one in value.items()}
        new.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
    return new
