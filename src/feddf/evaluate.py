"""Accuracy of a model or of an ensemble. Leaves the model in the mode in which it found it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from feddf.types import Examples, Inputs

BATCH = 64
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


_as_it_is: ContextVar[bool] = ContextVar("as_it_is", default=False)


@contextmanager
def as_it_is() -> Iterator[None]:
    """Let nothing be folded inside the block, in this thread: tracing a model disturbs those that run in others."""
    token = _as_it_is.set(True)
    try:
        yield
    finally:
        _as_it_is.reset(token)


def folded(model: nn.Module) -> nn.Module:
    """Return a model in eval mode with each BatchNorm folded into the convolution before it; the model stays as it is.

    w' = w γ / √(σ² + ε), b' = β + (b − μ) γ / √(σ² + ε): the same function up to rounding, and half as fast again. A
    model that cannot be traced (control flow that depends on its inputs) is returned itself.
    """
    if _as_it_is.get() or not any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        return model
    try:
        return _fold(fx.symbolic_trace(model))
    except Exception:  # tracing runs the user's own forward, which may do anything
        return model


def _fold(traced: fx.GraphModule) -> fx.GraphModule:
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in traced.graph.nodes)
    for node in list(traced.graph.nodes):
        norm = modules.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(norm, nn.BatchNorm2d) or not norm.track_running_stats or not node.args:
            continue
        before = node.args[0]
        convolution = modules.get(str(before.target)) if before.op == "call_module" else None
        if type(convolution) is nn.Conv2d and len(before.users) == calls[before.target] == 1:
            traced.set_submodule(before.target, fuse_conv_bn_eval(convolution, norm))
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.recompile()
    return traced


def logits(model: nn.Module, inputs: Inputs, batch: int = BATCH) -> Tensor:
    """Return f(x) for every input, in order."""
    with evaluating(model):
        fast = folded(model)
        chunks = [fast(inputs.batch(chunk)) for chunk in torch.arange(len(inputs)).split(batch)]
    return torch.cat(chunks).clone()  # a plain tensor, not an inference one


def accuracy_of(predictions: Tensor, labels: Tensor) -> float:
    """Return the share of rows of ``predictions`` (logits or probabilities) whose largest entry is the label."""
    return float((predictions.argmax(dim=1) == labels).double().mean())


def accuracy(model: nn.Module, examples: Examples) -> float:
    """Return the top-1 accuracy of the model."""
    return accuracy_of(logits(model, examples.inputs), examples.labels)
