"""What no program on these kernels can beat: ResNet-8's convolutions, and the memory that its BatchNorm has to touch.

Everything else is free here: activations, shortcuts, pooling, the classifier, loss, optimizer, augmentation, transport.
The convolutions are the fastest that PyTorch has on a CPU (oneDNN, channels last, at the speed of a matrix product).
BatchNorm is charged for its passes only, with the cheapest operation that reads and writes as much: forward it must
read its input for the statistics, and read it again to write the output; backward it must read input and gradient for
two sums, and read both again to write the gradient of the input.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from feddf.threads import threads


@dataclass(frozen=True)
class Convolution:
    """One of ResNet-8's nine, on images of size × size."""

    channels: int
    out: int
    size: int
    stride: int = 1
    kernel: int = 3

    @property
    def multiply_adds(self) -> int:
        """For one image, forward."""
        return self.channels * self.out * self.kernel**2 * (self.size // self.stride) ** 2


LAYERS = (
    Convolution(3, 16, 32),
    Convolution(16, 16, 32),
    Convolution(16, 16, 32),
    Convolution(16, 32, 32, stride=2),
    Convolution(32, 32, 16),
    Convolution(16, 32, 32, stride=2, kernel=1),
    Convolution(32, 64, 16, stride=2),
    Convolution(64, 64, 8),
    Convolution(32, 64, 16, stride=2, kernel=1),
)


def _tensors(layer: Convolution, batch: int) -> tuple[Tensor, Tensor]:
    """Return inputs and weights."""
    shapes = (batch, layer.channels, layer.size, layer.size), (layer.out, layer.channels, layer.kernel, layer.kernel)
    inputs, weight = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in shapes)
    return inputs, weight


def answering(batch: int) -> Callable[[], object]:
    """Return a teacher's forward pass over a batch: BatchNorm is folded and costs nothing."""
    tensors = [(layer, *_tensors(layer, batch)) for layer in LAYERS]

    def forward() -> None:
        for layer, inputs, weight in tensors:
            torch.conv2d(inputs, weight, None, layer.stride, layer.kernel // 2)

    return forward


def training(batch: int) -> Callable[[], object]:
    """Return a step of training on a batch, forward and backward."""
    tensors = [(layer, *_tensors(layer, batch)) for layer in LAYERS]
    gradients = [torch.randn(batch, layer.out, *(layer.size // layer.stride,) * 2) for layer in LAYERS]
    gradients = [gradient.contiguous(memory_format=torch.channels_last) for gradient in gradients]
    normal = [torch.empty_like(gradient) for gradient in gradients]

    def step() -> None:
        outputs = []
        for (layer, inputs, weight), after in zip(tensors, normal, strict=True):
            before = torch.conv2d(inputs, weight, None, layer.stride, layer.kernel // 2)
            outputs.append(before)
            before.sum()
            torch.mul(before, 0.5, out=after)
        for (layer, inputs, weight), before, gradient in reversed(list(zip(tensors, outputs, gradients, strict=True))):
            before.sum(), gradient.sum()
            incoming = before + gradient
            wanted = [layer is not LAYERS[0], True, False]  # nobody needs the gradient of the images
            stride, padding = [layer.stride] * 2, [layer.kernel // 2] * 2
            torch.ops.aten.convolution_backward(
                incoming, inputs, weight, None, stride, padding, [1, 1], False, [0, 0], 1, wanted
            )

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
