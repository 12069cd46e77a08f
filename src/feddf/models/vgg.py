"""VGG-9 without BatchNorm, in the two forms that go by that name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

POOL, DROP = 0, -1
FEDMA = (32, 64, POOL, 128, 128, POOL, DROP, 256, 256, POOL)
RELEASED = (32, POOL, 64, POOL, 128, 128, POOL, 256, 256, POOL, 256, 256, POOL)


class VGG(nn.Module):
    """3×3 convolutions with ReLU, max-pooling where ``plan`` has a 0, then linear layers of the widths ``hidden``.

    ``dropout`` are the shares of channels dropped where the plan has a −1, and of features dropped before the first and
    the last linear layer.

    ``FEDMA`` with two hidden layers of 512 is the VGG-9 of Wang et al. 2020, which the paper names (6 convolutions and
    3 linear layers); ``RELEASED`` without any is that of the authors' code (8 and 1). ``scale`` multiplies all widths.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        *,
        plan: Sequence[int] = FEDMA,
        hidden: Sequence[int] = (512, 512),
        scale: float = 1.0,
        dropout: tuple[float, float, float] = (0.05, 0.1, 0.1),
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        halvings = plan.count(POOL)
        if min(height, breadth) < 2**halvings:
            raise ValueError(f"images of {height}×{breadth} are too small to be halved {halvings} times")
        features: list[nn.Module] = []
        for planned in plan:
            if planned == DROP:
                features.append(nn.Dropout2d(dropout[0]))
                continue
            if planned == POOL:
                features.append(nn.MaxPool2d(2))
                height, breadth = height // 2, breadth // 2
                continue
            width = max(1, round(scale * planned))
            features += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*features, nn.Flatten())
        classifier: list[nn.Module] = [nn.Dropout(dropout[1])] if hidden else []
        inputs = channels * height * breadth
        for planned in hidden:
            width = max(1, round(scale * planned))
            classifier += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        classifier += [nn.Dropout(dropout[2])] if hidden else []
        self.classifier = nn.Sequential(*classifier, nn.Linear(inputs, n_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classifier(self.features(inputs))
        return logits


vgg9_released = partial(VGG, plan=RELEASED, hidden=())
