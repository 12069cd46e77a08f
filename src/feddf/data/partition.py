"""Who holds which examples. Every example goes to exactly one client, and the seed decides which."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddf.seeds import derive, numpy_generator

Shards = list[Tensor]


def split(n: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return (rest, held out): ``share`` of the n examples chosen at random, and all others."""
    order = torch.from_numpy(numpy_generator(seed).permutation(n))
    held_out = round(share * n)
    return order[held_out:].sort().values, order[:held_out].sort().values


def iid(labels: Tensor, clients: int, *, seed: int) -> Shards:
    """Deal the examples at random into shards whose sizes differ by one at most."""
    order = numpy_generator(seed).permutation(len(labels))
    return [_tensor(part) for part in np.array_split(order, clients)]


def dirichlet(labels: Tensor, clients: int, *, alpha: float, seed: int, n_classes: int, min_size: int = 2) -> Shards:
    """Give each client its own mix of classes (section 4.1 and appendix C.2 of the paper; Hsu et al. 2019).

    Client k draws q_k ~ Dir(α·M·p) over the M classes, p being the share of each class in the data (for
    balanced classes this is the usual symmetric Dir(α, ..., α)). The examples of class c are then dealt to
    the clients in proportion to q_kc, so all are used and none twice. α → ∞ gives every client the same
    mix; α → 0 leaves most clients with one class. Shards are of different sizes, hence the weights n_k.

    A shard smaller than ``min_size`` takes random examples from the largest one, so the scheme ends for
    any α and any number of clients.

    Deviation: the paper writes Dir(α·p) with p summing to one. Its figures (α = 100 looks i.i.d., α = 1 has
    several classes a client) and the released code match α *per class*, which is what is drawn here.

    >>> shards = dirichlet(torch.arange(100) % 10, 5, alpha=0.1, seed=0, n_classes=10)
    >>> torch.equal(torch.cat(shards).sort().values, torch.arange(100))
    True
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    if clients * min_size > len(labels):
        raise ValueError(f"{clients} clients of at least {min_size} examples need more than {len(labels)} examples")
    numbers = labels.numpy()
    prior = np.bincount(numbers, minlength=n_classes) / len(numbers)
    mixes = _dirichlet_mixes(prior, clients, alpha, derive(seed, "mixes"))
    random = numpy_generator(derive(seed, "deal"))
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
    for label in np.flatnonzero(prior):
        members = random.permutation(np.flatnonzero(numbers == label))
        for client, part in enumerate(_cut(members, mixes[:, label])):
            parts[client].append(part)
    shards = [np.concatenate(part) for part in parts]
    return [_tensor(shard) for shard in _fill_up(shards, min_size, random)]


def _dirichlet_mixes(prior: NDArray[np.float64], clients: int, alpha: float, seed: int) -> NDArray[np.float64]:
    """Return the K×M matrix of class mixes; a class that no data has gets no share."""
    present = prior > 0
    mixes = np.zeros((clients, len(prior)))
    concentration = alpha * len(prior) * prior[present]
    mixes[:, present] = numpy_generator(seed).dirichlet(concentration, size=clients)
    return mixes


def _cut(members: NDArray[np.int64], shares: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Cut ``members`` into pieces proportional to ``shares``: cumulative rounding, so that none is lost."""
    total = shares.sum()
    if not total > 0:  # every client's draw underflowed to zero (tiny α)
        shares, total = np.ones_like(shares), float(len(shares))
    ends = np.rint(np.cumsum(shares) / total * len(members)).astype(np.int64)
    return np.split(members, ends[:-1])


def _fill_up(shards: list[NDArray[np.int64]], min_size: int, random: np.random.Generator) -> list[NDArray[np.int64]]:
    """Move random examples from the largest shard to each that is too small."""
    shards = [random.permutation(shard) for shard in shards]
    by_size = [(-len(shard), client) for client, shard in enumerate(shards)]
    heapify(by_size)  # the largest first; those that are filled up never get there
    for poor in range(len(shards)):
        while (missing := min_size - len(shards[poor])) > 0:
            rich = by_size[0][1]
            taken = min(missing, max(1, (len(shards[rich]) - min_size) // 2))
            shards[poor] = np.concatenate([shards[poor], shards[rich][:taken]])
            shards[rich] = shards[rich][taken:]
            heapreplace(by_size, (-len(shards[rich]), rich))
    return shards


def _tensor(indices: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.sort(indices))
