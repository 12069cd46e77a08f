"""The floor of the work: its training steps and nothing else. No model travels, is added up, looked at or kept."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from common import NETWORKS, Stopwatch, Work, normalized, report, shard
from torch import nn


@cache
def network(name: str) -> nn.Module:
    """Return the one network that this process trains for all clients."""
    return NETWORKS[name]().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def begin() -> None:
    """A worker has one thread."""
    torch.set_num_threads(1)


def train(job: tuple[Work, int]) -> None:
    """Take a client's steps."""
    work, client = job
    images, labels = shard(work, client)
    model = network(work.network).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=work.rate)
    for _ in range(work.epochs):
        for rows in torch.randperm(len(labels)).split(work.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(normalized(images[rows])), labels[rows]).backward()
            optimizer.step()


def main() -> None:
    work, random, watch = Work.given(), np.random.default_rng(0), Stopwatch()
    call: Callable[[], nn.Module] = NETWORKS[work.network]
    with multiprocessing.get_context("spawn").Pool(work.workers, begin) as pool:
        for _ in range(work.rounds):
            watch.begin()
            jobs = [(work, int(client)) for client in random.choice(work.clients, work.cohort, replace=False)]
            pool.map(train, jobs, chunksize=1)
            watch.end(work, dict)
    report(work, watch, call().state_dict())


if __name__ == "__main__":
    main()
