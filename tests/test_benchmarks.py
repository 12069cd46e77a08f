"""The benchmarks run: their figures are worth nothing at this size, but a benchmark that has rotted is found here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddf.admit import admit
from feddf.config import load
from feddf.engines import Processes
from feddf.models.small import CNN
from feddf.rounds import jobs_for
from feddf.runs.build import build
from feddf.runtime.device import threads
from feddf.types import Failure, Prototype, Update
from soak import SOAK

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import bench
import floor
import hostile_before_after
import quiet

TINY: dict[str, dict[str, Any]] = {
    "local": {"repeats": 1, "samples": 64, "epochs": 1},
    "fusion": {"repeats": 1, "teachers": 2, "steps": 4, "timed": 1, "size": 128},
    "round": {"repeats": 1, "clients": 2, "samples": 128, "epochs": 1, "steps": 2, "size": 128},
    "crowd": {"repeats": 1, "clients": 2, "samples": 10, "steps": 2, "timed": 1, "size": 20},
    "small": {"repeats": 1, "clients": 4},
    "memory": {"counts": (1, 2)},
    "agree": {"repeats": 1, "rounds": 1, "steps": 2, "samples": 64},
}

pytestmark = pytest.mark.xdist_group("engines")


@pytest.fixture(scope="module")
def worker() -> Iterator[Processes]:
    with Processes(1) as opened:
        yield opened


@pytest.fixture
def tiny_bench(worker: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, and in the short form with a small model and one worker for all parts."""
    monkeypatch.setattr(bench, "can_compile", lambda: False)
    monkeypatch.setattr(bench, "FLOOR_STEPS", 1)
    if not SOAK:
        small = Prototype("resnet8", partial(CNN, bench.SHAPE, bench.CLASSES, width=2))
        monkeypatch.setitem(bench.RESNET, "resnet8", small)
        monkeypatch.setattr(bench, "Processes", lambda workers: nullcontext(worker))


@pytest.mark.usefixtures("tiny_bench")
@pytest.mark.parametrize("part", bench.PARTS)
def test_every_part_measures_something(part: str) -> None:
    with threads(torch.get_num_threads()):  # the plain loop takes all there are
        figures: dict[str, Any] = bench.PARTS[part](**TINY[part])
    assert figures
    table = bench.table({"parts": {part: figures}, "machine": bench.machine()})
    medians = [figure["median"] for figure in figures.values() if "median" in figure]
    assert all(map(isfinite, medians))  # the difference of two such short times may be negative
    assert table.count("\n| " + part) == len(medians)


