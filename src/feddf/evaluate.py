"""Accuracy of a model or of an ensemble. Leaves the model in the mode in which it found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from feddf.types import Examples, Inputs

BATCH = 500
"""Images a forward pass: large enough for full speed, small enough to stay in a core's cache."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put the model into eval mode inside the block, without gradients, and restore each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield model
    finally:
        for module, training in modes:
            module.training = training


def logits(model: nn.Module, inputs: Inputs, batch: int = BATCH) -> Tensor:
    """Return f(x) for every input, in order."""
    with evaluating(model):
        chunks = [model(inputs.batch(chunk)) for chunk in torch.arange(len(inputs)).split(batch)]
    return torch.cat(chunks).clone()  # a plain tensor, not an inference one


def accuracy_of(predictions: Tensor, labels: Tensor) -> float:
    """Return the share of rows of ``predictions`` (logits or probabilities) whose largest entry is the label."""
    return float((predictions.argmax(dim=1) == labels).double().mean())


def accuracy(model: nn.Module, examples: Examples) -> float:
    """Return the top-1 accuracy of the model."""
    return accuracy_of(logits(model, examples.inputs), examples.labels)
