"""BatchNorm statistics estimated again on unlabeled inputs, for weights that no data were passed through."""

from __future__ import annotations

from math import ceil

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddf.evaluate import BATCH, evaluating
from feddf.types import Inputs

ENOUGH = 2048
"""Inputs that are looked at: a mean over them is within a few percent of one over all."""


def recalibrate(model: nn.Module, inputs: Inputs, most: int = ENOUGH) -> None:
    """Replace the running mean and variance of every BatchNorm by those of ``inputs``; labels are not needed.

    Each statistic becomes the plain mean over batches of inputs spread evenly over all. Everything but BatchNorm is in
    eval mode meanwhile, and each module's mode is restored.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    count = min(most, len(inputs))
    spread = torch.arange(count) * len(inputs) // count
    with evaluating(model), torch.inference_mode(mode=False), torch.no_grad():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative mean
            norm.train()
        batches = ceil(count / BATCH)
        for first in range(batches):  # every batch from the whole pool, which may be sorted by class or source
            chunk = spread[first::batches]
            if len(chunk) > 1 or count == 1:
                model(inputs.batch(chunk))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
