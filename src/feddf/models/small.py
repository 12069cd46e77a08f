"""Three small networks, quick enough for two cores, the normalization layers of all, and how any network is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from feddf.losses import channelwise
from feddf.outputs import Outputs
from feddf.scores import CHANNELS

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


def build_network(
    make: Callable[..., nn.Module], shape: Shape, outputs: Outputs, options: Mapping[str, Any]
) -> nn.Module:
    """Return ``make(shape, channels, **options)``, which is also told the positions where there are any."""
    network = make(shape, outputs.shape[0], *([outputs.positions] if outputs.positions else []), **options)
    return Standardized(network, outputs.channels or 0, outputs.numbers) if outputs.has_units else network


class Standardized(nn.Module):
    """A network of values, which learns them standardized and gives them in their own units: ŷ = scale · z + center.

    Both are buffers: they travel and are averaged with the weights.
    """

    def __init__(self, network: nn.Module, channels: int, numbers: int = 1) -> None:
        super().__init__()
        self.network, self.channels, self.numbers = network, channels, numbers
        self.register_buffer("center", torch.zeros(channels))
        self.register_buffer("scale", torch.ones(channels))

    center: Tensor
    scale: Tensor

    def standardize(self, wanted: Tensor) -> None:
        """Take center and scale from what a new model will learn; one that was trained keeps its own."""
        rows = wanted[:, : self.channels].transpose(0, CHANNELS).flatten(1).to(self.center)
        if not bool(self.center.any()) and rows.numel():
            self.center.copy_(rows.nanmean(dim=1).nan_to_num())
            self.scale.copy_(
                (rows - self.center[:, None]).square().nanmean(dim=1).sqrt().nan_to_num(1.0).clamp_min(1e-6)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the values, followed by their log variances if the network has them."""
        raw: Tensor = self.network(inputs)
        center, scale = channelwise(self.center, raw), channelwise(self.scale, raw)
        values = raw[:, : self.channels] * scale + center
        if self.numbers == 1:
            return values
        return torch.cat([values, raw[:, self.channels :] + 2 * scale.log()], dim=CHANNELS)


class Linear(nn.Module):
    """One linear layer on flattened inputs: logistic or linear regression."""

    def __init__(self, shape: Shape, n_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), n_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.layers(inputs))


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
