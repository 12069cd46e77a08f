from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import Tiny
from feddf.client import combine_halves, local_update, log_prior, mini_batches, n_batches
from feddf.config import LocalConfig
from feddf.data.datasets import plain
from feddf.fusion.weights import CLASS_COUNTS, tell
from feddf.outputs import classes
from feddf.seeds import derive, torch_generator
from feddf.states import digest, init_state
from feddf.types import Client, ClientHalf, Examples, Inputs, Job, Prototype, Sent, Steps, Training


def job_of(tiny: Tiny, number: int = 0) -> Job:
    client = tiny.federation.clients[number]
    return Job(client, 1, tiny.server.models[client.prototype], seed=11)


def test_is_gradient_descent_on_the_mean_cross_entropy() -> None:
    """One epoch of one batch on a linear model, against the closed form in NumPy."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(12, 4)).astype(np.float32), random.integers(0, 3, 12)
    prototype = Prototype("linear", partial(nn.Linear, 4, 3))
    train = Examples(Inputs(torch.from_numpy(x), plain), torch.from_numpy(y), classes(3))
    state = init_state(prototype, 0)
    job = Job(Client("a", "linear", torch.arange(12)), 1, state, 5)
    local = LocalConfig(epochs=3, batch_size=12, lr=0.5)
    update = local_update(job, prototypes={"linear": prototype}, train=train, local=local)
    weight, bias = (state[key].double().numpy() for key in ("weight", "bias"))
    for _ in range(3):
        scores = np.exp(x @ weight.T + bias)
        error = scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[y]
        weight, bias = weight - 0.5 * error.T @ x / 12, bias - 0.5 * error.mean(axis=0)
    np.testing.assert_allclose(update.state["weight"], weight, atol=1e-5)
    np.testing.assert_allclose(update.state["bias"], bias, atol=1e-5)


def test_the_proximal_term_pulls_towards_what_was_sent() -> None:
    """FedProx on a linear model, against the closed form in NumPy: μ (x − x_{t−1}) joins the gradient."""
    random = np.random.default_rng(1)
    x, y = random.normal(size=(8, 3)).astype(np.float32), random.integers(0, 2, 8)
    prototype = Prototype("linear", partial(nn.Linear, 3, 2, bias=False))
    train = Examples(Inputs(torch.from_numpy(x), plain), torch.from_numpy(y), classes(2))
    state = init_state(prototype, 0)
    job = Job(Client("a", "linear", torch.arange(8)), 1, state, 5)
    local = LocalConfig(epochs=5, batch_size=8, lr=0.3, prox_mu=0.7)
    update = local_update(job, prototypes={"linear": prototype}, train=train, local=local)
    origin = weight = state["weight"].double().numpy()
    for _ in range(5):
        scores = np.exp(x @ weight.T)
        error = scores / scores.sum(axis=1, keepdims=True) - np.eye(2)[y]
        weight = weight - 0.3 * (error.T @ x / 8 + 0.7 * (weight - origin))
    np.testing.assert_allclose(update.state["weight"], weight, atol=1e-5)


def test_adam_takes_steps_of_its_rate(tiny: Tiny) -> None:
    """Adam's first step moves every weight with a gradient by the rate, whatever the gradient's size."""
    job = replace(job_of(tiny, 1), client=Client("c1", "mlp", torch.arange(8)))
    local = LocalConfig(epochs=1, batch_size=8, lr=0.01, optimizer="adam")
    update = local_update(job, prototypes=tiny.prototypes, train=tiny.train, local=local)
    moved = (update.state["layers.5.bias"] - job.state["layers.5.bias"]).abs()
    torch.testing.assert_close(moved, torch.full((3,), 0.01), atol=1e-4, rtol=0)


def test_does_not_change_what_it_was_sent_and_repeats_itself(tiny: Tiny) -> None:
    job = job_of(tiny)
    before = digest({"m": job.state})
    torch.manual_seed(1)
    one = tiny.local(job)
    torch.manual_seed(2)  # the global generator has no part in it
    two = tiny.local(job)
    assert digest({"m": job.state}) == before
    assert digest({"m": one.state}) == digest({"m": two.state}) != before
    assert digest({"m": tiny.local(replace(job, seed=12)).state}) != digest({"m": one.state})


def test_says_who_it_is_and_how_much_it_saw(tiny: Tiny) -> None:
    update = tiny.local(job_of(tiny, 1))
    assert (update.client_id, update.prototype, update.round, update.n_examples) == ("c1", "mlp", 1, 20)
    assert update.metrics["train_loss"] > 0


def test_uses_only_its_own_examples(tiny: Tiny) -> None:
    """Spoiling everybody else's data changes nothing."""
    job = job_of(tiny)
    raw = tiny.train.inputs.raw.clone()
    others = torch.ones(len(raw), dtype=torch.bool)
    others[job.client.indices] = False
    raw[others] = 255
    spoilt = replace(tiny.train, inputs=replace(tiny.train.inputs, raw=raw))
    update = local_update(job, prototypes=tiny.prototypes, train=spoilt, local=tiny.settings.local)
    assert digest({"m": update.state}) == digest({"m": tiny.local(job).state})


