"""Every fusion with every kind of output: a round goes through and is scored, or one line says what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from test_every_fusion import VARIANTS
from torch import Tensor

from conftest import make_tiny, stripes, update_of
from feddf.client import combine_halves, local_update
from feddf.config import ConfigError, Settings, with_values
from feddf.config.names import MODELS
from feddf.data.datasets import plain
from feddf.engines import in_process
from feddf.evaluate import accuracy, logits
from feddf.models.small import build_network
from feddf.outputs import Outputs, classes, labels, values
from feddf.rounds import Federation, jobs_for, run_round
from feddf.runs import methods
from feddf.runs.methods import build_method
from feddf.runs.run import Recorder
from feddf.states import init_state
from feddf.types import Client, Examples, Inputs, Method, Prototype, Resources, ServerState, State

FURTHER: dict[str, dict[str, Any]] = {
    "robust defense": {"fusion.defense": "robust"},
    "trust of a mixture": {"fusion.trust": "mixture"},
    "trust without labels": {"fusion.trust": "expguard"},
    "a guard": {"fusion.guard": 0.01},
    "an adjusted loss": {"local.logit_adjustment": 1.0},
    "an ensemble's memory": {"ensemble.ema": 0.5},
}
CHANGES = {**VARIANTS, **FURTHER}


@dataclass(frozen=True)
class Kind:
    outputs: Outputs
    models: dict[str, dict[str, Any]]
    make: Callable[[int, int], tuple[Inputs, Tensor]]
    known: tuple[tuple[int, ...], ...] = ()

    def examples(self, n: int, seed: int) -> Examples:
        return Examples(*self.make(n, seed), self.outputs)


def bands(n: int, seed: int) -> tuple[Inputs, Tensor]:
    """Masks: 0 but for the bright band of each image, which is 1 or 2 by its place."""
    found = stripes(n, seed)
    masks = torch.zeros(n, 8, 8, dtype=torch.int64)
    for row, label in enumerate(found.labels):
        masks[row, 2 * label : 2 * label + 3] = 1 + label % 2
    return found.inputs, masks


def several(n: int, seed: int) -> tuple[Inputs, Tensor]:
    found = stripes(n, seed)
    return found.inputs, torch.stack([found.labels == 0, found.labels < 2, found.labels > 0], dim=1).float()


def numbers(count: int, n: int, seed: int) -> tuple[Inputs, Tensor]:
    """Values in units far from those in which networks begin."""
    found = stripes(n, seed)
    return found.inputs, torch.stack([500 + 100.0 * found.labels, 3 - found.labels], dim=1)[:, :count].float()


def tokens(n: int, seed: int) -> tuple[Inputs, Tensor]:
    """Rows in which each token follows from the one before it, of different lengths."""
    rows = torch.randint(1, 5, (n, 9), generator=torch.Generator().manual_seed(seed))
    for place in range(1, 9):
        rows[:, place] = rows[:, place - 1] % 4 + 1
    ended = torch.arange(9) > 4 + torch.arange(n)[:, None] % 4
    rows = rows.masked_fill(ended, 0)
    return Inputs(rows[:, :-1], plain), rows[:, 1:].where(rows[:, 1:] > 0, -100)


IMAGES: dict[str, dict[str, Any]] = {"cnn": {"width": 4}, "mlp": {"width": 16}}
MASKS: dict[str, dict[str, Any]] = {"dilated-cnn": {"width": 4, "depth": 2}, "unet": {"width": 4, "depth": 1}}
TEXTS: dict[str, dict[str, Any]] = {"gpt": {"width": 8, "depth": 1, "heads": 2}, "gru": {"width": 8}}
KINDS = {
    "masks": Kind(classes(3, (8, 8), background=0), MASKS, bands),
    "sites": Kind(classes(3, (8, 8), background=0), MASKS, bands, ((0, 1), (0, 2))),
    "tokens": Kind(classes(5, (8,), score="1/perplexity"), TEXTS, tokens),
    "labels": Kind(labels(3), IMAGES, several),
    "values": Kind(values(2), IMAGES, partial(numbers, 2)),
    "variances": Kind(values(1, variance=True), IMAGES, partial(numbers, 1)),
}


@dataclass(frozen=True)
class Made:
    kind: Kind
    method: Method
    prototypes: dict[str, Prototype]
    federation: Federation
    server: ServerState
    train: Any
    resources: Resources


def make(kind: Kind, changes: dict[str, Any], n: int = 24) -> Made:
    """Put a federation of four clients and two architectures together, as an experiment is."""
    settings: Settings = with_values(make_tiny().settings, {"distill.steps": 2, "distill.eval_every": 1, **changes})
    train, validation, pool = kind.examples(n, 1), kind.examples(n // 2, 4), kind.examples(n, 3).inputs
    shape = tuple(train.inputs.batch(torch.arange(1)).shape[1:])
    built = {name: partial(build_network, MODELS[name], shape, kind.outputs, how) for name, how in kind.models.items()}
    prototypes = {name: Prototype(name, build) for name, build in built.items()}
    server = ServerState(0, {name: init_state(prototype, 0) for name, prototype in prototypes.items()})
    masks = [torch.zeros(kind.outputs.channels or 0, dtype=torch.bool) for _ in kind.known]
    for mask, known in zip(masks, kind.known, strict=True):
        mask[list(known)] = True
    known = {f"c{k}": masks[k % len(masks)] for k in range(4)} if masks else {}
    resources = Resources(prototypes, pool, validation, outputs=kind.outputs)
    if kind.known:
        settings = with_values(settings, {"fusion.parts": (*settings.fusion.parts, "known-channels")})
    method, fitted = build_method(resources, settings, in_process, server.models)
    half = combine_halves([part.half for part in method.parts])
    names = sorted(prototypes)
    clients = [Client(f"c{k}", names[k // 2], torch.arange(k, n, 4), known.get(f"c{k}")) for k in range(4)]
    local = partial(local_update, prototypes=fitted, train=train, local=settings.local, half=half)
    config = settings.clients.model_copy(update={"total": 4, "fraction": 1.0})
    federation = Federation(clients, config, 0, method.rounds_per_cohort)
    return Made(kind, method, dict(fitted), federation, server, local, replace(resources, prototypes=fitted))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("changes", CHANGES)
def test_a_round_goes_through_or_one_line_says_what_does_not_fit(name: str, changes: str) -> None:
    kind = KINDS[name]
    try:
        made = make(kind, CHANGES[changes])
    except ConfigError as error:
        said = str(error)
        assert "\n" not in said
        assert said.partition(" = ")[0] in {*CHANGES[changes], "fusion.method", "local.logit_adjustment"}
        return
    closed = run_round(
        made.server, made.federation, engine=in_process, train=made.train, fuse=made.method.fuse,
        parts=made.method.parts,
    )  # fmt: skip
    test, run = kind.examples(24, 2), make_tiny().settings.run
    record = Recorder(in_process, made.prototypes, test, test, run).record(closed)
    assert record["score"] == kind.outputs.metric
    assert not record["dropped"]
    for prototype, state in closed.server.models.items():
        outputs = logits(made.prototypes[prototype].load(state), test.inputs)
        assert bool(outputs.isfinite().all())
        assert kind.outputs.measure(outputs, test.labels) == record["measures"][prototype]


EXPECTED = {
    "class counts": ("ensemble.weights", "class-counts", ["masks", "sites", "tokens", "labels", "values", "variances"]),
    "certainty": ("ensemble.weights", "certainty", ["labels", "values", "variances"]),
    "temperature": ("distill.temperature", 2.0, ["values", "variances"]),
    "mixture": ("fusion.trust", "mixture", ["sites", "values"]),
    "cronus": ("ensemble.combine", "cronus", ["sites"]),
}


@pytest.mark.parametrize(("key", "value", "refused"), EXPECTED.values(), ids=EXPECTED)
def test_what_has_no_meaning_is_refused_and_all_else_is_not(key: str, value: Any, refused: list[str]) -> None:
    for name, kind in KINDS.items():
        if name in refused:
            with pytest.raises(ConfigError, match=key if name != "values" or key != "fusion.trust" else "likelihood"):
                make(kind, {key: value})
        else:
            make(kind, {key: value})


@pytest.mark.parametrize("name", KINDS)
def test_clients_learn_and_students_learn_from_them(name: str) -> None:
    """With enough steps, a student is better than a model that guesses, whatever it answers with."""
    kind = KINDS[name]
    changes = {"local.epochs": 40, "local.lr": 0.01, "local.optimizer": "adam", "distill.steps": 60}
    made = make(kind, {**changes, "distill.lr": 0.01, "distill.eval_every": 60, "distill.init": "previous"}, 48)
    parts = made.method.parts
    closed = run_round(
        made.server, made.federation, engine=in_process, train=made.train, fuse=made.method.fuse, parts=parts
    )
    test = kind.examples(24, 2)
    for prototype, state in closed.server.models.items():
        before, after = (
            accuracy(made.prototypes[prototype].load(one), test) for one in (made.server.models[prototype], state)
        )
        assert after > max(before, 0.3), (prototype, before, after)


@pytest.mark.parametrize("name", ["masks", "sites", "tokens"])
def test_answers_that_are_too_large_for_memory_are_asked_for_each_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def models() -> dict[str, State]:
        made = make(KINDS[name], {})
        updates = [
            update_of(made.train(job)) for job in jobs_for(made.server, made.federation, made.federation.clients)
        ]
        return dict(made.method.fuse(made.server, updates, 1).server.models)

    cached = models()
    monkeypatch.setattr(methods, "MOST_ANSWERS", 100)
    for prototype, state in models().items():
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, cached[prototype][key], atol=1e-4, rtol=1e-3)
    with pytest.raises(ConfigError, match="too large to be kept for the whole pool"):
        make(KINDS["masks"], {"ensemble.ema": 0.5})
