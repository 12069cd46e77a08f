from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import CLASSES, SHAPE, make_tiny
from feddf.client import local_update
from feddf.config import ClientsConfig, FedMAConfig, LocalConfig, with_values
from feddf.config.names import MODELS
from feddf.engines import in_process
from feddf.evaluate import accuracy
from feddf.fusion import fedma as matching
from feddf.fusion.fedma import (
    Layers,
    freeze_matched,
    layers_of,
    match,
    match_and_average,
    matched_average,
    rounds_a_model,
)
from feddf.outputs import classes
from feddf.rounds import Federation, run_round, sample
from feddf.runs.methods import fedma
from feddf.states import digest, fit_widths, init_state
from feddf.types import (
    Client,
    Job,
    Method,
    Prototype,
    Reply,
    Resources,
    ServerState,
    State,
    Steps,
    Training,
    Update,
)

IMAGE = (3, 16, 16)
PLAIN = {
    "mlp": partial(MODELS["mlp"], IMAGE, 5, width=24),
    "cnn": partial(MODELS["cnn"], IMAGE, 5, width=6, norm="none"),
    "vgg9": partial(MODELS["vgg9"], IMAGE, 5, scale=0.1),
}


def prototype(name: str) -> Prototype:
    return Prototype(name, PLAIN[name], fit=fit_widths)


def training(job: Job, one: Prototype) -> Training:
    return Training(job, one, torch.zeros(2, dtype=torch.int64), classes(2), "sgd", 1, 0.1)


def permuted(state: State, layers: Layers, seed: int) -> State:
    """The same function with the neurons of every hidden layer in another order, without the code under test."""
    random = np.random.default_rng(seed)
    below: np.ndarray | None = None
    result = dict(state)
    for depth, name in enumerate(layers.names):
        weight = state[f"{name}.weight"].numpy()
        if below is not None:
            split = weight.reshape(weight.shape[0], len(below), -1)
            weight = split[:, below].reshape(weight.shape)
        last = depth == len(layers) - 1
        order = np.arange(len(weight)) if last else random.permutation(len(weight))
        result[f"{name}.weight"] = torch.from_numpy(weight[order].copy())
        result[f"{name}.bias"] = state[f"{name}.bias"][torch.from_numpy(order)]
        below = order
    return result


@pytest.mark.parametrize("growth", [1.0, 1.5])
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_permuted_copies_of_one_network_are_matched_back_exactly(name: str, growth: float) -> None:
    one = prototype(name)
    layers = layers_of(one)
    state = init_state(one, 0)
    copies = [state, *(permuted(state, layers, seed) for seed in range(1, 5))]
    inputs = torch.randn(6, *IMAGE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = one.load(state)(inputs)
        torch.testing.assert_close(one.load(copies[2])(inputs), expected, atol=1e-5, rtol=1e-4)
    updates = [Update(f"c{i}", name, 1, copy, 10 + i) for i, copy in enumerate(copies)]
    fused, _ = matched_average(updates, layers, state, config=FedMAConfig(growth=growth))
    for key in state:
        torch.testing.assert_close(fused[key], state[key], atol=1e-6, rtol=1e-6)


def test_a_plain_average_of_permuted_copies_is_lost() -> None:
    """The reason for matching: the same copies, averaged as they are, are no longer the same function."""
    one = prototype("mlp")
    state = init_state(one, 0)
    copies = [permuted(state, layers_of(one), seed) for seed in range(5)]
    mean = {key: torch.stack([copy[key] for copy in copies]).mean(0) for key in state}
    assert float((mean["layers.1.weight"] - state["layers.1.weight"]).abs().max()) > 0.01


@given(st.integers(0, 200), st.integers(2, 4))
def test_two_networks_are_matched_with_the_least_squared_distance(seed: int, neurons: int) -> None:
    """Without growth the best assignment is the one of all permutations that brings the neurons closest together."""
    random = np.random.default_rng(seed)
    left, right = random.normal(size=(2, neurons, 6))
    places = match([left, right], most=neurons, sweeps=1)
    cost = {order: ((left[list(order)] - right) ** 2).sum() for order in permutations(range(neurons))}
    assert tuple(places[1]) == min(cost, key=lambda order: cost[order])


def test_neurons_without_a_partner_become_new_ones_up_to_the_bound() -> None:
    left = np.eye(32)[:4] * 5
    right = np.concatenate([np.eye(32)[2:4], np.eye(32)[6:8]]) * 5
    for most, width in ((8, 6), (5, 5), (4, 4)):
        places = match([left, right], most=most)
        assert max(at.max() for at in places) + 1 == width
        assert places[1][:2].tolist() == places[0][2:].tolist()
        assert all(len(set(at.tolist())) == 4 for at in places)


def test_scaling_a_layer_changes_no_match() -> None:
    random = np.random.default_rng(0)
    clients = [random.normal(size=(6, 9)) for _ in range(3)]
    small = match([rows * 1e-3 for rows in clients], most=9)
    for at, other in zip(match(clients, most=9), small, strict=True):
        assert at.tolist() == other.tolist()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (partial(MODELS["cnn"], IMAGE, 5), "is a BatchNorm2d"),
        (partial(MODELS["resnet8"], IMAGE, 5), "is a BatchNorm2d"),
        (partial(MODELS["resnet8"], IMAGE, 5, norm="none"), "residual connection"),
        (partial(MODELS["cnn"], IMAGE, 5, norm="group", groups=4), "is a GroupNorm"),
    ],
)
def test_architectures_that_it_cannot_match_are_refused(build: partial[torch.nn.Module], reason: str) -> None:
    with pytest.raises(ValueError, match=f"FedMA cannot match 'x': .*{reason}"):
        layers_of(Prototype("x", build))


