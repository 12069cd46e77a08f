"""What every architecture for images, masks and texts promises; transformers have tests of their own."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from feddf.config.names import MODELS
from feddf.models.small import build_network
from feddf.outputs import Outputs, classes
from feddf.states import digest, init_state
from feddf.types import Prototype

SHAPE, CLASSES = (3, 32, 32), 7
MASKS, TEXTS = ("unet", "dilated-cnn"), ("gpt", "gru")


@pytest.fixture(params=sorted(set(MODELS) - {"transformer"}))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def form_of(name: str) -> tuple[tuple[int, ...], Outputs]:
    """Return the shape of one input, and the outputs, that a model is tried with."""
    if name in TEXTS:
        return (12,), classes(CLASSES, (12,))
    return SHAPE, classes(CLASSES, SHAPE[1:] if name in MASKS else ())


@pytest.fixture
def shape(name: str) -> tuple[int, ...]:
    return form_of(name)[0]


@pytest.fixture
def outputs(name: str) -> Outputs:
    return form_of(name)[1]


@pytest.fixture
def prototype(name: str, shape: tuple[int, ...], outputs: Outputs) -> Prototype:
    return Prototype(name, partial(build_network, MODELS[name], shape, outputs, {}))


def inputs(n: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, *shape, generator=generator) if shape == SHAPE else torch.arange(n * 12).view(n, 12) % CLASSES


def test_gives_a_logit_a_class_at_every_position(
    prototype: Prototype, shape: tuple[int, ...], outputs: Outputs
) -> None:
    assert prototype.build()(inputs(2, shape)).shape == (2, *outputs.shape)


@pytest.mark.parametrize("positions", [(), (4,), (16, 16)])
def test_other_positions_than_its_own_are_refused(
    prototype: Prototype, name: str, shape: tuple[int, ...], positions: tuple[int, ...]
) -> None:
    if name in (*MASKS, *TEXTS):
        with pytest.raises((TypeError, ValueError), match=r"positions|answers"):
            build_network(MODELS[name], shape, classes(CLASSES, positions), {})


@pytest.mark.parametrize("model", TEXTS)
def test_a_language_model_sees_no_token_that_is_yet_to_come_and_says_nothing_of_padding(model: str) -> None:
    network = build_network(MODELS[model], (12,), classes(CLASSES, (12,)), {}).eval()
    tokens = torch.arange(12)[None] % 6 + 1
    later = tokens.clone()
    later[:, 7:] = 1
    padded = tokens.clone()
    padded[:, 9:] = 0
    torch.testing.assert_close(network(tokens)[:, :, :7], network(later)[:, :, :7])
    assert not network(padded)[:, :, 9:].any()
    assert network(padded)[:, :, :9].any()


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


def test_every_parameter_learns(prototype: Prototype, shape: tuple[int, ...], outputs: Outputs) -> None:
    model = prototype.build().train()
    wanted = torch.arange(8).view(8, *[1] * len(outputs.positions)).expand(8, *outputs.positions) % CLASSES
    F.cross_entropy(model(inputs(8, shape)), wanted).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())


def test_in_eval_mode_an_answer_does_not_depend_on_its_company(prototype: Prototype, shape: tuple[int, ...]) -> None:
    model = prototype.load(init_state(prototype, 0))
    batch = inputs(6, shape)
    with torch.no_grad():
        torch.testing.assert_close(model(batch)[:2], model(batch[:2]))
