"""The paper's larger networks besides ResNets: VGG-9, ShuffleNetV2, and pretrained transformers for texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from feddf.config.errors import shown
from feddf.models.small import Norm, Shape, norm_layer
from feddf.runtime.packages import transformers

POOL, DROP = 0, -1
FEDMA = (32, 64, POOL, 128, 128, POOL, DROP, 256, 256, POOL)
RELEASED = (32, POOL, 64, POOL, 128, 128, POOL, 256, 256, POOL, 256, 256, POOL)


class VGG(nn.Module):
    """3×3 convolutions with ReLU, max-pooling where ``plan`` has a 0, then linear layers of the widths ``hidden``.

    ``dropout`` are the shares of channels dropped where the plan has a −1, and of features dropped before the first and
    the last linear layer. There is no BatchNorm.

    ``FEDMA`` with two hidden layers of 512 is the VGG-9 of Wang et al. 2020, which the paper names (6 convolutions and
    3 linear layers); ``RELEASED`` without any is that of the authors' code (8 and 1). ``scale`` multiplies all widths.
    """

    def __init__(
        self,
        shape: Shape,
        n_classes: int,
        *,
        plan: Sequence[int] = FEDMA,
        hidden: Sequence[int] = (512, 512),
        scale: float = 1.0,
        dropout: tuple[float, float, float] = (0.05, 0.1, 0.1),
    ) -> None:
        super().__init__()
        (channels, height, breadth), halvings = shape, plan.count(POOL)
        if min(height, breadth) < 2**halvings:
            raise ValueError(f"images of {height}×{breadth} are too small to be halved {halvings} times")
        features: list[nn.Module] = []
        for planned in plan:
            if planned == DROP:
                features.append(nn.Dropout2d(dropout[0]))
            elif planned == POOL:
                features.append(nn.MaxPool2d(2))
            else:
                width = max(1, round(scale * planned))
                features += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*features, nn.Flatten())
        inputs = channels * (height // 2**halvings) * (breadth // 2**halvings)
        classifier: list[nn.Module] = []
        for planned in hidden:
            width = max(1, round(scale * planned))
            classifier += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        if hidden:
            classifier = [nn.Dropout(dropout[1]), *classifier, nn.Dropout(dropout[2])]
        self.classifier = nn.Sequential(*classifier, nn.Linear(inputs, n_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.classifier(self.features(inputs)))


vgg9_released = partial(VGG, plan=RELEASED, hidden=())

STAGES = ((116, 4), (232, 8), (464, 4))
"""Width and number of units of each stage of ShuffleNetV2 ×1; the first unit of a stage halves the image."""


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
    """ShuffleNetV2 ×1 (Ma et al. 2018): 24 channels, three stages, 1,024 features, one linear layer.

    For 32×32 images: the stem has stride 1, and no max-pooling precedes the first stage.
    """

    def __init__(self, shape: Shape, n_classes: int, *, norm: Norm = "batch", groups: int = 2) -> None:
        super().__init__()
        layer, bias, channels = norm_layer(norm, groups), norm == "none", 24
        self.stem = nn.Sequential(nn.Conv2d(shape[0], channels, 3, padding=1, bias=bias), layer(channels), nn.ReLU())
        units: list[nn.Module] = []
        for out, count in STAGES:
            units.append(_Unit(channels, out, 2, norm, groups))
            units += [_Unit(out, out, 1, norm, groups) for _ in range(count - 1)]
            channels = out
        self.units = nn.Sequential(*units)
        self.head = nn.Sequential(nn.Conv2d(channels, 1024, 1, bias=bias), layer(1024), nn.ReLU())
        self.classifier = nn.Linear(1024, n_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        features = self.head(self.units(self.stem(inputs)))
        return cast(Tensor, self.classifier(features.mean(dim=(2, 3))))


def checked_layers(config: Any) -> Any:
    """Return a transformer's configuration; one from elsewhere may ask for layers without end."""
    layers = getattr(config, "num_hidden_layers", 0)
    if not isinstance(layers, int) or layers > 1000:
        raise ValueError(f"it has num_hidden_layers = {shown(layers)}; up to 1000 are built")
    return config


class Transformer(nn.Module):
    """Any ``AutoModelForSequenceClassification``, from a local folder or by its name on a hub (the extra ``text``).

    With positions, one for each token, it is an ``AutoModelForTokenClassification``.

    The paper fine-tunes DistilBERT. Inputs are rows of token numbers; those equal to the model's padding token are
    masked. The head is new, and its weights are drawn when the model is built. ``pretrained=False`` draws all weights,
    for tests and ablations.
    """

    def __init__(
        self, shape: Shape, n_classes: int, positions: Shape = (), *, path: str, pretrained: bool = True
    ) -> None:
        super().__init__()
        library = transformers()
        config = checked_layers(library.AutoConfig.from_pretrained(path, num_labels=n_classes, trust_remote_code=False))
        if positions not in ((), shape):
            raise ValueError(f"it gives one answer for each of {shape[0]} tokens, or for all; not {positions}")
        kind = "Token" if positions else "Sequence"
        automatic = getattr(library, f"AutoModelFor{kind}Classification")
        if pretrained:
            own_head = {"config": config, "ignore_mismatched_sizes": True}  # the file's head has other classes
            network = automatic.from_pretrained(path, **own_head, trust_remote_code=False)
        else:
            network = automatic.from_config(config, trust_remote_code=False)
        if shape[0] > config.max_position_embeddings:
            raise ValueError(f"{shape[0]} tokens are more than the {config.max_position_embeddings} that it can read")
        self.network: nn.Module = network
        self.padding = int(config.pad_token_id or 0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of N×L token numbers: N × classes, or N × classes × L, zero where a row is filled up."""
        there = tokens != self.padding
        logits = cast(Tensor, self.network(input_ids=tokens, attention_mask=there.long()).logits)
        return logits if logits.ndim == 2 else logits.transpose(1, 2).masked_fill(~there.unsqueeze(1), 0.0)
