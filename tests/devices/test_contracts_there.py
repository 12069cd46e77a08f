"""The promises of every fusion, model and source, and a whole run, on another device than the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Tiny, make_tiny, update_of
from contracts import test_every_fusion as fusions
from contracts import test_every_model as models
from contracts import test_every_source as sources
from feddf.client import _train, combine_halves
from feddf.config import DistillConfig, LocalConfig, parse, with_values
from feddf.config.keys import nested
from feddf.data.datasets import flip_crop
from feddf.data.unlabeled import sample_images
from feddf.engines import in_process
from feddf.fusion.distill import distill
from feddf.fusion.early_stopping import EarlyStopping
from feddf.fusion.ensemble import CachedTargets
from feddf.models.small import build_network
from feddf.rounds import run_round
from feddf.runs.build import build
from feddf.runs.methods import fit_prototypes, make_method
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.runtime.execution import Execution
from feddf.states import digest, init_state
from feddf.types import Examples, Inputs, Job, Prototype, Steps
from pretend_device import NAME, pretend_device
from runs import test_knobs as knobs

# Every fusion, with every choice that its settings allow


def federation(changes: dict[str, Any], device: str) -> Tiny:
    for norm in ("batch", "none"):  # some methods cannot handle BatchNorm, and say so
        tiny = make_tiny(clients=4, fraction=1.0, norm=norm)
        short = {"distill.steps": 4, "distill.eval_every": 2, "run.device": device, "run.threads": 1}
        settings = with_values(tiny.settings, {**changes, **short})
        try:
            method = make_method(tiny.resources, settings, in_process)
        except ValueError:
            continue
        prototypes = dict(fit_prototypes(tiny.resources, method.parts).prototypes)
        half = combine_halves([part.half for part in method.parts])
        local = partial(tiny.local, prototypes=prototypes, half=half, execution=Execution(device=device))
        return replace(
            tiny,
            prototypes=prototypes,
            local=local,
            parts=method.parts,
            resources=replace(tiny.resources, prototypes=prototypes),
            settings=settings,
        )
    raise AssertionError("the method works with neither kind of models")


@pytest.mark.parametrize("variant", fusions.VARIANTS)
def test_a_round_there_ends_with_the_bytes_of_the_cpu(variant: str) -> None:
    def end(device: str) -> str:
        tiny = federation(fusions.VARIANTS[variant], device)
        fuse = make_method(tiny.resources, tiny.settings, in_process).fuse
        closed = run_round(
            tiny.server, tiny.federation, engine=in_process, train=tiny.local, fuse=fuse, parts=tiny.parts
        )
        assert not closed.failures
        for update in closed.updates:
            sent = [update.state, *update.payload.values()]
            assert all(type(tensor) is Tensor for state in sent for tensor in dict(state).values())
        return fusions.whole(closed.server)

    with pretend_device() as transfers:
        there = end(NAME)
    assert transfers.to_device
    assert there == end("cpu")


TEACHING = [name for name, changes in fusions.VARIANTS.items() if changes["fusion.method"] == "feddf"]


@pytest.mark.parametrize("variant", [*TEACHING[:1], *(name for name in TEACHING if "ensemble.cache = False" in name)])
def test_unfit_updates_are_refused_there_too(variant: str) -> None:
    with pretend_device():
        tiny = federation(fusions.VARIANTS[variant], NAME)
        clients = tiny.federation.clients
        updates = [update_of(tiny.local(Job(c, 1, tiny.server.models[c.prototype], 7))) for c in clients]
        fusions.test_unfit_updates_are_refused_and_never_fused(tiny, updates)


# Every model


@pytest.fixture(params=sorted(models.MODELS.keys() - {"transformer"}))
def prototype(request: pytest.FixtureRequest) -> Prototype:
    shape, outputs = models.form_of(request.param)
    return Prototype(request.param, partial(build_network, models.MODELS[request.param], shape, outputs, {}))


@pytest.fixture
def examples(prototype: Prototype) -> Examples:
    shape, outputs = models.form_of(prototype.name)
    labels = torch.arange(4).view(4, *[1] * len(outputs.positions)).expand(4, *outputs.positions) % models.CLASSES
    return Examples(Inputs(models.inputs(4, shape), nn.Identity()), labels, outputs)


def one_step(model: nn.Module, examples: Examples) -> list[Tensor]:
    local = LocalConfig(epochs=1, batch_size=4, lr=0.01)
    return _train(model.train(), torch.arange(4), examples, 5, local, lambda step: 1.0, Steps(), None, Execution())


def without_dropout(model: nn.Module) -> nn.Module:
    """Dropout draws other numbers on every device."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
    return model


