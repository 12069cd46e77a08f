from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from conftest import Tiny
from feddf.config import RunConfig
from feddf.engines import in_process
from feddf.fusion.feddf import feddf
from feddf.models.resnet import ResNet
from feddf.models.small import MLP
from feddf.runtime.device import threads, threads_for
from feddf.runtime.execution import of_clients, of_students


def test_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    with suppress(RuntimeError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_a_student_that_learns_alone_gets_threads_of_its_own_whatever_the_machine() -> None:
    assert of_students(RunConfig(), 1, lambda: 2).threads == 2
    assert of_students(RunConfig(), 1, lambda: 1).threads == 1
    assert of_students(RunConfig(), 2, lambda: 2).threads == 1
    assert of_students(RunConfig(threads=3), 2, lambda: 2).threads == 3
    assert of_clients(RunConfig(threads=3)).threads == 1


def test_the_number_of_threads_follows_the_work_of_a_step() -> None:
    """ResNet-8 has 12.5 million multiplications and additions an image (25 million operations)."""
    image = torch.zeros(1, 3, 32, 32)
    resnet = ResNet((3, 32, 32), 10, depth=8)
    assert [threads_for(resnet, image, batch) for batch in (3, 5, 128)] == [1, 2, 2]
    assert threads_for(MLP((2,), 3, width=12), torch.zeros(1, 2), 128) == 1


def test_counting_the_work_draws_no_random_number(tiny: Tiny) -> None:
    lone = replace(tiny.resources, prototypes={"cnn": tiny.prototypes["cnn"]})
    before = torch.random.get_rng_state()
    feddf(lone, tiny.settings, in_process)
    assert torch.equal(before, torch.random.get_rng_state())
