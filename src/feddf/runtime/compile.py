"""Compiled training steps, for those who ask for them (``run.compile = true``).

``torch.compile`` needs a C++ compiler and takes ten seconds or more for each architecture and mode, and again for very
small or large batches. Its code is kept in torch's cache on disk, so every worker and every later run shares it.
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

    A parametrised model (a binarised one) is of a class of its own and would be compiled again every time: it is called
    as it is.
    """
    return in_precision(_forward_of(model, compile), precision)


def in_precision(forward: Forward, precision: str) -> Forward:
    """Return a forward pass in this precision. In bfloat16, weights stay in float32 and so do the logits."""
    if precision != "bfloat16":
        return forward

    def cast(inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            logits = forward(inputs)
        return logits.float()  # losses and means are computed in float32 or wider

    return cast


def _forward_of(model: nn.Module, compile: bool) -> Forward:
    if not compile or any(parametrize.is_parametrized(module) for module in model.modules()):
        return model
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
