"""How a model is called: as it is or compiled, in which precision, and with its weights in which order in memory.

``torch.compile`` (``run.compile = true``) needs a C++ compiler and takes ten seconds or more for each architecture and
mode, and again for very small or large batches. Its code is kept in torch's cache on disk, shared by workers and runs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

Forward = Callable[[Tensor], Tensor]

_TRIAL = (
    "import sys, torch; print(torch.compile(lambda x: x.relu() + 1)(torch.ones(8, device=sys.argv[1])).sum().item())"
)


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


@cache
def can_compile(device: str = "cpu") -> bool:
    """Say whether this machine can compile for a device, tried out in a child process, where a crash does no harm."""
    trial = subprocess.run([sys.executable, "-c", _TRIAL, device], capture_output=True, text=True, check=False)
    return trial.returncode == 0 and trial.stdout.strip() == "16.0"


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
