from __future__ import annotations

from contextlib import suppress

import torch

from feddf.config import RunConfig
from feddf.runtime.execution import of_clients, of_students
from feddf.runtime.threads import threads


def test_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    with suppress(RuntimeError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_a_student_that_learns_alone_gets_two_threads_whatever_the_machine() -> None:
    assert of_students(RunConfig(), 1).threads == 2
    assert of_students(RunConfig(), 2).threads == 1
    assert of_students(RunConfig(threads=3), 2).threads == 3
    assert of_clients(RunConfig(threads=3)).threads == 1
