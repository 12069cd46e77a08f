"""Architectures by name. A model is any ``nn.Module`` from encoded inputs to logits.

Every entry is called as ``MODELS[name](shape, n_classes, **options)``, where ``shape`` is that of one
encoded input. To add one, write it and add a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from feddf.models.cnn import CNN
from feddf.models.mlp import MLP
from feddf.models.resnet import ResNet
from feddf.models.shufflenet import ShuffleNetV2
from feddf.models.transformer import Transformer
from feddf.models.vgg import RELEASED, VGG

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "cnn": CNN,
    "resnet8": partial(ResNet, depth=8),
    "resnet20": partial(ResNet, depth=20),
    "resnet32": partial(ResNet, depth=32),
    "shufflenetv2": ShuffleNetV2,
    "transformer": Transformer,
    "vgg9": VGG,
    "vgg9-released": partial(VGG, plan=RELEASED, hidden=()),
}

__all__ = ["CNN", "MLP", "MODELS", "VGG", "ResNet", "ShuffleNetV2"]
