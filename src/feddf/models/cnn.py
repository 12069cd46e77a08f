"""A small convolutional network for small images, quick enough for two cores."""

from __future__ import annotations

from torch import Tensor, nn

from feddf.models.norm import Norm, normaliser


class CNN(nn.Module):
    """``depth`` blocks of strided convolution, normalisation and ReLU, then one linear layer.

    Every block halves the image and doubles the width.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        *,
        width: int = 16,
        depth: int = 2,
        norm: Norm = "batch",
        groups: int = 4,
    ) -> None:
        super().__init__()
        layer = normaliser(norm, groups)
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
        logits: Tensor = self.classifier(self.features(inputs))
        return logits
