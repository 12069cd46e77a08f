from __future__ import annotations

import torch
from torch import nn

from conftest import SHAPE, make_tiny, stripes
from feddf.evaluate import accuracy, evaluating, logits
from feddf.models import CNN


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