def test_the_floor_has_the_convolutions_of_resnet8() -> None:
    seen: list[floor.Convolution] = []

    def note(module: nn.Conv2d, inputs: tuple[Tensor], outputs: Tensor) -> None:
        size, stride, kernel = inputs[0].shape[-1], module.stride[0], module.kernel_size[0]
        seen.append(floor.Convolution(None, module.in_channels, module.out_channels, size, stride, kernel))
        assert outputs.shape[-1] == size // stride

    model = bench.RESNET["resnet8"].build()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    model(torch.zeros(2, *bench.SHAPE))
    assert sorted(map(repr, seen)) == sorted(repr(replace(layer, source=None)) for layer in floor.LAYERS)
    for layer in floor.LAYERS[1:]:  # each reads what its source gives
        source = floor.LAYERS[layer.source or 0]
        assert (layer.channels, layer.size) == (source.out, source.size // source.stride)
    assert 6 * sum(layer.multiply_adds for layer in floor.LAYERS) == pytest.approx(bench.FLOP_PER_IMAGE, rel=0.01)


def test_stopping_rules_on_looks_that_are_known() -> None:
    import stopping

    def look(step: int, right: int) -> stopping.Look:
        return stopping.Look(step, torch.arange(100) < right, right / 100)

    looks = [look(0, 90), look(100, 40), look(200, 60), look(300, 61), look(400, 62), look(500, 63)]
    assert stopping.stopped(looks, stopping.Rule(100, 200)) == stopping.Stopped(500, 6, 0.9)
    assert stopping.stopped(looks[1:], stopping.Rule(100, 200)) == stopping.Stopped(500, 5, 0.63)
    assert stopping.stopped(looks, stopping.Rule(100, 200, paired=True)) == stopping.Stopped(400, 5, 0.9)
    assert stopping.stopped(looks, stopping.Rule(200, 200)).reads == 3
    better, than = torch.tensor([1, 1, 1, 0], dtype=torch.bool), torch.tensor([0, 0, 1, 1], dtype=torch.bool)
    assert stopping.p_value(better, than) == 0.5  # two gained and one lost: 1/2 of the eight ways


def test_stacked_clients_learn_as_those_in_turn() -> None:
    import batched

    models = [CNN((1, 8, 8), 10, width=4, norm="group") for _ in range(3)]
    images, labels = torch.randn(3, 5, 1, 8, 8), torch.randint(0, 10, (3, 5))
    assert batched.agree(models, images, labels) < 1e-5
    with batched.Operations() as counted:
        torch.ones(2).view(2, 1).add_(1)
    assert counted.count == 2  # the view is free


@pytest.mark.parametrize("peer", ["feddf", "flower", "pfl", "bare"])
def test_every_peer_has_a_program(peer: str) -> None:
    import peers

    program = peers.command(peer, Path("python"), {"workers": 2, **peers.CASES["pfl's own"]})
    assert any(Path(word).is_file() for word in program)
    compile(next(Path(word) for word in program if word.endswith(".py")).read_text(), peer, "exec")


def test_the_table_of_peers_says_who_could_not_be_installed() -> None:
    import peers

    found = peers.Measured([2.0, 4.0], [10.0], [100.0], [5.0])
    other = peers.Measured([6.0], [20.0], [200.0])
    text = peers.table({"large": {"feddf": found, "flower": other, "pfl": peers.Measured(failure="no such package")}})
    assert "| large | feddf | 3 (2 to 4) | 5 (5 to 5) | 10 (10 to 10) | 100 (100 to 100) |  |" in text
    assert "| large | flower / feddf | 2.00 × | | | | |" in text
    assert "| large | pfl | no such package | | | | |" in text


def test_hostile_clients_before_and_after() -> None:
    """Its settings are valid and its attacks pass the gate: what is measured is what an attacker can send."""
    for case in hostile_before_after.cases():
        load(str(hostile_before_after.DIGITS), case.words)
    words = ["method=feddf-plus", 'prototypes=[{model="cnn", width=2}]', "train_size=400", "local.epochs=1"]
    parts = build(load(str(hostile_before_after.DIGITS), words))
    for number, name in enumerate(hostile_before_after.attackers(parts)):
        client = next(one for one in parts.federation.clients if one.id == name)
        (job,) = jobs_for(parts.server, parts.federation, [client], parts.method.parts)
        own = parts.train(job)
        claimed, unknown = 10**9, replace(job, client=replace(client, indices=None))
        turned = partial(hostile_before_after.turned_rows, scale=5.0)
        for forge in (hostile_before_after.flipped, hostile_before_after.huge_means, turned):
            assert isinstance(admit(forge(own, job, number), {name: job}, parts.method.parts), Update)
        greedy = turned(own, job, number, n_examples=claimed)
        assert isinstance(admit(greedy, {name: job}, parts.method.parts), Failure)
        assert isinstance(admit(greedy, {name: unknown}, parts.method.parts), Update)


@pytest.mark.parametrize(
    ("looks", "code", "written"),
    [
        ([quiet.Quiet(9.0, 0.01)], 1, None),
        ([quiet.Quiet(0.0, 0.9)], 1, None),
        ([quiet.Quiet(0.0, 0.01), quiet.Quiet(9.0, 0.01)], 1, None),
        ([quiet.Quiet(0.0, 0.01)] * 2, 0, {"agree": {"of": 1}}),
    ],
    ids=["load", "spread", "noise meanwhile", "quiet"],
)
def test_noise_is_said_first_and_not_written(
    looks: list[quiet.Quiet],
    code: int,
    written: dict[str, Any] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "can_compile", lambda: False)
    monkeypatch.setitem(bench.PARTS, "agree", lambda: {"of": 1})
    first, coming = str(looks[0]), iter(looks)
    monkeypatch.setattr(quiet, "look", lambda: next(coming))
    try:
        bench.main(["agree"])
        ended = 0
    except SystemExit as exit:
        ended = int(str(exit.code))
    assert ended == code
    assert capsys.readouterr().out.splitlines()[0] == first
    kept = tmp_path / "results.json"
    assert (json.loads(kept.read_text())["parts"] if kept.exists() else None) == written


def test_a_look_at_the_machine_finds_its_load_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = iter([1.0] * 30 + [2.0] * 10)
    monkeypatch.setattr(quiet, "_running", lambda: 1.5)
    monkeypatch.setattr(quiet, "_seconds", lambda action: next(durations))
    with threads(1):
        found = quiet.look(size=2)
    assert (found.load, found.spread, found.enough) == (1.5, 1.0, False)


def test_the_time_to_a_target_is_that_of_the_first_round_that_reaches_it() -> None:
    import time_to_accuracy as timed

    runs = {
        "feddf, FedAvg, seed 0": {"rounds": [(5.0, 0.1), (6.0, 0.31), (7.0, 0.29), (8.0, 0.4)], "failure": ""},
        "feddf, FedAvg, seed 1": {"rounds": [(5.0, 0.3)], "failure": ""},
        "feddf, FedDF, seed 0": {"rounds": [], "failure": "no such package"},
    }
    assert [timed.reached(runs["feddf, FedAvg, seed 0"], target) for target in (0.1, 0.3, 0.5)] == [5.0, 6.0, None]
    text = timed.table({"targets": [0.3, 0.4], "runs": runs})
    assert "| | 30.0% | 40.0% | best within the budget | rounds |" in text
    assert "| feddf, FedAvg | **5.5** (6.0, 5.0) | (8.0, –) | 40.0%, 30.0% | 4, 1 |" in text
    assert "| feddf, FedDF | (–) | (–) | 0.0% | 0 |" in text