def test_a_client_without_examples_sends_back_what_it_got(tiny: Tiny) -> None:
    job = replace(job_of(tiny), client=Client("c0", "cnn", torch.tensor([], dtype=torch.int64)))
    update = tiny.local(job)
    assert update.n_examples == 0
    assert digest({"m": update.state}) == digest({"m": job.state})


def test_augmentation_is_seeded(tiny: Tiny) -> None:
    def shift(raw: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return raw.roll(int(torch.randint(0, 8, (1,), generator=generator)), dims=-1)

    arguments = {"prototypes": tiny.prototypes, "train": tiny.train, "local": tiny.settings.local}
    one, two = (digest({"m": local_update(job_of(tiny), **arguments, augment=shift).state}) for _ in range(2))
    assert one == two != digest({"m": tiny.local(job_of(tiny)).state})


class Noisy(nn.Linear):
    """A model that draws from the global generator, as dropout does, and writes down what it drew."""

    drawn: ClassVar[list[float]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().forward(inputs)


def test_every_random_choice_follows_the_clients_seed_and_each_has_a_stream_of_its_own() -> None:
    prototype = Prototype("noisy", partial(Noisy, 2, 2))
    train = Examples(Inputs(torch.arange(16.0).reshape(8, 2), plain), torch.arange(8) % 2, classes(2))

    def draws(seed: int, around: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"shuffle": [], "augment": []}
        Noisy.drawn.clear()

        def augment(raw: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            found["shuffle"] += raw[:, 0].tolist()
            found["augment"].append(float(torch.rand((), generator=generator)))
            return raw

        job = Job(Client("a", "noisy", torch.arange(8)), 1, init_state(prototype, 0), seed)
        torch.manual_seed(around)
        local = LocalConfig(epochs=2, batch_size=4, lr=0.1)
        local_update(job, prototypes={"noisy": prototype}, train=train, local=local, augment=augment)
        return {**found, "dropout": list(Noisy.drawn)}

    one, again, other = draws(1, around=1), draws(1, around=2), draws(2, around=1)
    assert one == again
    assert all(one[name] != other[name] for name in one)
    assert one["augment"] != one["dropout"]
    assert len(set(one["augment"])) == len(set(one["dropout"])) == 4


def test_the_prior_is_finite_for_classes_that_do_not_occur() -> None:
    """log((n_c + ε) / n), ε = 0.001 n / M, by hand; without any label all classes are alike."""
    expected = np.log([(3 + 0.001) / 4, (1 + 0.001) / 4, 0.001 / 4, 0.001 / 4])
    np.testing.assert_allclose(log_prior(torch.tensor([0, 0, 0, 1]), 4), expected, rtol=1e-5)
    assert len(set(log_prior(torch.tensor([], dtype=torch.int64), 3).tolist())) == 1


@given(st.integers(0, 50), st.integers(2, 9))
def test_batches_cover_each_example_once_and_never_leave_one_alone(n: int, size: int) -> None:
    batches = list(mini_batches(torch.arange(n), size, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat(batches).tolist() if batches else []) == list(range(n))
    assert n <= 1 or all(2 <= len(batch) <= size + 1 for batch in batches)
    assert n_batches(n, size) == len(batches)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [("none", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]), ("cosine", [1, 0.854, 0.5, 0.146])],
)
def test_the_rate_falls_over_the_rounds_steps_when_asked(tiny: Tiny, schedule: Any, shares: list[float]) -> None:
    """Adam moves a bias by about its rate in each step: with one batch an epoch the moves tell the rates."""
    client = Client("c1", "mlp", torch.arange(8))
    local = LocalConfig(epochs=4, batch_size=8, lr=0.01, lr_schedule=schedule)
    rates: list[float] = []
    step = torch.optim.SGD.step

    def watched(self: torch.optim.SGD, *args: object) -> object:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", watched)
        job = replace(job_of(tiny, 1), client=client)
        local_update(job, prototypes=tiny.prototypes, train=tiny.train, local=local)
    assert rates == pytest.approx([0.01 * share for share in shares], rel=1e-2)


def freeze_the_first(model: nn.Module, training: Training) -> Steps:
    model.get_submodule("layers.1").requires_grad_(False)
    return Steps()


def test_frozen_parameters_stay_as_they_were_sent(tiny: Tiny) -> None:
    job = job_of(tiny, 1)
    local = LocalConfig(epochs=2, batch_size=8, lr=0.1, prox_mu=0.1)
    update = local_update(job, prototypes=tiny.prototypes, train=tiny.train, local=local, half=freeze_the_first)
    moved = {key for key in job.state if not torch.equal(update.state[key], job.state[key])}
    assert moved == {"layers.3.weight", "layers.3.bias", "layers.5.weight", "layers.5.bias"}


def test_class_counts_are_told_only_when_asked_for(tiny: Tiny) -> None:
    job = job_of(tiny, 1)
    arguments = {"prototypes": tiny.prototypes, "train": tiny.train, "local": tiny.settings.local}
    assert not local_update(job, **arguments).payload
    counts = local_update(job, **arguments, half=tell).payload[CLASS_COUNTS]["counts"]
    labels = tiny.train.labels[job.client.indices].tolist()
    assert counts.tolist() == [labels.count(label) for label in range(3)]


def noting(name: str, log: list[str], state: bool = False, loss: bool = False) -> ClientHalf:
    """Return a half that writes down when it is called."""

    def own_loss(predictions: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return predictions.sum() * 0

    def half(model: nn.Module, training: Training) -> Steps:
        log.append(f"begin {name}")

        def finish() -> Sent:
            log.append(f"finish {name}")
            sent = {key: torch.zeros_like(one) for key, one in training.job.state.items()} if state else None
            return Sent(sent, {name: {"steps": torch.tensor(training.steps)}}, {name: {}})

        return Steps(own_loss if loss else None, lambda: log.append(f"correct {name}"), finish)

    return half


def test_halves_begin_correct_and_finish_in_their_order(tiny: Tiny) -> None:
    job, log = job_of(tiny, 1), list[str]()
    local = LocalConfig(epochs=2, batch_size=10, lr=0.1)  # 20 examples: four steps
    both = combine_halves([noting("a", log), noting("b", log, state=True)])
    reply = local_update(job, prototypes=tiny.prototypes, train=tiny.train, local=local, half=both)
    assert log == ["begin a", "begin b", *["correct a", "correct b"] * 4, "finish a", "finish b"]
    assert {name: int(state["steps"]) for name, state in reply.payload.items()} == {"a": 4, "b": 4}
    assert reply.kept.keys() == {"a", "b"}
    assert all(not one.any() for one in reply.state.values())


def test_two_losses_are_one_too_many(tiny: Tiny) -> None:
    both = combine_halves([noting("a", [], loss=True), noting("b", [], loss=True)])
    with pytest.raises(ValueError, match="loss"):
        local_update(
            job_of(tiny, 1), prototypes=tiny.prototypes, train=tiny.train, local=tiny.settings.local, half=both
        )


@pytest.mark.parametrize(("schedule", "expected"), [("none", 4 * 0.1), ("linear", 0.1 * (1 + 0.75 + 0.5 + 0.25))])
def test_a_half_knows_the_sum_of_its_rates(tiny: Tiny, schedule: str, expected: float) -> None:
    seen: list[float] = []

    def half(model: nn.Module, training: Training) -> Steps:
        seen.append(training.rates)
        return Steps()

    local = LocalConfig(epochs=2, batch_size=10, lr=0.1, lr_schedule=schedule)
    local_update(job_of(tiny, 1), prototypes=tiny.prototypes, train=tiny.train, local=local, half=half)
    assert seen == [pytest.approx(expected)]


def test_batches_are_drawn_by_their_own_generator_and_a_lone_last_example_joins_the_first_batch() -> None:
    def drawn(elsewhere: int) -> list[list[int]]:
        torch.manual_seed(elsewhere)  # what else is drawn must not matter
        return [batch.tolist() for batch in mini_batches(torch.arange(9), 4, torch.Generator().manual_seed(1))]

    assert drawn(0) == drawn(5)
    assert [len(batch) for batch in drawn(0)] == [4, 5]
    (all_of_them,) = mini_batches(torch.arange(9), 8, torch.Generator().manual_seed(1))
    assert sorted(all_of_them.tolist()) == list(range(9))


def test_a_client_that_is_sent_no_weights_draws_them_by_its_seed(tiny: Tiny) -> None:
    client = tiny.federation.clients[0]
    first, again, other = (tiny.local(Job(client, 1, {}, seed)) for seed in (7, 7, 8))
    begun = tiny.local(Job(client, 1, init_state(tiny.prototypes[client.prototype], 7), 7))
    assert digest({"a": first.state}) == digest({"a": again.state}) == digest({"a": begun.state})
    assert digest({"a": first.state}) != digest({"a": other.state})


def test_examples_are_shuffled_by_the_stream_of_that_name(tiny: Tiny) -> None:
    """The order depends on nothing but the seed's stream "shuffle": another name would be another run."""
    client, seen = tiny.federation.clients[0], []

    def watching(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        seen.append(len(images))
        seen.extend(float(image.sum()) for image in images)
        return images

    tiny.local(Job(client, 1, tiny.server.models[client.prototype], 7), augment=watching)
    assert client.indices is not None
    order = mini_batches(client.indices, 8, torch_generator(derive(7, "shuffle")))
    expected: list[float] = []
    for batch in order:
        expected.append(len(batch))
        expected.extend(float(image.sum()) for image in tiny.train.inputs.raw[batch])
    assert seen == expected
