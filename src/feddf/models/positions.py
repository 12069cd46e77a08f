"""Networks that answer at every position: masks of images (a U-Net, a dilated network), and the next token of texts.

They are called as ``(shape of one input, channels, positions, **options)``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddf.models.small import Norm, Shape, norm_layer

PADDING = 0  # the token with which rows are filled up; nothing is said about what follows it


def _check(shape: Shape, positions: Shape, images: bool) -> None:
    wanted = shape[1:] if images else shape
    if len(shape) != (3 if images else 1) or tuple(positions) != tuple(wanted):
        kind = "images, one answer a pixel" if images else "rows of tokens, one answer a token"
        raise ValueError(f"it takes {kind}; the inputs have the shape {shape}, and the answers {tuple(positions)}")


def _convolution(channels: int, out: int, norm: Norm, groups: int, dilation: int = 1) -> nn.Sequential:
    layer, bias = norm_layer(norm, groups)(out), norm == "none"
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=dilation, dilation=dilation, bias=bias), layer, nn.ReLU())


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) of two convolutions a level; every level halves the image, doubles the width.

    On the way up an image is enlarged to the size that it had, so sides need not be powers of two.
    """

    def __init__(
        self,
        shape: Shape,
        channels: int,
        positions: Shape,
        *,
        width: int = 16,
        depth: int = 2,
        norm: Norm = "batch",
        groups: int = 4,
    ) -> None:
        super().__init__()
        _check(shape, positions, images=True)
        widths = [width * 2**level for level in range(depth + 1)]

        def block(before: int, out: int) -> nn.Sequential:
            return nn.Sequential(_convolution(before, out, norm, groups), _convolution(out, out, norm, groups))

        self.down = nn.ModuleList(block(a, b) for a, b in zip([shape[0], *widths], widths, strict=False))
        self.up = nn.ModuleList(block(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of every pixel."""
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            images = block(F.max_pool2d(images, 2) if level else images)
            kept.append(images)
        for level in reversed(range(len(self.up))):
            larger = F.interpolate(images, size=kept[level].shape[2:])
            images = self.up[level](torch.cat([kept[level], larger], dim=1))
        return cast(Tensor, self.head(images))


class DilatedCNN(nn.Module):
    """Convolutions at full resolution that see twice as far with every layer (Yu and Koltun 2016)."""

    def __init__(
        self,
        shape: Shape,
        channels: int,
        positions: Shape,
        *,
        width: int = 24,
        depth: int = 4,
        norm: Norm = "batch",
        groups: int = 4,
    ) -> None:
        super().__init__()
        _check(shape, positions, images=True)
        widths = [shape[0], *[width] * depth]
        layers = (_convolution(widths[k], width, norm, groups, dilation=2**k) for k in range(depth))
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, channels, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of every pixel."""
        return cast(Tensor, self.layers(images))


class _Attention(nn.Module):
    """One layer of a transformer: each token looks at those before it, then a network of two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        n, length, width = tokens.shape
        three = self.attend(self.first(tokens)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = three.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.join(seen.transpose(1, 2).reshape(n, length, width))
        return cast(Tensor, tokens + self.think(self.second(tokens)))


class _LanguageModel(nn.Module):
    """Says at every token which one comes next: the logits are zero, for any model, where a row is filled up."""

    def __init__(self, shape: Shape, channels: int, positions: Shape, width: int) -> None:
        super().__init__()
        _check(shape, positions, images=False)
        self.embed, self.head = nn.Embedding(channels, width), nn.Linear(width, channels)

    def read(self, embedded: Tensor) -> Tensor:
        """Return what is known after each token."""
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        """Return N × tokens × L logits of N × L token numbers."""
        said = self.head(self.read(self.embed(tokens))).transpose(1, 2)
        return cast(Tensor, said.masked_fill((tokens == PADDING).unsqueeze(1), 0.0))


class GPT(_LanguageModel):
    """A small transformer that sees only what came before (Radford et al. 2018), with learned positions."""

    def __init__(
        self, shape: Shape, channels: int, positions: Shape, *, width: int = 64, depth: int = 2, heads: int = 4
    ) -> None:
        super().__init__(shape, channels, positions, width)
        self.places = nn.Parameter(0.02 * torch.randn(shape[0], width))
        self.layers = nn.Sequential(*(_Attention(width, heads) for _ in range(depth)), nn.LayerNorm(width))

    def read(self, embedded: Tensor) -> Tensor:
        """Return what the last layer says of each token."""
        return cast(Tensor, self.layers(embedded + self.places))


class GRU(_LanguageModel):
    """A recurrent network of gated units (Cho et al. 2014)."""

    def __init__(self, shape: Shape, channels: int, positions: Shape, *, width: int = 96) -> None:
        super().__init__(shape, channels, positions, width)
        self.layer = nn.GRU(width, width, batch_first=True)

    def read(self, embedded: Tensor) -> Tensor:
        """Return the state after each token."""
        return cast(Tensor, self.layer(embedded)[0])
