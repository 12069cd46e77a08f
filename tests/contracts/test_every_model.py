"""What every architecture for images promises; transformers have tests of their own."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from feddf.config.names import MODELS
from feddf.states import digest, init_state
from feddf.types import Prototype

SHAPE, CLASSES = (3, 32, 32), 7


@pytest.fixture(params=sorted(set(MODELS) - {"transformer"}))
def prototype(request: pytest.FixtureRequest) -> Prototype:
    return Prototype(request.param, partial(MODELS[request.param], SHAPE, CLASSES))


def test_gives_a_logit_a_class(prototype: Prototype) -> None:
    assert prototype.build()(torch.zeros(2, *SHAPE)).shape == (2, CLASSES)


def test_travels_between_processes(prototype: Prototype) -> None:
    again: Prototype = pickle.loads(pickle.dumps(prototype))
    assert digest({"m": init_state(again, 0)}) == digest({"m": init_state(prototype, 0)})


def test_the_seed_decides_its_initial_weights(prototype: Prototype) -> None:
    one, same, other = (digest({"m": init_state(prototype, seed)}) for seed in (0, 0, 1))
    assert one == same != other


def test_loads_a_state_in_eval_mode_without_keeping_or_drawing_anything(prototype: Prototype) -> None:
    state = init_state(prototype, 0)
    before = digest({"m": state})
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model = prototype.load(state)
    assert torch.equal(torch.rand(1), expected)
    assert not any(module.training for module in model.modules())
    for parameter in model.parameters():
        parameter.data.add_(1)
    assert digest({"m": state}) == before


def test_every_parameter_learns(prototype: Prototype) -> None:
    model = prototype.build().train()
    generator = torch.Generator().manual_seed(0)
    F.cross_entropy(model(torch.randn(8, *SHAPE, generator=generator)), torch.arange(8) % CLASSES).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())


def test_in_eval_mode_an_answer_does_not_depend_on_its_company(prototype: Prototype) -> None:
    model = prototype.load(init_state(prototype, 0))
    batch = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(batch)[:2], model(batch[:2]))
