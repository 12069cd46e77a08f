"""What every fusion promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch

from conftest import Tiny, stripes
from feddf.fusion import FUSIONS, Kit, fedavg
from feddf.fusion.ensemble import answer
from feddf.fusion.momentum import momentum
from feddf.fusion.select import drop_worst
from feddf.states import copy, digest
from feddf.types import Fusion, Job, ServerState, Update

AVERAGES = {"fedavg", "drop-worst"}


def with_momentum(kit: Kit) -> Fusion:
    return momentum(0.3, FUSIONS["feddf"](kit), kit.prototypes)


def without_the_worst(kit: Kit) -> Fusion:
    validation = stripes(30, 4)
    examine = partial(answer, prototypes=kit.prototypes, inputs=validation.inputs)
    return drop_worst(nobody, fedavg(), engine=kit.engine, examine=examine, validation=validation)


def nobody(accuracies: Mapping[str, float], n_classes: int, n_examples: int) -> set[str]:
    return set()


METHODS = {**FUSIONS, "feddf with momentum": with_momentum, "drop-worst": without_the_worst}


@pytest.fixture(params=sorted(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fuse(method: str, tiny: Tiny) -> Fusion:
    return METHODS[method](tiny.kit)


@pytest.fixture
def updates(tiny: Tiny) -> list[Update]:
    return [tiny.local(Job(c, 1, tiny.server.models[c.prototype], 7)) for c in tiny.federation.clients]


def test_its_inputs_are_not_changed(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    def picture() -> list[str]:
        return [digest(tiny.server.models), *(digest({"m": update.state}) for update in updates)]

    before = picture()
    fuse(tiny.server, updates, 1)
    assert picture() == before


def test_the_next_state_has_every_prototype_with_the_same_form(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    fused = fuse(tiny.server, updates, 1)
    assert fused.server.round == 1
    for models in (fused.server.models, fused.start):
        assert models.keys() == tiny.server.models.keys()
        for name, state in models.items():
            expected = tiny.server.models[name]
            assert {k: (v.shape, v.dtype) for k, v in state.items()} == {
                k: (v.shape, v.dtype) for k, v in expected.items()
            }


def test_the_same_inputs_and_seed_give_the_same_bytes(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    one, two = (digest(fuse(tiny.server, updates, 5).server.models) for _ in range(2))
    assert one == two


def test_it_starts_from_the_weighted_average_of_each_prototype(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    weighted = [replace(update, n_examples=10 * (i + 1)) for i, update in enumerate(updates)]
    start = fuse(tiny.server, weighted, 1).start
    for name in tiny.prototypes:
        mine = [update for update in weighted if update.prototype == name]
        for key, tensor in start[name].items():
            if tensor.is_floating_point():  # weights and BatchNorm's running statistics alike
                total = sum(u.state[key].double() * u.n_examples for u in mine) / sum(u.n_examples for u in mine)
                torch.testing.assert_close(tensor.double(), total, atol=1e-6, rtol=1e-6)


def test_identical_updates_give_that_model_back(method: str, fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    same = {name: next(u.state for u in updates if u.prototype == name) for name in tiny.prototypes}
    fused = fuse(tiny.server, [replace(u, state=same[u.prototype], n_examples=i + 1) for i, u in enumerate(updates)], 1)
    assert digest(fused.start) == digest(same)
    if method in AVERAGES:
        assert digest(fused.server.models) == digest(same)


def test_counters_survive(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    counter = "features.1.num_batches_tracked"
    fused = fuse(tiny.server, updates, 1)
    assert fused.server.models["cnn"][counter].dtype == torch.int64
    assert fused.start["cnn"][counter] == 3


def test_a_prototype_without_clients_starts_from_its_previous_weights(
    method: str, fuse: Fusion, tiny: Tiny, updates: list[Update]
) -> None:
    only_mlp = [update for update in updates if update.prototype == "mlp"]
    fused = fuse(tiny.server, only_mlp, 1)
    assert digest({"m": fused.start["cnn"]}) == digest({"m": tiny.server.models["cnn"]})
    if method in AVERAGES:
        assert digest({"m": fused.server.models["cnn"]}) == digest({"m": tiny.server.models["cnn"]})


def test_clients_that_saw_nothing_do_not_divide_by_zero(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    idle = [replace(update, n_examples=0) for update in updates]
    assert digest(fuse(tiny.server, idle, 1).start) == digest(tiny.server.models)


def test_the_round_number_goes_on(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    later = ServerState(41, {name: copy(state) for name, state in tiny.server.models.items()})
    assert fuse(later, updates, 1).server.round == 42
