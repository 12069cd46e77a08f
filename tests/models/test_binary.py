from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import Tiny, stripes, update_of
from feddf.admit import admit
from feddf.client import local_update
from feddf.config import LocalConfig
from feddf.config.names import BINARIZATIONS, MODELS
from feddf.engines import Processes
from feddf.models.binary import BinaryState, Bits, binarize, binarized, inner_layers, keep_binarized, wire
from feddf.runs.spool import DiskSpool
from feddf.states import digest, init_state, n_bytes
from feddf.types import Client, Failure, Job, Prototype, Reply, Update

SHAPE = (3, 16, 16)
LOCAL = LocalConfig(epochs=2, batch_size=8, lr=0.05)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 99))
def test_bits_come_back_as_they_were(filters: int, size: int, seed: int) -> None:
    weight = binarized(torch.randn(filters, size, generator=torch.Generator().manual_seed(seed)))
    bits = Bits.of(weight)
    assert torch.equal(bits.weight(), weight)
    assert bits.signs.numel() == -(-filters * size // 8)


def test_each_filter_has_its_mean_size_and_its_signs() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0], [0.0, 0.5, -0.1]])
    expected = torch.tensor([[2.0, -2.0, 2.0], [0.2, 0.2, -0.2]])
    torch.testing.assert_close(binarized(weight), expected)


def layer(estimator: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3))
    with torch.no_grad():
        model[1].weight.mul_(4)  # some lie beyond one
    assert binarize(model, estimator) == ["1.weight"]  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("estimator", sorted(BINARIZATIONS))
def test_the_gradient_is_that_of_the_binarized_network(estimator: str) -> None:
    """Against the same network with its binarized weights put in by hand."""
    model = layer(estimator)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    model(inputs).square().sum().backward()
    latent = model[1].parametrizations.weight.original
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3))
    plain.load_state_dict(
        {"0.weight": model[0].weight, "0.bias": model[0].bias, "1.weight": binarized(latent), "1.bias": model[1].bias,
         "2.weight": model[2].weight, "2.bias": model[2].bias}
    )  # fmt: skip
    plain(inputs).square().sum().backward()
    expected = plain[1].weight.grad
    if estimator == "straight-through":
        assert (latent.abs() > 1).any()
        expected = expected * (latent.abs() <= 1)
    torch.testing.assert_close(latent.grad, expected)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


def test_the_first_and_the_last_layer_keep_their_precision() -> None:
    model = MODELS["resnet8"](SHAPE, 10)
    names = inner_layers(model)
    assert len(names) == 8  # six convolutions in blocks and two projections
    assert "conv" not in names
    assert "classifier" not in names


def trained(estimator: str = "error-feedback", seed: int = 5) -> tuple[Job, Reply]:
    train = stripes(60, 1)
    prototype = Prototype("resnet8", partial(MODELS["resnet8"], (1, 8, 8), 3, width=4))
    job = Job(Client("c0", "resnet8", torch.arange(40)), 1, init_state(prototype, 0), seed)
    half = BINARIZATIONS[estimator]
    return job, local_update(job, prototypes={"resnet8": prototype}, train=train, local=LOCAL, half=half)


@pytest.mark.parametrize("estimator", sorted(BINARIZATIONS))
def test_what_leaves_a_client_is_one_bit_a_weight(estimator: str) -> None:
    job, update = trained(estimator)
    assert isinstance(update.state, BinaryState)
    admitted = admit(update, {"c0": job})
    assert isinstance(admitted, Update)
    assert admitted.state is update.state  # packed still
    assert list(update.state) == list(job.state)
    inner = [key for key in job.state if key in update.state.bits]
    assert len(inner) == 8
    for key in inner:
        for filter_ in update.state[key]:
            assert len(filter_.abs().unique()) == 1
    weights = sum(job.state[key].numel() for key in inner)
    filters = sum(len(job.state[key]) for key in inner)
    rest = sum(job.state[key].numel() * job.state[key].element_size() for key in job.state if key not in inner)
    assert n_bytes(wire(update.state)) == weights // 8 + 4 * filters + rest
    assert not any("parametrizations" in key for key in update.state)


def test_the_full_size_update_is_an_eighth_of_the_plain_one() -> None:
    prototype = Prototype("resnet8", partial(MODELS["resnet8"], (3, 32, 32), 10))
    state = init_state(prototype, 0)
    names = [f"{name}.weight" for name in inner_layers(prototype.build())]
    packed = BinaryState.of({key: binarized(t) if key in names else t for key, t in state.items()}, names)
    assert n_bytes(wire(packed)) < n_bytes(state) / 8
    assert len(pickle.dumps(packed)) < n_bytes(state) / 5  # with the names of all tensors


