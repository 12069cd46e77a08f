"""The benchmarks run: their figures are worth nothing at this size, but a benchmark that has rotted is found here."""

from __future__ import annotations

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

from feddf.engines import Processes
from feddf.models.cnn import CNN
from feddf.runtime.threads import threads
from feddf.types import Prototype
from soak import SOAK

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import bench
import floor

TINY: dict[str, dict[str, Any]] = {
    "local": {"repeats": 1, "samples": 64, "epochs": 1},
    "fusion": {"repeats": 1, "teachers": 2, "steps": 4, "timed": 1, "size": 128},
    "round": {"repeats": 1, "clients": 2, "samples": 128, "epochs": 1, "steps": 2, "size": 128},
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
