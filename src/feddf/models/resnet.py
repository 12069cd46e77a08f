"""ResNets for 32×32 images (He et al. 2016, section 4.2): depth 6n + 2, widths 16, 32, 64.

Shortcuts that change the shape are 1×1 convolutions, as in the authors' released code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from feddf.models.small import Norm, Shape, norm_layer


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int, layer: Callable[[int], nn.Module], bias: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=bias)
        self.norm1 = layer(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=bias)
        self.norm2 = layer(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=bias), layer(out))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(inputs)), inplace=True)  # what is overwritten is not needed
        return F.relu(self.norm2(self.conv2(hidden)).add_(self.shortcut(inputs)), inplace=True)


class ResNet(nn.Module):
    """A ResNet of ``depth`` layers with BatchNorm, GroupNorm or no normalization."""

    def __init__(
        self, shape: Shape, n_classes: int, *, depth: int = 8, width: int = 16, norm: Norm = "batch", groups: int = 2
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"a ResNet's depth is 6n + 2 (8, 14, 20, 26, 32, ...), got {depth}")
        layer, bias = norm_layer(norm, groups), norm == "none"
        self.conv = nn.Conv2d(shape[0], width, 3, padding=1, bias=bias)
        self.norm = layer(width)
        blocks, channels = list[nn.Module](), width
        for out in (width, 2 * width, 4 * width):
            for _ in range((depth - 2) // 6):
                blocks.append(_Block(channels, out, out // channels, layer, bias))  # a wider stage halves the image
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.blocks(F.relu(self.norm(self.conv(inputs)), inplace=True))
        # the same mean as over (2, 3); its gradient comes back in the order in which the values lie
        logits: Tensor = self.classifier(hidden.permute(0, 2, 3, 1).mean(dim=(1, 2)))
        return logits


resnet8 = partial(ResNet, depth=8)
resnet20 = partial(ResNet, depth=20)
resnet32 = partial(ResNet, depth=32)
