from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import SHAPE, Tiny, make_tiny, stripes
from feddf.data.datasets import plain
from feddf.engines import in_process
from feddf.evaluate import (
    Evaluation,
    Network,
    Teacher,
    accuracy,
    evaluation_mode,
    fold_batchnorm,
    logits,
    models_of,
    output_shape,
    recalibrate,
)
from feddf.models.resnet import ResNet
from feddf.models.small import CNN
from feddf.states import digest
from feddf.types import Failure, Inputs


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
        with evaluation_mode(model):
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


def test_many_models_are_tried_through_an_engine_in_their_order(tiny: Tiny) -> None:
    models = models_of(tiny.server.models, tiny.prototypes)
    broken = Teacher("broken", Network(tiny.prototypes["mlp"], {"nothing": torch.ones(1)}))
    evaluation = Evaluation(lambda *job: reversed(list(in_process(*job))), tiny.test.inputs)
    assert [outcome.client_id for outcome in evaluation([broken, *models])] == ["broken", "cnn", "mlp"]
    found = evaluation.accuracies([broken, *models], tiny.test)
    assert isinstance(found["broken"], Failure)
    for model in models:
        assert found[model.id] == accuracy(tiny.prototypes[model.id].load(tiny.server.models[model.id]), tiny.test)


def test_the_shape_of_the_outputs_is_found_by_trying(tiny: Tiny) -> None:
    assert {output_shape(prototype, tiny.pool) for prototype in tiny.prototypes.values()} == {(3,)}


class Shared(nn.Module):
    """One convolution, used before two different normalizations: folding either into it would be wrong."""

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
    """Batch statistics always, a keyword argument, and a convolution with a parametrized weight."""

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
        torch.testing.assert_close(fold_batchnorm(model)(images), model(images), atol=1e-4, rtol=1e-4)
    assert digest({"m": model.state_dict()}) == before


def test_folding_removes_every_norm_of_a_resnet() -> None:
    calls = [node.target for node in fold_batchnorm(shaken(ResNet((1, 8, 8), 3, depth=8))).graph.nodes]
    assert not [target for target in calls if "norm" in str(target)]


def test_what_cannot_be_traced_is_left_alone() -> None:
    model = Untraceable().eval()
    assert fold_batchnorm(model) is model


def test_recalibrated_statistics_become_the_mean_over_batches_of_the_inputs() -> None:
    data = torch.randn(640, 3, generator=torch.Generator().manual_seed(0)) * 3 + 5
    model = nn.Sequential(nn.BatchNorm1d(3))
    recalibrate(model, Inputs(data, plain))
    batches = [data[first::10] for first in range(10)]  # each from all of the pool
    torch.testing.assert_close(model[0].running_mean, torch.stack([b.mean(0) for b in batches]).mean(0))
    torch.testing.assert_close(model[0].running_var, torch.stack([b.var(0) for b in batches]).mean(0))


def test_recalibrating_on_inputs_sorted_by_class_or_source_gives_the_variance_of_all() -> None:
    one, other = torch.randn(2, 640, 1, generator=torch.Generator().manual_seed(0))
    data = torch.cat([one - 2, other + 2])
    model = nn.Sequential(nn.BatchNorm1d(1))
    recalibrate(model, Inputs(data, plain))
    torch.testing.assert_close(model[0].running_var, data.var(0), rtol=0.03, atol=0)


def test_recalibrating_changes_nothing_but_statistics(tiny: Tiny) -> None:
    model = tiny.prototypes["cnn"].load(tiny.server.models["cnn"])
    model.features[2].train()
    modes = [module.training for module in model.modules()]
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    recalibrate(model, tiny.pool)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert {norm.momentum for norm in model.modules() if isinstance(norm, nn.BatchNorm2d)} == {0.1}


def test_recalibrating_looks_at_only_so_many_inputs_spread_over_all() -> None:
    seen: list[float] = []

    class Watch(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.extend(inputs[:, 0].tolist())
            return inputs

    data = torch.arange(10_000, dtype=torch.float32)[:, None]
    recalibrate(nn.Sequential(Watch(), nn.BatchNorm1d(1)), Inputs(data, plain), most=128)
    assert len(seen) == 128
    assert max(seen) > 9_900


def test_a_model_without_batchnorm_is_not_recalibrated(tiny: Tiny) -> None:
    def never(raw: torch.Tensor) -> torch.Tensor:
        raise AssertionError("its inputs were read")

    recalibrate(nn.Linear(2, 2), Inputs(torch.zeros(4, 2), never))
