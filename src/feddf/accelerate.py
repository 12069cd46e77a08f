"""Compiled training steps, for those who ask for them (``compile = true``).

``torch.compile`` needs a C++ compiler and takes ten seconds or more for each architecture and mode, and for very
small or large batches once more. Its code is kept in torch's cache on disk, so every worker and every later run shares
it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]
Accelerate = Callable[[nn.Module], Forward]
"""model -> how to call it."""

_TRIAL = "import torch; print(torch.compile(lambda x: x.relu() + 1)(torch.ones(8)).sum().item())"


def eager(model: nn.Module) -> Forward:
    """Call the model as it is."""
    return model


def compiled(model: nn.Module) -> Forward:
    """Run the model through compiled code, which all models of its architecture share, whatever the batch's size."""
    torch._dynamo.config.cache_size_limit = 64  # several architectures share one function
    call = _compiled_call()

    def forward(inputs: Tensor) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(inputs, 0)
        return call(model, inputs)

    return forward


@cache
def _compiled_call() -> Callable[[nn.Module, Tensor], Tensor]:
    """Return one compiled function for all models: wrapping each of a thousand small clients' would cost more."""
    return torch.compile(_call)


def _call(model: nn.Module, inputs: Tensor) -> Tensor:
    logits: Tensor = model(inputs)
    return logits


@cache
def can_compile() -> bool:
    """Say whether this machine can compile, tried out in a child process: a crash there harms nobody."""
    trial = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, check=False)
    return trial.returncode == 0 and trial.stdout.strip() == "16.0"
