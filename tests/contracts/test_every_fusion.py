"""What every fusion promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from feddf.fusion.weigh import by_accuracy, by_certainty, by_class_counts, by_examples
from torch import Tensor

from conftest import Tiny, make_tiny, stripes
from feddf.engines import in_process
from feddf.evaluate import logits
from feddf.fusion import FUSIONS, Kit, combine
from feddf.fusion.average import uniform_average
from feddf.fusion.batchnorm import last_statistics, local_statistics, recalibrated
from feddf.fusion.ensemble import answer
from feddf.fusion.fedma import cycle, fit_widths, layers_of
from feddf.fusion.momentum import momentum
from feddf.fusion.select import drop_worst, examined
from feddf.fusion.swag import swag
from feddf.rounds import play
from feddf.runs.store import pack, unpack
from feddf.states import copy, digest, is_statistic
from feddf.types import Failure, Fusion, Job, Refusal, Rule, ServerState, Update, Vote


def nobody(accuracies: Mapping[str, float], n_classes: int, n_examples: int) -> set[str]:
    return set()


def picky(inner: str, kit: Kit) -> Fusion:
    validation = stripes(30, 4)
    examine = partial(answer, prototypes=kit.prototypes, inputs=validation.inputs)
    return drop_worst(nobody, FUSIONS[inner](kit), engine=kit.engine, examine=examine, validation=validation)


def weighed_by_accuracy(kit: Kit) -> Fusion:
    validation = stripes(30, 4)
    examine = partial(answer, prototypes=kit.prototypes, inputs=validation.inputs)
    marks = partial(examined, engine=kit.engine, examine=examine, labels=validation.labels)
    return FUSIONS["feddf"](replace(kit, weigh=partial(by_accuracy, examine=marks)))


def feddf_with(**changes: Any) -> Callable[[Kit], Fusion]:
    return lambda kit: FUSIONS["feddf"](replace(kit, **changes))


def feddf_by(**changes: Any) -> Callable[[Kit], Fusion]:
    return lambda kit: FUSIONS["feddf"](replace(kit, schedule=replace(kit.schedule, **changes)))


def with_rule(method: str, rule: Callable[[Rule, Kit], Rule]) -> Callable[[Kit], Fusion]:
    return lambda kit: FUSIONS[method](replace(kit, rule=rule(kit.rule, kit)))


def to_the_pool(rule: Rule, kit: Kit) -> Rule:
    assert kit.pool is not None
    return recalibrated(rule, kit.prototypes, kit.pool)


AVERAGES: dict[str, Callable[[Kit], Fusion]] = {
    "fedavg": FUSIONS["fedavg"],
    "fedma": FUSIONS["fedma"],
    "fedavg, drop-worst": partial(picky, "fedavg"),
    "fedavg, the last statistics": with_rule("fedavg", lambda rule, kit: last_statistics(rule)),
    "fedavg, local statistics": lambda kit: local_statistics(FUSIONS["fedavg"](kit)),
    "fedavg, uniform": with_rule("fedavg", lambda rule, kit: uniform_average),
}
DISTILLING: dict[str, Callable[[Kit], Fusion]] = {
    "feddf": FUSIONS["feddf"],
    "feddf, momentum": lambda kit: momentum(0.3, FUSIONS["feddf"](kit), kit.prototypes),
    "feddf, drop-worst": partial(picky, "feddf"),
    "feddf, recalibrated": with_rule("feddf", to_the_pool),
    "feddf, local statistics": lambda kit: local_statistics(FUSIONS["feddf"](kit)),
    "feddf, online": feddf_with(mode="online"),
    "feddf, from previous": feddf_with(start="previous"),
    "feddf, from the best": feddf_with(start="best"),
    "feddf, probabilities": feddf_with(target=partial(combine, average="probabilities")),
    "feddf, losses": feddf_with(target=partial(combine, average="losses")),
    "feddf, n_k": feddf_with(weigh=by_examples),
    "feddf, certainty": feddf_with(weigh=by_certainty),
    "feddf, class counts": feddf_with(weigh=partial(by_class_counts, n_classes=3)),
    "feddf, accuracy": weighed_by_accuracy,
    "feddf, held-out loss": feddf_with(held_out=0.25),
    "feddf, swag": feddf_with(more_teachers=partial(swag, samples=3)),
    "feddf, sgd": feddf_by(optimizer="sgd"),
    "feddf, swa": feddf_by(optimizer="swa", swa_cycle=2),
}
METHODS = {**AVERAGES, **DISTILLING, "fedavg, recalibrated": with_rule("fedavg", to_the_pool)}
OTHER_STATISTICS = {"fedavg, the last statistics", "fedavg, recalibrated", "feddf, recalibrated"}


@pytest.fixture(params=sorted(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny(method: str) -> Tiny:
    if method != "fedma":
        return make_tiny()
    tiny = make_tiny(norm="none")  # it cannot match anything else
    prototypes = {name: replace(prototype, fit=fit_widths) for name, prototype in tiny.prototypes.items()}
    layers = {name: layers_of(prototype) for name, prototype in prototypes.items()}
    local = partial(tiny.local, prototypes=prototypes)
    federation = replace(tiny.federation, hold=cycle(layers))
    kit = replace(tiny.kit, prototypes=prototypes)
    return replace(tiny, prototypes=prototypes, local=local, federation=federation, kit=kit)


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


def test_it_starts_from_the_weighted_average_of_each_prototype(
    method: str, fuse: Fusion, tiny: Tiny, updates: list[Update]
) -> None:
    if method == "fedavg, uniform":
        pytest.skip("it is not weighted")
    weighted = [replace(update, n_examples=10 * (i + 1)) for i, update in enumerate(updates)]
    start = fuse(tiny.server, weighted, 1).start
    for name in tiny.prototypes:
        mine = [update for update in weighted if update.prototype == name]
        for key, tensor in start[name].items():
            if method in OTHER_STATISTICS and is_statistic(key):
                continue
            if tensor.is_floating_point():  # weights and BatchNorm's running statistics alike
                total = sum(u.state[key].double() * u.n_examples for u in mine) / sum(u.n_examples for u in mine)
                torch.testing.assert_close(tensor.double(), total, atol=1e-6, rtol=1e-6)


def test_identical_updates_give_that_model_back(method: str, fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    same = {name: next(u.state for u in updates if u.prototype == name) for name in tiny.prototypes}
    fused = fuse(tiny.server, [replace(u, state=same[u.prototype], n_examples=i + 1) for i, u in enumerate(updates)], 1)
    if method not in OTHER_STATISTICS - set(AVERAGES):
        assert digest(fused.start) == digest(same)
    if method in AVERAGES:
        assert digest(fused.server.models) == digest(same)


def test_one_client_alone_is_its_own_average_or_teacher(method: str, tiny: Tiny, updates: list[Update]) -> None:
    targets: list[Tensor] = []

    def heard(votes: Iterable[Vote]) -> Tensor:
        targets.append(tiny.kit.target(votes))
        return targets[-1]

    alone = updates[1]  # an MLP
    fused = METHODS[method](replace(tiny.kit, target=heard))(tiny.server, [alone], 1)
    assert digest({"m": fused.start["mlp"]}) == digest({"m": alone.state})
    if method in AVERAGES:
        assert digest({"m": fused.server.models["mlp"]}) == digest({"m": alone.state})
    elif method in ("feddf, probabilities", "feddf, losses"):
        assert not targets  # they bring a target of their own, which is the same for one teacher
    elif method in DISTILLING:
        model = tiny.prototypes["mlp"].load(alone.state)
        torch.testing.assert_close(targets[0], logits(model, tiny.pool).softmax(dim=1))


def test_buffers_and_counters_survive(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    fused = fuse(tiny.server, updates, 1)
    for name, state in tiny.server.models.items():
        for key, tensor in state.items():
            assert fused.server.models[name][key].dtype == fused.start[name][key].dtype == tensor.dtype
            assert fused.server.models[name][key].isfinite().all()
    if counter := [key for key in tiny.server.models["cnn"] if key.endswith("num_batches_tracked")]:
        assert int(fused.server.models["cnn"][counter[0]]) >= 1


@dataclass(frozen=True)
class Backwards:
    """An engine whose answers come in the opposite order."""

    def __call__(self, function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any | Failure]:
        return reversed(list(in_process(function, jobs)))


def test_the_order_of_arrival_does_not_matter(method: str, tiny: Tiny) -> None:
    def end(engine: Any) -> str:
        fuse = METHODS[method](replace(tiny.kit, engine=engine))
        return digest(play(tiny.server, tiny.federation, engine=engine, train=tiny.local, fuse=fuse).server.models)

    assert end(in_process) == end(Backwards())


def test_a_resumed_run_ends_as_an_uninterrupted_one(fuse: Fusion, tiny: Tiny) -> None:
    """After every round the state goes through a checkpoint's bytes, or it does not."""

    def end(resumed: bool) -> str:
        server = tiny.server
        for _ in range(4):
            server = play(server, tiny.federation, engine=in_process, train=tiny.local, fuse=fuse).server
            server = unpack(pack(server)) if resumed else server
        return digest({**server.models, **server.memory})

    assert end(resumed=True) == end(resumed=False)


def test_unfit_updates_are_refused_and_never_fused(
    method: str, fuse: Fusion, tiny: Tiny, updates: list[Update]
) -> None:
    if method not in DISTILLING:
        pytest.skip("averages are protected by the gate alone")
    broken = replace(updates[1], state={**updates[1].state, "layers.5.bias": torch.full((3,), torch.inf)})
    with pytest.raises(Refusal, match="c1"):
        fuse(tiny.server, [updates[0], broken, *updates[2:]], 1)


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
