"""How many torch threads a piece of work uses. A sum that is split over two threads rounds differently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

WORTH_TWO_THREADS = 100_000_000
"""Operations of a forward pass over a batch from which a second thread pays (docs/decisions/one-thread.md)."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on ``count`` torch threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(model: nn.Module, example: Tensor, batch: int) -> int:
    """Return on how many threads a lone model trains: two if a step has work for both, else one.

    Two threads wait for each other several times in each step. A small model gains nothing by the second one, and on a
    busy machine, where one of them is often without a core, both are many times slower than one alone. The number
    depends on the model and the batch and never on the machine: bytes must be the same everywhere.

    ``example`` is a batch of one.

    >>> threads_for(nn.Linear(2, 3), torch.zeros(1, 2), 128)
    1
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model.eval()(example)
    return 2 if counted.get_total_flops() * batch >= WORTH_TWO_THREADS else 1