def test_the_layers_of_vgg9_are_nine() -> None:
    layers = layers_of(Prototype("vgg9", partial(MODELS["vgg9"], (3, 32, 32), 10)))
    assert layers.widths == (32, 64, 128, 128, 256, 256, 512, 512, 10)


def test_matched_layers_stay_as_they_are_while_the_clients_train_the_rest() -> None:
    tiny = make_tiny()
    mlp = Prototype("mlp", tiny.prototypes["mlp"].build, fit=fit_widths)
    layers = {"mlp": layers_of(mlp)}
    assert rounds_a_model(layers) == 3
    train = partial(
        local_update,
        prototypes={"mlp": mlp},
        train=tiny.train,
        local=LocalConfig(epochs=3, batch_size=8, lr=0.05),
        half=freeze_matched(Resources({"mlp": mlp}), rounds=3, own_start=False).half,
    )
    clients = [Client(f"c{k}", "mlp", torch.arange(k, 120, 4)) for k in range(4)]
    federation = Federation(clients, ClientsConfig(total=4, fraction=0.75), 0, rounds_per_cohort=3)
    server = ServerState(0, {"mlp": init_state(mlp, 0)})
    seen: list[dict[str, Reply]] = []

    def watched(job: Job) -> Reply:
        reply = train(job)
        seen[-1][job.id] = reply
        return reply

    fuse = match_and_average(layers, FedMAConfig(growth=1.0, neuron_weights="examples"))
    for stage in range(6):
        seen.append({})
        before = server
        server = run_round(server, federation, engine=in_process, train=watched, fuse=fuse).server
        for below in range(stage % 3):
            key = f"{layers['mlp'].names[below]}.weight"
            assert torch.equal(server.models["mlp"][key], before.models["mlp"][key])
            assert all(torch.equal(reply.state[key], before.models["mlp"][key]) for reply in seen[-1].values())
        whole = stage % 3 == 2
        assert server.memory == {}
        assert server.own.keys() == (set() if whole else set(seen[-1]))
    assert seen[0].keys() == seen[1].keys() == seen[2].keys()  # one cohort a model
    assert accuracy(mlp.load(server.models["mlp"]), tiny.test) > 0.8


