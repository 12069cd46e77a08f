from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import SHAPE, make_tiny, stripes
from feddf.evaluate import accuracy, evaluating, folded, logits
from feddf.models import CNN, ResNet
from feddf.states import digest


def test_accuracy_agrees_with_counting() -> None:
    test = stripes(60, 5)
    model = CNN(SHAPE, 3, width=4).eval()
    with torch.no_grad():
        right = sum(int(model(test.inputs.batch(torch.tensor([i]))).argmax() == test.labels[i]) for i in range(60))
    assert accuracy(model, test) == right / 60


def test_every_module_keeps_its_mode_and_its_statistics() -> None:
    model = CNN(SHAPE, 3, width=4).train()
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    norm.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    accuracy(model, stripes(30, 6))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_modes_are_restored_after_an_error() -> None:
    model = CNN(SHAPE, 3, width=4).train()
    try:
        with evaluating(model):
            raise RuntimeError
    except RuntimeError:
        pass
    assert model.training


def test_logits_do_not_depend_on_the_batch_size() -> None:
    tiny = make_tiny()
    model = tiny.prototypes["cnn"].load(tiny.server.models["cnn"])
    torch.testing.assert_close(logits(model, tiny.pool, batch=7), logits(model, tiny.pool, batch=48))


def test_a_teachers_answer_can_take_part_in_training() -> None:
    tiny = make_tiny()
    answer = logits(tiny.prototypes["mlp"].load(tiny.server.models["mlp"]), tiny.pool)
    (answer * torch.ones(1, requires_grad=True)).sum().backward()


class Shared(nn.Module):
    """One convolution, used before two different normalisations: folding either into it would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.one(self.conv(inputs)) + self.two(self.conv(inputs))).mean(dim=(2, 3))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(inputs) if inputs.sum() > 0 else inputs


class Unusual(nn.Module):
    """Batch statistics always, a keyword argument, and a convolution with a parametrised weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 4, 3))
        self.one, self.two = nn.BatchNorm2d(4, track_running_stats=False), nn.BatchNorm2d(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.two(input=self.one(self.conv(inputs))).mean(dim=(2, 3))


def shaken(model: nn.Module) -> nn.Module:
    """Give every BatchNorm statistics and weights that matter."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                if tensor is not None:
                    tensor.uniform_(0.5, 2, generator=generator)
    return model.eval()


@pytest.mark.parametrize(
    "build", [lambda: ResNet((1, 8, 8), 3, depth=8), lambda: CNN((1, 8, 8), 3, width=4), Shared, Unusual]
)
def test_folding_batch_norm_changes_nothing_but_the_work(build: Callable[[], nn.Module]) -> None:
    model = shaken(build())
    before = digest({"m": model.state_dict()})
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(folded(model)(images), model(images), atol=1e-4, rtol=1e-4)
    assert digest({"m": model.state_dict()}) == before


def test_folding_removes_every_norm_of_a_resnet() -> None:
    calls = [node.target for node in folded(shaken(ResNet((1, 8, 8), 3, depth=8))).graph.nodes]
    assert not [target for target in calls if "norm" in str(target)]


def test_what_cannot_be_traced_is_left_alone() -> None:
    model = Untraceable().eval()
    assert folded(model) is model
