"""Compiled training steps, for those who ask for them (``compile = true``).

``torch.compile`` needs a C++ compiler and takes ten seconds or more for each architecture, batch size and mode. Its
code is kept in torch's cache on disk, so every worker and every later run shares it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]
Accelerate = Callable[[nn.Module, int], Forward]
"""(model, size of a full batch) -> how to call it."""

_TRIAL = "import torch; print(torch.compile(lambda x: x.relu() + 1)(torch.ones(8)).sum().item())"


def eager(model: nn.Module, batch: int) -> Forward:
    """Call the model as it is."""
    return model


def compiled(model: nn.Module, batch: int) -> Forward:
    """Run full batches through compiled code and the last, smaller one as usual: each size would be compiled anew."""
    torch._dynamo.config.cache_size_limit = 64  # several architectures share one forward function
    fast = torch.compile(model, dynamic=False)

    def forward(inputs: Tensor) -> Tensor:
        logits: Tensor = fast(inputs) if len(inputs) == batch else model(inputs)
        return logits

    return forward


@cache
def can_compile() -> bool:
    """Say whether this machine can compile, tried out in a child process: a crash there harms nobody."""
    trial = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, check=False)
    return trial.returncode == 0 and trial.stdout.strip() == "16.0"