def test_a_client_computes_the_same_with_its_own_layers_on_matched_inputs() -> None:
    """If all clients hold the same function in another order, what each is sent next is still that function."""
    one = prototype("vgg9")
    layers = layers_of(one)
    state = init_state(one, 0)
    updates = [Update(f"c{seed}", "vgg9", 1, permuted(state, layers, seed), 10) for seed in range(3)]
    server = match_and_average({"vgg9": layers}, FedMAConfig())(ServerState(0, {"vgg9": state}), updates, 0).server
    inputs = torch.randn(4, *IMAGE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = one.load(state)(inputs)
        for update in updates:
            sent = server.sent_to(Client(update.client_id, "vgg9"))
            torch.testing.assert_close(one.load(sent)(inputs), expected, atol=1e-5, rtol=1e-4)


def test_layers_that_grew_are_loaded_and_trained() -> None:
    """Clients that learned different things: the layers grow, and the next round goes on with them."""
    tiny = make_tiny()
    mlp = Prototype("mlp", tiny.prototypes["mlp"].build, fit=fit_widths)
    layers = {"mlp": layers_of(mlp)}
    random = torch.Generator().manual_seed(0)
    base = init_state(mlp, 0)
    updates = [
        Update(f"c{k}", "mlp", 1, {key: torch.randn(t.shape, generator=random) for key, t in base.items()}, 10)
        for k in range(3)
    ]
    fused = match_and_average(layers, FedMAConfig(growth=1.5, neuron_weights="examples"))(
        ServerState(0, {"mlp": base}), updates, 0
    )
    widths = fused.notes["fedma"]["widths"]["mlp"]
    assert 16 < widths[0] <= 24
    assert widths[2] == CLASSES
    assert mlp.load(fused.server.models["mlp"])(torch.zeros(2, *SHAPE)).shape == (2, CLASSES)
    sent = fused.server.sent_to(Client("c1", "mlp"))
    job = Job(Client("c1", "mlp", torch.arange(20)), 2, sent, 0)
    reply = local_update(job, prototypes={"mlp": mlp}, train=tiny.train, local=tiny.settings.local)
    assert reply.state["layers.1.weight"].shape[0] == widths[0]


def test_the_same_clients_are_sampled_for_a_whole_model() -> None:
    clients = [Client(f"c{k:02d}", "mlp") for k in range(30)]
    config = ClientsConfig(total=30, fraction=0.3)
    drawn = [sample(Federation(clients, config, 0, rounds_per_cohort=3), number) for number in range(1, 10)]
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3] == drawn[4]
    assert [sample(Federation(clients, config, 0), number) for number in (1, 2, 3)] == [drawn[0], drawn[3], drawn[6]]


def test_a_client_that_joins_within_a_model_is_matched_with_the_others() -> None:
    """It has the server's grown layers, the others have their own narrow ones: the round must not end in an error."""
    tiny = make_tiny()
    mlp = Prototype("mlp", tiny.prototypes["mlp"].build, fit=fit_widths)
    layers = {"mlp": layers_of(mlp)}
    random = torch.Generator().manual_seed(0)
    base = init_state(mlp, 0)

    def update(name: str, like: State, number: int) -> Update:
        return Update(name, "mlp", number, {k: torch.randn(t.shape, generator=random) for k, t in like.items()}, 10)

    fuse = match_and_average(layers, FedMAConfig(growth=2.0, neuron_weights="examples"))
    first = fuse(ServerState(0, {"mlp": base}), [update(f"c{k}", base, 1) for k in range(3)], 0)
    assert first.notes["fedma"]["widths"]["mlp"][1] > 16  # the layer above the matched one has grown in the average
    server = first.server
    sent = {name: server.sent_to(Client(name, "mlp")) for name in ("c0", "c1", "newcomer")}
    assert sent["newcomer"]["layers.3.weight"].shape != sent["c0"]["layers.3.weight"].shape
    second = fuse(server, [update(name, state, 2) for name, state in sent.items()], 1)
    assert mlp.load(second.server.models["mlp"])(torch.zeros(2, *SHAPE)).shape == (2, CLASSES)
    assert mlp.load(second.start["mlp"])(torch.zeros(2, *SHAPE)).shape == (2, CLASSES)


