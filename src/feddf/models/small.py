"""Two small networks, quick enough for two cores, and the normalization layers that the larger ones have too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Literal, cast

from torch import Tensor, nn

Shape = tuple[int, ...]
"""That of one encoded input."""

Norm = Literal["batch", "group", "none"]
"""The paper compares BatchNorm with GroupNorm (Table 2)."""


def norm_layer(norm: Norm, groups: int) -> Callable[[int], nn.Module]:
    """Return a function from a number of channels to the layer that normalizes them."""
    grouped = partial(nn.GroupNorm, groups)
    layers: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": grouped, "none": nn.Identity}
    if norm not in layers:
        raise ValueError(f"norm must be 'batch', 'group' or 'none', got {norm!r}")
    return layers[norm]


class MLP(nn.Module):
    """Three linear layers with ReLU between them, on flattened inputs: for the paper's toy example (Figure 1)."""

    def __init__(self, shape: Shape, n_classes: int, *, width: int = 128) -> None:
        super().__init__()
        first, second, last = nn.Linear(prod(shape), width), nn.Linear(width, width), nn.Linear(width, n_classes)
        self.layers = nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), last)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.layers(inputs))


class CNN(nn.Module):
    """``depth`` blocks of strided convolution, normalization and ReLU, then one linear layer.

    Every block halves the image and doubles the width.
    """

    def __init__(
        self, shape: Shape, n_classes: int, *, width: int = 16, depth: int = 2, norm: Norm = "batch", groups: int = 4
    ) -> None:
        super().__init__()
        layer = norm_layer(norm, groups)
        blocks: list[nn.Module] = []
        channels, height, breadth = shape
        for block in range(depth):
            out = width * 2**block
            blocks += [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=norm == "none"), layer(out), nn.ReLU()]
            channels, height, breadth = out, (height + 1) // 2, (breadth + 1) // 2
        self.features = nn.Sequential(*blocks, nn.Flatten())
        self.classifier = nn.Linear(channels * height * breadth, n_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.classifier(self.features(inputs)))
