"""DP-SGD: the clipped sum against a loop and Opacus, the noise against its deviation, samples against their rate."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from sources import Counted, half
from torch import Tensor, nn

from conftest import stripes
from feddf.client import combine_halves, local_update
from feddf.config import LocalConfig
from feddf.config.privacy import PrivacyConfig
from feddf.models.small import CNN, MLP
from feddf.outputs import classes
from feddf.privacy.noise import Noise, Source
from feddf.privacy.records import CHUNK, clipped_sum, dp_sgd, refuse_batchnorm
from feddf.states import init_state
from feddf.types import Client, Job, Prototype, Steps, Training

LOSS = classes(3).loss
MODELS = {"mlp": lambda: MLP((1, 8, 8), 3, width=8), "cnn": lambda: CNN((1, 8, 8), 3, width=4, norm="group")}


def batch(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    examples = stripes(n, seed)
    return examples.inputs.batch(torch.arange(n)), examples.labels


def by_hand(model: nn.Module, inputs: Tensor, labels: Tensor, clip: float) -> np.ndarray:
    """Σ_i g_i min(1, S/‖g_i‖), one record after the other."""
    total = 0.0
    for one, label in zip(inputs, labels, strict=True):
        model.zero_grad()
        LOSS(model(one[None]), label[None]).backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()]).double().numpy()
        total = total + gradient * min(1, clip / np.linalg.norm(gradient))
    model.zero_grad()
    return np.asarray(total)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip", [0.01, 1.0, 1e6])
def test_the_sum_of_clipped_gradients_is_that_of_a_loop(name: str, clip: float) -> None:
    torch.manual_seed(0)
    model, (inputs, labels) = MODELS[name](), batch(CHUNK + 9)
    found = torch.cat([one.flatten() for one in clipped_sum(model, LOSS, inputs, labels, clip)])
    np.testing.assert_allclose(
        found.numpy(), by_hand(model, inputs, labels, clip), rtol=2e-3, atol=1e-5 * min(clip, 10)
    )


@pytest.mark.parametrize("name", MODELS)
def test_opacus_has_the_same_gradients(name: str) -> None:
    grad_sample = pytest.importorskip("opacus.grad_sample")
    model, (inputs, labels) = MODELS[name](), batch(7)
    ours = [clipped_sum(model, LOSS, *one, 1e9) for one in zip(inputs.split(1), labels.split(1), strict=True)]
    theirs = grad_sample.GradSampleModule(model)
    LOSS(theirs(inputs), labels).backward()
    for k, weight in enumerate(model.parameters()):
        torch.testing.assert_close(torch.stack([one[k] for one in ours]), weight.grad_sample, rtol=1e-3, atol=1e-5)


def test_one_record_moves_the_sum_by_the_clip_at_the_most_whatever_it_holds() -> None:
    torch.manual_seed(0)
    model, (inputs, labels) = MODELS["mlp"](), batch(20)
    for value in (1.0, 1e6, float("inf"), float("nan")):
        strange = torch.cat([inputs, torch.full_like(inputs[:1], value)])
        with_it = clipped_sum(model, LOSS, strange, torch.cat([labels, labels[:1]]), 0.5)
        without = clipped_sum(model, LOSS, inputs, labels, 0.5)
        moved = torch.cat([(a - b).flatten() for a, b in zip(with_it, without, strict=True)]).norm()
        assert float(moved) <= 0.5 * (1 + 1e-4)


def begun(
    model: nn.Module, *, noise: float = 0.0, clip: float = 1.0, sampling: float = 1.0, source: Source = os.urandom
) -> Steps:
    job = Job(Client("a", "m", torch.arange(40)), 1, {}, 3)
    training = Training(job, Prototype("m", lambda: model), torch.zeros(40), classes(3), "sgd", 1, 1.0)
    config = PrivacyConfig(clip=clip, sampling=sampling)
    return dp_sgd(model, training, noise=Noise(noise, source), config=config, batch_size=10)


def stepped(model: nn.Module, steps: Steps, n: int = 40) -> Tensor:
    inputs, labels = batch(n)
    assert steps.loss is not None
    assert steps.correct is not None
    assert steps.batches is not None
    next(steps.batches(torch.arange(n)))
    steps.loss(model(inputs), labels, inputs).backward()
    steps.correct()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_without_noise_and_clipping_it_is_the_gradient_of_the_sum() -> None:
    torch.manual_seed(0)
    model = MODELS["mlp"]()
    private = stepped(model, begun(model, clip=1e9))
    inputs, labels = batch(40)
    model.zero_grad()
    LOSS(model(inputs), labels).backward()
    plain = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    torch.testing.assert_close(private, plain * 40 / 10, rtol=1e-3, atol=1e-5)


def test_the_noise_has_the_deviation_that_the_accountant_was_told() -> None:
    torch.manual_seed(0)
    model = MODELS["cnn"]()
    exact = stepped(model, begun(model, clip=0.7))
    drawn = [stepped(model, begun(model, clip=0.7, noise=3.0, source=Counted(str(k)))) - exact for k in range(4)]
    found = float(torch.stack(drawn).std())
    assert found == pytest.approx(3.0 * 0.7 / 10, rel=0.05)


def test_every_record_is_in_a_sample_with_its_probability_and_independently() -> None:
    steps = begun(MODELS["mlp"](), sampling=0.1, source=Counted())
    assert steps.batches is not None
    drawn = [chosen for _ in range(60) for chosen in steps.batches(torch.arange(100, 200))]
    assert len(drawn) == 600
    counts = Counter(int(index) for chosen in drawn for index in chosen)
    assert set(counts) == set(range(100, 200))
    assert sum(counts.values()) / (600 * 100) == pytest.approx(0.1, abs=0.005)
    sizes = np.array([len(chosen) for chosen in drawn])
    assert sizes.var() == pytest.approx(100 * 0.1 * 0.9, rel=0.2)  # a binomial, not a fixed size


def test_a_sample_without_records_is_noise_alone() -> None:
    model = MODELS["mlp"]()
    steps = begun(model, noise=0.0, sampling=0.4, source=half)  # every uniform number is 1/2: nobody is drawn
    assert steps.batches is not None
    assert len(next(steps.batches(torch.arange(40)))) == 1
    assert steps.loss is not None
    assert steps.correct is not None
    inputs, labels = batch(1)
    steps.loss(model(inputs), labels, inputs)
    steps.correct()
    assert all(not weight.grad.any() for weight in model.parameters())


def reply(source: Source, epochs: int = 2, n: int = 40) -> Tensor:
    prototype = Prototype("m", MODELS["mlp"])
    job = Job(Client("a", "m", torch.arange(n)), 1, init_state(prototype, 0), 3)
    private = partial(dp_sgd, noise=Noise(0.5, source), config=PrivacyConfig(sampling=0.25), batch_size=10)
    local = LocalConfig(epochs=epochs, batch_size=8, lr=0.05)
    sent = local_update(
        job, prototypes={"m": prototype}, train=stripes(120, 1), local=local, half=combine_halves([private])
    )
    return torch.cat([value.flatten() for value in sent.state.values()])


def test_a_client_trains_with_it_and_only_the_source_decides() -> None:
    assert torch.equal(reply(Counted()), reply(Counted()))
    assert not torch.equal(reply(os.urandom), reply(os.urandom))


class Counting(nn.Module):
    """A network that counts what it sees, in a buffer that would be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["mlp"]()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + len(inputs)
        return self.inner(inputs)


