"""ShuffleNetV2 ×1 (Ma et al. 2018) for 32×32 images: a stem of stride 1 and no max-pooling before the first stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from feddf.models.small import Norm, norm_layer

STAGES = ((116, 4), (232, 8), (464, 4))
"""Width and number of units of each stage of the ×1 network; the first unit of a stage halves the image."""


class _Unit(nn.Module):
    """Half of the channels pass by (or, where the image is halved, through a branch of their own); then a shuffle."""

    def __init__(self, channels: int, out: int, stride: int, norm: Norm, groups: int) -> None:
        super().__init__()
        half, layer, bias = out // 2, norm_layer(norm, groups), norm == "none"

        def pointwise(before: int) -> list[nn.Module]:
            return [nn.Conv2d(before, half, 1, bias=bias), layer(half), nn.ReLU()]

        def depthwise(width: int) -> list[nn.Module]:
            return [nn.Conv2d(width, width, 3, stride, padding=1, groups=width, bias=bias), layer(width)]

        self.halves = stride == 2
        main = channels if self.halves else channels // 2
        self.main = nn.Sequential(*pointwise(main), *depthwise(half), *pointwise(half))
        self.side = nn.Sequential(*depthwise(channels), *pointwise(channels)) if self.halves else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        side, main = (inputs, inputs) if self.halves else inputs.chunk(2, dim=1)
        both = torch.stack([self.side(side), self.main(main)], dim=2)  # channel c of one beside channel c of the other
        return both.flatten(1, 2)


class ShuffleNetV2(nn.Module):
    """ShuffleNetV2 ×1: 24 channels, three stages, 1,024 features, one linear layer."""

    def __init__(self, shape: tuple[int, ...], n_classes: int, *, norm: Norm = "batch", groups: int = 2) -> None:
        super().__init__()
        layer, bias = norm_layer(norm, groups), norm == "none"
        channels = 24
        self.stem = nn.Sequential(nn.Conv2d(shape[0], channels, 3, padding=1, bias=bias), layer(channels), nn.ReLU())
        units: list[nn.Module] = []
        for out, count in STAGES:
            units += [_Unit(channels if unit == 0 else out, out, 2 if unit == 0 else 1, norm, groups)
                      for unit in range(count)]  # fmt: skip
            channels = out
        self.units = nn.Sequential(*units)
        self.head = nn.Sequential(nn.Conv2d(channels, 1024, 1, bias=bias), layer(1024), nn.ReLU())
        self.classifier = nn.Linear(1024, n_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        features = self.head(self.units(self.stem(inputs)))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits
