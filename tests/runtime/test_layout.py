"""Convolutions with their channels last: the same values as in the plain order, and a heap that stays whole.

All of it runs in child processes: what it is about ends a process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from feddf import Prototype, init_state
from feddf.models.resnet import resnet8
from feddf.runtime.execution import SAFE_CHANNELS, put_channels_last

CHECKED_HEAP = Path("/lib/x86_64-linux-gnu/libc_malloc_debug.so.0")
"""glibc's malloc that notices at ``free`` what was written beyond a block."""

EVERY_WIDTH = """
import itertools, torch
from torch import nn
from feddf.runtime.execution import SAFE_CHANNELS, put_channels_last

def computed(layer, inputs, gradient):
    given = inputs.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    outputs = layer(given)
    outputs.backward(gradient(outputs))
    return outputs.detach(), given.grad, layer.weight.grad

torch.set_num_threads(1)
torch.manual_seed(0)
reordered = 0
for width in range(1, 65):
    shapes = {(width, width, 1), (width, 2 * width, 1), (3, width, 1), (width, width, width)}
    for (inputs, outputs, groups), kernel, stride in itertools.product(sorted(shapes), (1, 3), (1, 2)):
        side, batch = (5, 8, 7, 14)[width % 4], (1, 2, 3, 8)[width // 4 % 4]
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        images = torch.randn(batch, inputs, side, side)
        drawn = []
        def gradient(like):
            drawn.append(torch.randn(like.shape)) if not drawn else None
            return torch.empty_like(like).copy_(drawn[0])
        expected = computed(layer, images, gradient)
        put_channels_last(layer)
        last = kernel > 1 or stride == 1 or inputs // groups >= SAFE_CHANNELS  # a 1×1 kernel has both orders at once
        reordered += last
        found = computed(layer, images.contiguous(memory_format=torch.channels_last) if last else images, gradient)
        for one, other in zip(expected, found):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-4), (inputs, outputs, groups, kernel, stride)
print(reordered)
"""

NARROW = """
import torch
from functools import partial
from feddf import Prototype, init_state
from feddf.models.resnet import resnet8

torch.set_num_threads(1)
for width, batch in ((2, 3), (4, 8), (6, 3), (8, 2)):
    prototype = Prototype("narrow", partial(resnet8, (1, 14, 14), 10, width=width))
    model = prototype.load(init_state(prototype, 0)).train()
    for _ in range(20):
        model(torch.randn(batch, 1, 14, 14)).sum().backward()
print("whole")
"""


def run(program: str, isa: str) -> str:
    checked = {"LD_PRELOAD": str(CHECKED_HEAP), "MALLOC_CHECK_": "3"} if CHECKED_HEAP.exists() else {}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **checked, "ONEDNN_MAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@pytest.mark.parametrize("isa", ["AVX2", "DEFAULT"])
def test_outputs_and_gradients_of_every_width_are_those_of_the_plain_order(isa: str) -> None:
    assert int(run(EVERY_WIDTH, isa)) > 700


@pytest.mark.parametrize("isa", ["AVX2", "DEFAULT"])
def test_narrow_networks_corrupt_no_memory(isa: str) -> None:
    assert run(NARROW, isa) == "whole\n"


def is_last(model: nn.Module) -> bool:
    weights = [weight for weight in model.parameters() if weight.ndim == 4 and min(weight.shape[1:]) > 1]
    return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


@pytest.mark.parametrize("width", [4, SAFE_CHANNELS, 16])
def test_a_network_is_reordered_if_all_of_its_convolutions_are_safe(width: int) -> None:
    prototype = Prototype("resnet", lambda: resnet8((1, 14, 14), 10, width=width))
    assert is_last(prototype.load(init_state(prototype, 0))) == (width >= SAFE_CHANNELS)


def test_weights_of_a_users_own_convolution_stay_as_they_are() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known, self.kernel = nn.Conv2d(3, 3, 3), nn.Parameter(torch.zeros(4, 3, 3, 3))

    model = Own()
    put_channels_last(model)
    assert model.kernel.is_contiguous()
    assert model.known.weight.is_contiguous()