def test_buffers_are_sent_as_they_were_received() -> None:
    prototype = Prototype("m", Counting)
    job = Job(Client("a", "m", torch.arange(40)), 1, init_state(prototype, 0), 3)
    private = partial(dp_sgd, noise=Noise(0.5), config=PrivacyConfig(sampling=0.25), batch_size=10)
    local = LocalConfig(epochs=1, lr=0.05)
    sent = local_update(job, prototypes={"m": prototype}, train=stripes(120, 1), local=local, half=private)
    assert float(sent.state["seen"]) == 0.0


def test_a_client_without_records_sends_noise_like_any_other() -> None:
    assert torch.isfinite(reply(os.urandom, n=0)).all()
    assert not torch.equal(reply(os.urandom, n=0), reply(os.urandom, n=0))


def test_batchnorm_is_refused() -> None:
    with pytest.raises(ValueError, match="norm = 'group'"):
        refuse_batchnorm(CNN((1, 8, 8), 3, width=4, norm="batch"))
    refuse_batchnorm(CNN((1, 8, 8), 3, width=4, norm="group"))


def test_only_one_half_may_make_batches() -> None:
    model = MODELS["mlp"]()
    job = Job(Client("a", "m", torch.arange(4)), 1, {}, 3)
    training = Training(job, Prototype("m", lambda: model), torch.zeros(4), classes(3), "sgd", 1, 1.0)
    two = combine_halves([lambda *given: Steps(batches=lambda indices: iter(()))] * 2)
    with pytest.raises(ValueError, match="only one can"):
        two(model, training)
