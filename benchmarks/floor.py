"""The least that ResNet-8 costs on PyTorch's convolutions: they alone, and the memory that BatchNorm has to touch.

Everything else is free here: activations, sums, pooling, the classifier, loss, optimizer, augmentation, transport.
The convolutions are oneDNN's, channels last, and each reads what the one before it has just written, as in the network.
BatchNorm is charged for its passes only, with the cheapest operation that reads and writes as much: forward it must
read its input for the statistics, and read it again to write the output; backward it must read input and gradient for
two sums, and read both again to write the gradient of the input. A shortcut's output is added to its block's without
being written, and so is the last one to the mean over its pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from feddf.runtime.device import threads


@dataclass(frozen=True)
class Convolution:
    """One of ResNet-8's nine, on images of size × size. ``source`` is the layer whose output it reads."""

    source: int | None
    channels: int
    out: int
    size: int
    stride: int = 1
    kernel: int = 3

    @property
    def multiply_adds(self) -> int:
        """For one image, forward."""
        return self.channels * self.out * self.kernel**2 * (self.size // self.stride) ** 2

    def __call__(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the outputs."""
        return torch.conv2d(inputs, weight, None, self.stride, self.kernel // 2)

    def backward(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the inputs (of the images nobody needs one), and compute that of the weights."""
        wanted, stride, padding = [self.source is not None, True, False], [self.stride] * 2, [self.kernel // 2] * 2
        of_inputs: Tensor = torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, stride, padding, [1, 1], False, [0, 0], 1, wanted
        )[0]
        return of_inputs


LAYERS = (
    Convolution(None, 3, 16, 32),
    Convolution(0, 16, 16, 32),
    Convolution(1, 16, 16, 32),
    Convolution(2, 16, 32, 32, stride=2),
    Convolution(3, 32, 32, 16),
    Convolution(2, 16, 32, 32, stride=2, kernel=1),  # the shortcut of the layer before it, and so below
    Convolution(4, 32, 64, 16, stride=2),
    Convolution(6, 64, 64, 8),
    Convolution(4, 32, 64, 16, stride=2, kernel=1),
)
LAST = 7


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def _images_and_weights(batch: int) -> tuple[Tensor, list[Tensor]]:
    weights = [_random(layer.out, layer.channels, layer.kernel, layer.kernel) for layer in LAYERS]
    return _random(batch, 3, 32, 32), weights


def answering(batch: int) -> Callable[[], object]:
    """Return a teacher's forward pass over a batch: BatchNorm is folded and costs nothing."""
    images, weights = _images_and_weights(batch)

    def forward() -> None:
        outputs: list[Tensor] = []
        for layer, weight in zip(LAYERS, weights, strict=True):
            outputs.append(layer(images if layer.source is None else outputs[layer.source], weight))

    return forward


def training(batch: int) -> Callable[[], object]:
    """Return a step of training on a batch, forward and backward."""
    images, weights = _images_and_weights(batch)
    of_last = _random(batch, 64, 8, 8)

    def step() -> None:
        inputs, before, after = [], [], []
        for number, (layer, weight) in enumerate(zip(LAYERS, weights, strict=True)):
            inputs.append(images if layer.source is None else after[layer.source])
            before.append(layer(inputs[-1], weight))
            before[-1].sum()
            if layer.kernel == 1 or number == LAST:
                before[-1].sum()
                after.append(before[-1])
            else:
                after.append(before[-1] * 0.5)
        gradients = {LAST: of_last}
        for number, layer in reversed(list(enumerate(LAYERS))):
            shortcut = layer.kernel == 1
            gradient = gradients[number - 1 if shortcut else number]
            before[number].sum()
            if not shortcut:  # its block's sum serves both
                gradient.sum()
            of_inputs = layer.backward(before[number] + gradient, inputs[number], weights[number])
            if layer.source is not None:
                gradients[layer.source] = of_inputs

    return step


@dataclass(frozen=True)
class Steps:
    """What a worker is to time."""

    id: str
    kind: Literal["training", "answering"]
    batch: int
    count: int
    threads: int


def timed(steps: Steps) -> float:
    """Return the seconds that a step takes here and now."""
    step = (training if steps.kind == "training" else answering)(steps.batch)
    with threads(steps.threads):
        step()
        began = time.perf_counter()
        for _ in range(steps.count):
            step()
        return (time.perf_counter() - began) / steps.count
