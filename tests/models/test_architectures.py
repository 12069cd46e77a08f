from __future__ import annotations

import pytest
import torch
from torch import nn

from feddf.config.names import MODELS
from feddf.models.resnet import ResNet


def multiply_adds(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Count by hooks, independently of how the models are written."""
    total = 0

    def count(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal total
        weight = module.weight
        places = output[0].numel() // weight.shape[0]
        total += weight.numel() * places

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    model.eval()(torch.zeros(1, *shape))
    return total


@pytest.mark.parametrize(
    ("name", "parameters", "mmac"),
    [
        ("resnet8", 78.0e3, 12.5),
        ("resnet20", 272e3, 40.8),
        ("resnet32", 467e3, 69.1),
        ("shufflenetv2", 1.26e6, 45.0),
    ],
)
def test_models_have_the_sizes_of_the_released_code(name: str, parameters: float, mmac: float) -> None:
    model = MODELS[name]((3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=4e-3)
    assert multiply_adds(model, (3, 32, 32)) / 1e6 == pytest.approx(mmac, abs=0.06)


@pytest.mark.parametrize(
    ("name", "parameters", "layers"), [("vgg9", 3_491_530, (6, 3)), ("vgg9-released", 2_308_810, (8, 1))]
)
def test_both_forms_of_vgg9(name: str, parameters: int, layers: tuple[int, int]) -> None:
    """Six convolutions and three linear layers as in FedMA; eight and one as in the authors' code; no BatchNorm."""
    model = MODELS[name]((3, 32, 32), 10)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.Linear)) == layers
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert not dict(model.named_buffers())


def test_images_too_small_for_vgg_are_refused() -> None:
    with pytest.raises(ValueError, match="8×8 are too small to be halved 5 times"):
        MODELS["vgg9-released"]((3, 8, 8), 10)


@pytest.mark.parametrize("groups", [1, 2, 8, 16])
def test_group_norm_replaces_every_batch_norm(groups: int) -> None:
    model = ResNet((3, 32, 32), 10, depth=8, norm="group", groups=groups)
    kinds = [type(module) for module in model.modules()]
    assert nn.BatchNorm2d not in kinds
    assert kinds.count(nn.GroupNorm) == 9
    assert {module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)} == {groups}
    assert sum(p.numel() for p in model.parameters()) == 78042
    assert not dict(model.named_buffers())


def test_a_depth_that_is_no_resnet_is_refused() -> None:
    with pytest.raises(ValueError, match=r"6n \+ 2 .*got 10"):
        ResNet((3, 32, 32), 10, depth=10)


def test_a_normalization_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'batch', 'group' or 'none', got 'layer'"):
        MODELS["cnn"]((1, 8, 8), 3, norm="layer")