class Turning(torch.nn.Module):
    """Brings the channels last before it flattens: the order of neurons does not pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4 * 14 * 14, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.first(inputs).permute(0, 2, 3, 1).flatten(1))
        return logits


def test_what_mixes_neurons_is_refused() -> None:
    with pytest.raises(ValueError, match="it is not known what permute does to neurons"):
        layers_of(Prototype("turning", Turning))


def test_the_method_asks_its_clients_for_what_it_needs() -> None:
    """By name it is more than a fusion: clients freeze matched layers, modules grow, and a cohort stays together."""
    tiny = make_tiny(norm="none")
    settings = with_values(tiny.settings, {"fusion.method": "fedma", "fedma.growth": 1.5})
    method = fedma(Resources({"mlp": tiny.prototypes["mlp"]}), settings, in_process)
    assert isinstance(method, Method)
    assert method.rounds_per_cohort == 3
    (part,) = method.parts
    assert part.fit is fit_widths
    model, state = tiny.prototypes["mlp"].build(), tiny.server.models["mlp"]
    job = Job(Client("a", "mlp", torch.arange(20)), 2, state, 0)  # the second round: one layer is matched
    assert part.half(model, training(job, tiny.prototypes["mlp"])) == Steps()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"layers.1.weight", "layers.1.bias"}
    given = {"prototypes": tiny.prototypes, "train": tiny.train, "local": settings.local}
    reply = local_update(job, **given, half=part.half)
    assert list(reply.state) == list(state)
    assert {key for key in state if torch.equal(reply.state[key], state[key])} == frozen
    random = torch.Generator().manual_seed(0)
    updates = [
        Update(f"c{k}", "mlp", 1, {key: torch.randn(t.shape, generator=random) for key, t in state.items()}, 10)
        for k in range(3)
    ]
    one = method.fuse(ServerState(0, {"mlp": state}), updates, 0)
    same = match_and_average({"mlp": layers_of(tiny.prototypes["mlp"])}, FedMAConfig(growth=1.5))
    assert digest(one.server.models) == digest(same(ServerState(0, {"mlp": state}), updates, 0).server.models)
    assert 16 < one.notes["fedma"]["widths"]["mlp"][0] <= 24


@pytest.mark.parametrize("gamma", [1.0, 7.0])
def test_the_score_of_a_place_is_the_posteriors(gamma: float) -> None:
    """Written out by loops, as Yurochkin et al. (2019) and FedMA have it, for σ² = 0.7 and five clients."""
    random = np.random.default_rng(3)
    rows, sums, counts = random.normal(size=(4, 3)), random.normal(size=(2, 3)), np.array([1.0, 3.0])
    found = matching._score(rows, sums, counts, 3, variance=0.7, n_clients=5, gamma=gamma)
    for i, v in enumerate(rows):
        for place, (total, m) in enumerate(zip(sums, counts, strict=True)):
            gain = np.sum((total + v) ** 2) / (0.7 * (m + 2)) - np.sum(total**2) / (0.7 * (m + 1))
            assert found[i, place] == pytest.approx(gain + 2 * np.log(m / (5 - m)))
        for t in (1, 2, 3):
            as_new = np.sum(v**2) / (2 * 0.7) - 2 * np.log(t) + 2 * np.log(gamma / 5)
            assert found[i, 1 + t] == pytest.approx(as_new)
    assert found.shape == (4, 5)


def scaled_copies(name: str) -> tuple[State, list[Update]]:
    """Two clients whose weights differ by a factor only: matching is the identity, and averages are known."""
    state = init_state(prototype(name), 0)
    return state, [
        Update("a", name, 1, state, 1),
        Update("b", name, 1, {key: 2 * tensor for key, tensor in state.items()}, 3),
    ]


def test_hidden_layers_are_averaged_uniformly_and_the_last_by_examples() -> None:
    state, updates = scaled_copies("mlp")
    layers = layers_of(prototype("mlp"))
    fused, _ = matched_average(updates, layers, state, config=FedMAConfig(growth=1.0))
    for name in layers.names:
        factor = 1.75 if name == layers.names[-1] else 1.5
        weight = f"{name}.weight"
        found = fused[weight].abs().sum() / state[weight].abs().sum()
        assert float(found) == pytest.approx(factor, rel=1e-5), name


def test_a_client_with_one_example_is_matched() -> None:
    state, updates = scaled_copies("mlp")
    fuse = match_and_average({"mlp": layers_of(prototype("mlp"))}, FedMAConfig())
    both = fuse(ServerState(0, {"mlp": state}), updates, 0).server.models["mlp"]
    last = f"{layers_of(prototype('mlp')).names[-1]}.bias"
    torch.testing.assert_close(both[last], 1.75 * state[last])


def test_every_client_begins_from_weights_of_its_own_by_its_seed() -> None:
    one = prototype("mlp")
    began: list[str] = []
    for seed in (1, 1, 2):
        model = one.load(init_state(one, 0))
        job = Job(Client("c", "mlp"), 1, init_state(one, 0), seed)
        freeze_matched(Resources({"mlp": one}), rounds=3, own_start=True).half(model, training(job, one))
        began.append(digest({"m": model.state_dict()}))
    assert began[0] == began[1] != began[2]


def test_clients_of_every_architecture_keep_their_own_layers_until_a_model_is_whole() -> None:
    names = ("mlp", "cnn")
    layers = {name: layers_of(prototype(name)) for name in names}
    states = {name: init_state(prototype(name), 0) for name in names}
    updates = [replace(one, client_id=f"{name}-{one.client_id}") for name in names for one in scaled_copies(name)[1]]
    fuse = match_and_average(layers, FedMAConfig(growth=1.0))
    length = rounds_a_model(layers)
    assert fuse(ServerState(0, states), updates, 0).server.own.keys() == {one.client_id for one in updates}
    assert fuse(ServerState(length - 1, states), updates, 0).server.own == {}