def test_nothing_is_left_for_the_next_client() -> None:
    """The error memory lives in one client's training: the same job again gives the same bytes."""
    first = digest({"m": trained()[1].state})
    trained(seed=99)
    assert digest({"m": trained()[1].state}) == first


def test_keeping_the_binarized_weights_leaves_a_plain_model() -> None:
    model = layer("error-feedback")
    inputs = torch.randn(2, 4)
    before = model(inputs)
    keep_binarized(model)
    assert set(model.state_dict()) == {f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")}
    torch.testing.assert_close(model(inputs), before)


def test_a_packed_update_is_kept_packed_on_disk_and_comes_back_the_same(tmp_path: Path) -> None:
    job, reply = trained()
    update, spool = update_of(reply), DiskSpool(tmp_path / "packed")
    kept, again = spool.keep(job, update), spool.recall(job)
    assert isinstance(kept, Update)
    assert isinstance(again, Update)
    for found in (kept, again):
        assert isinstance(found.state, BinaryState)
        assert digest({"m": found.state}) == digest({"m": update.state})
        assert n_bytes(wire(found.state)) == n_bytes(wire(update.state))
    DiskSpool(tmp_path / "plain").keep(job, replace(update, state=dict(update.state)))
    packed, plain = (next((tmp_path / name).glob("*.safetensors")).stat().st_size for name in ("packed", "plain"))
    assert packed < plain


def test_it_travels_between_processes_as_bits(tiny: Tiny) -> None:
    with Processes(1) as engine:
        prototypes = {"resnet8": Prototype("resnet8", partial(MODELS["resnet8"], (1, 8, 8), 3, width=4))}
        job = Job(Client("c0", "resnet8", torch.arange(40)), 1, init_state(prototypes["resnet8"], 0), 5)
        work = partial(
            local_update,
            prototypes=prototypes,
            train=stripes(60, 1),
            local=LOCAL,
            half=BINARIZATIONS["error-feedback"],
        )
        (update,) = engine(work, [job])
    assert isinstance(update, Reply)
    assert isinstance(update.state, BinaryState)
    assert digest({"m": update.state}) == digest({"m": trained()[1].state})


def test_damaged_bits_do_not_pass_the_gate() -> None:
    job, update = trained()
    assert isinstance(update.state, BinaryState)
    key = next(iter(update.state.bits))
    bits = update.state.bits[key]
    for broken in (
        replace(bits, scales=torch.ones(1)),  # would be broadcast
        replace(bits, scales=torch.ones(100_000)),  # would be broadcast into the other direction, and fill the memory
        replace(bits, signs=bits.signs[:-1]),
        replace(bits, shape=(1, *bits.shape)),
        replace(bits, scales=bits.scales * np.nan),
    ):
        state = BinaryState(update.state.plain, {**update.state.bits, key: broken}, list(update.state))
        assert isinstance(admit(replace(update, state=state), {"c0": job}), Failure)


def test_a_packed_state_cannot_hide_a_tensor_behind_its_names() -> None:
    """The gate asks for the prototype's tensors, whatever names the sender lists, and lists must be honest anyway."""
    _, update = trained()
    assert isinstance(update.state, BinaryState)
    names = list(update.state)
    for order in ([*names[:-1], names[0]], names[:-1]):
        with pytest.raises(ValueError, match="must be those of its tensors, each once"):
            BinaryState(update.state.plain, update.state.bits, order)
    with pytest.raises(ValueError, match="must be those of its tensors"):
        BinaryState({**update.state.plain, "extra": torch.ones(1)}, update.state.bits, names)


class Sly(BinaryState):
    """Lists one name twice, and so never the last one."""

    def __init__(self, state: BinaryState) -> None:
        self.plain, self.bits = state.plain, state.bits
        self._order = (*list(state)[:-1], next(iter(state)))


def test_what_is_not_listed_is_looked_at_all_the_same() -> None:
    job, update = trained()
    assert isinstance(update.state, BinaryState)
    last = list(update.state)[-1]
    sly = Sly(update.state)
    sly.plain = {**sly.plain, last: torch.full_like(sly.plain[last], torch.nan)}
    assert isinstance(admit(replace(update, state=sly), {"c0": job}), Failure)