def test_every_model_learns_there_as_on_the_cpu(prototype: Prototype, examples: Examples) -> None:
    if prototype.name in models.TEXTS:
        pytest.skip("torch has kernels for attention and gated units for each device, whose last bits differ")

    def after(device: str) -> str:
        model = without_dropout(prototype.load(init_state(prototype, 0), device))
        one_step(model, examples)
        return digest({"m": {key: tensor.to("cpu") for key, tensor in model.state_dict().items()}})

    with pretend_device():
        there = after(NAME)
    assert there == after("cpu")


def test_every_model_passes_a_dry_run_of_a_step_on_meta(
    prototype: Prototype, examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device knows shapes and types and computes nothing: what mixes devices fails on it."""
    meta = torch.device("meta")
    model = prototype.load(init_state(prototype, 0), meta)
    (loss,) = one_step(model, examples)
    assert (loss.device, loss.shape) == (meta, ())
    assert model(examples.inputs.batch(torch.arange(2)).to(meta)).shape == (2, *examples.outputs.shape)
    monkeypatch.setattr(EarlyStopping, "enough", lambda *_: False)  # it reads, and there is nothing to read
    monkeypatch.setattr("feddf.fusion.early_stopping.on_cpu", dict)
    config = DistillConfig(steps=1, batch_size=4, early_stopping="none")
    targets = torch.full((4, models.CLASSES, *examples.outputs.positions), 1 / models.CLASSES)
    student = distill(model, CachedTargets(targets), examples.inputs, config, score=None, seed=0)
    assert student.state.keys() == model.state_dict().keys()


# Every source: the pool that it gives is read there


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources.folder.__wrapped__(tmp_path_factory)


@pytest.mark.parametrize("source", sorted(sources.POOLS))
def test_the_inputs_of_every_source_can_be_augmented_and_encoded_there(source: str, folder: Path) -> None:
    given = [one.replace("FOLDER", str(folder)) if isinstance(one, str) else one for one in sources.POOLS[source]]
    points = str(given[0]).startswith(("plane", "table:"))
    pool, _ = sources.pool_of(given, "toy" if points else f"{sources.__name__}:bands")
    rows = torch.arange(len(pool))

    def encoded(device: str) -> Tensor:
        raw = pool.raw[rows].to(device)
        images = flip_crop(raw, torch.Generator().manual_seed(1)) if raw.ndim == 4 else raw
        return pool.encode(images).to("cpu")

    with pretend_device():
        there = encoded(NAME)
    assert torch.equal(there, encoded("cpu"))


def test_a_generator_is_sampled_there() -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Unflatten(1, (3, 2, 2)))
    here = sample_images(generator, 4, (5,), 0)
    with pretend_device():
        there = sample_images(generator.to(NAME), 4, (5,), 0)
    assert there.device.type == "cpu"
    assert torch.equal(there, here)


# A whole run


def run(folder: Path, device: str, changes: dict[str, Any]) -> tuple[str, list[Any]]:
    parts = build(parse(nested(knobs.BASE, {**changes, "run.device": device})))
    opened = RunFolder.create(folder / device, parts.experiment)
    records = list(run_experiment(parts, opened))
    server, _ = opened.latest()
    assert server is not None
    kept = [{key: value for key, value in record.items() if key != "seconds"} for record in records]
    return digest(server.models), kept


WHOLE: dict[str, dict[str, Any]] = {
    "asked once": {
        "fusion.batchnorm": "recalibrate",
        "fusion.drop_worst": "paper",
        "fusion.momentum": 0.2,
        "ensemble.swag_samples": 1,
        "distill.early_stopping": "validation",
    },
    "asked again": {"ensemble.cache": False, "pool.augment": True, "local.binary": "error-feedback"},
    "with states": {"fusion.method": "feddf-plus", "fusion.parts": ["scaffold"], "rounds": 2},
}


@pytest.mark.parametrize("changes", WHOLE.values(), ids=WHOLE)
def test_a_whole_run_there_ends_with_the_bytes_and_the_records_of_the_cpu(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    short = {"rounds": 1, **changes, "distill.steps": 4, "run.log_clients": True}
    with pretend_device():
        there = run(tmp_path, NAME, short)
    assert there == run(tmp_path, "cpu", short)
    assert RunFolder.open(tmp_path / NAME).versions()["device"] == "pretend (in tests)"
