"""What an output means is one value: another kind than a softmax over classes goes through the whole of a round."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import log_softmax, softmax
from torch import Tensor, nn

from conftest import Tiny, stripes, update_of
from feddf.client import local_update
from feddf.config import LocalConfig, Settings, with_values
from feddf.engines import in_process
from feddf.evaluate import accuracy, accuracy_of, logits
from feddf.fusion.ensemble import avg_logits, avg_probabilities
from feddf.outputs import Outputs, classes, labels, values
from feddf.rounds import jobs_for
from feddf.runs.methods import make_method
from feddf.states import init_state
from feddf.types import Client, Examples, Prototype, Resources, ServerState, WeightedLogits

CHANNELS, POSITIONS = 2, (4, 4)


class Pixelwise(nn.Module):
    """Says of every fourth pixel whether it is bright and whether it is dark: n × 2 × 4 × 4 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, CHANNELS, 3, padding=1, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layer(images)
        return found


LABELS = labels(CHANNELS, POSITIONS)
VALUES = values(CHANNELS, POSITIONS)


def pixels(n: int, seed: int, outputs: Outputs) -> Examples:
    inputs = stripes(n, seed).inputs
    shown = inputs.batch(torch.arange(n))[:, :, ::2, ::2]
    wanted = [shown > 0, shown <= 0] if outputs is LABELS else [shown, -shown]
    return Examples(inputs, torch.cat(wanted, dim=1).float(), outputs)


def refuse(*arguments: Any, **options: Any) -> Tensor:
    raise AssertionError("a softmax over classes was assumed")


@pytest.fixture
def no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in [(Tensor, "softmax"), (Tensor, "log_softmax"), (Tensor, "argmax"), (F, "cross_entropy")]:
        monkeypatch.setattr(place, name, refuse)
    for name in ("softmax", "log_softmax", "kl_div"):
        monkeypatch.setattr(F, name, refuse)


CHANGES: list[dict[str, Any]] = [
    {},
    {"ensemble.combine": "probabilities"},
    {"ensemble.cache": False},
    {"distill.early_stopping": "held-out-loss"},
    {"distill.temperature": 2.0},
    {"fusion.method": "fedavg"},
    {"fusion.aggregation": "median", "fusion.momentum": 0.2},
    {"ensemble.weights": "validation"},
]


@pytest.mark.usefixtures("no_softmax")
@pytest.mark.parametrize("outputs", [LABELS, VALUES], ids=lambda outputs: outputs.kind)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_round_with_labels_or_values_at_many_positions(tiny: Tiny, changes: dict[str, Any], outputs: Outputs) -> None:
    if outputs.has_units and "distill.temperature" in changes:
        pytest.skip("values have no temperature: tests/contracts/test_every_output.py")
    prototypes = {"pixelwise": Prototype("pixelwise", Pixelwise)}
    server = ServerState(0, {"pixelwise": init_state(prototypes["pixelwise"], 0)})
    train, validation, pool = pixels(60, 1, outputs), pixels(30, 4, outputs), stripes(48, 3).inputs
    settings: Settings = with_values(tiny.settings, changes)
    resources = Resources(prototypes, pool, validation, outputs=outputs)
    method = make_method(resources, settings, in_process)
    learn = partial(
        local_update, prototypes=prototypes, train=train, local=LocalConfig(epochs=20, batch_size=8, lr=0.5)
    )
    clients = [Client(f"c{k}", "pixelwise", torch.arange(k, 60, 6)) for k in range(6)]
    updates = [update_of(learn(job)) for job in jobs_for(server, tiny.federation, clients)]
    fused = method.fuse(server, updates, 1)
    before, after = (
        accuracy(prototypes["pixelwise"].load(state), validation)
        for state in (server.models["pixelwise"], fused.server.models["pixelwise"])
    )
    assert after > max(before, 0.8)
    if fused.ensemble is not None:
        answers = [logits(prototypes["pixelwise"].load(update.state), validation.inputs) for update in updates]
        target = fused.ensemble.combine(map(WeightedLogits, answers), 1.0, fused.ensemble.outputs)
        assert target.shape == (30, CHANNELS, *POSITIONS)
        assert accuracy_of(outputs.raw(target), validation.labels, outputs) > 0.8


def test_classes_are_a_softmax_over_channels_at_every_position() -> None:
    """Against SciPy, with and without positions."""
    for shape in [(5, 3), (5, 3, 2, 4)]:
        z = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        other, outputs = z.flip(0), classes(3, shape[2:], score="accuracy")
        p, q = softmax(z.numpy(), axis=1), softmax(other.numpy(), axis=1)
        np.testing.assert_allclose(outputs.probabilities(z).numpy(), p, rtol=1e-12)
        votes = [WeightedLogits(z), WeightedLogits(other)]
        mean = softmax((z.numpy() + other.numpy()) / 2, axis=1)
        np.testing.assert_allclose(avg_logits(votes, 1.0, outputs).numpy(), mean, rtol=1e-5)
        np.testing.assert_allclose(avg_probabilities(votes, 1.0, outputs).numpy(), (p + q) / 2, rtol=1e-5)
        answers = z.numel() / 3
        divergence = (q * (np.log(q) - log_softmax(z.numpy() / 2, axis=1))).sum() * 4 / answers
        np.testing.assert_allclose(float(outputs.distance(torch.from_numpy(q), z, 2.0)), divergence, rtol=1e-9)
        right = torch.from_numpy(p.argmax(axis=1))
        assert outputs.score(z, right) == 1
        assert outputs.score(z, (right + 1) % 3) == 0
        wanted = -np.take_along_axis(np.log(p), right.numpy()[:, None], axis=1).mean()
        np.testing.assert_allclose(float(outputs.loss(z, right)), wanted, rtol=1e-9)
