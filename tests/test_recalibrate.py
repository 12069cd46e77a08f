from __future__ import annotations

import torch
from feddf.recalibrate import recalibrate
from torch import nn

from conftest import Tiny
from feddf.data.encode import plain
from feddf.types import Inputs


def test_statistics_become_the_mean_over_batches_of_the_inputs() -> None:
    data = torch.randn(640, 3, generator=torch.Generator().manual_seed(0)) * 3 + 5
    model = nn.Sequential(nn.BatchNorm1d(3))
    recalibrate(model, Inputs(data, plain))
    batches = [data[first::10] for first in range(10)]  # each from all of the pool
    torch.testing.assert_close(model[0].running_mean, torch.stack([b.mean(0) for b in batches]).mean(0))
    torch.testing.assert_close(model[0].running_var, torch.stack([b.var(0) for b in batches]).mean(0))


def test_inputs_sorted_by_class_or_source_give_the_variance_of_all() -> None:
    one, other = torch.randn(2, 640, 1, generator=torch.Generator().manual_seed(0))
    data = torch.cat([one - 2, other + 2])
    model = nn.Sequential(nn.BatchNorm1d(1))
    recalibrate(model, Inputs(data, plain))
    torch.testing.assert_close(model[0].running_var, data.var(0), rtol=0.03, atol=0)


def test_nothing_else_changes(tiny: Tiny) -> None:
    model = tiny.prototypes["cnn"].load(tiny.server.models["cnn"])
    model.features[2].train()
    modes = [module.training for module in model.modules()]
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    recalibrate(model, tiny.pool)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert {norm.momentum for norm in model.modules() if isinstance(norm, nn.BatchNorm2d)} == {0.1}


def test_only_so_many_inputs_are_looked_at_spread_over_all() -> None:
    seen: list[float] = []

    class Watch(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.extend(inputs[:, 0].tolist())
            return inputs

    data = torch.arange(10_000, dtype=torch.float32)[:, None]
    recalibrate(nn.Sequential(Watch(), nn.BatchNorm1d(1)), Inputs(data, plain), most=128)
    assert len(seen) == 128
    assert max(seen) > 9_900


def test_a_model_without_batchnorm_is_left_alone(tiny: Tiny) -> None:
    def never(raw: torch.Tensor) -> torch.Tensor:
        raise AssertionError("its inputs were read")

    recalibrate(nn.Linear(2, 2), Inputs(torch.zeros(4, 2), never))
