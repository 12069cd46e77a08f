"""Who holds which examples. Every example goes to exactly one client, and the seed decides which.

A scheme is a function ``(labels, clients, partition, *, n_classes, seed)`` that returns each client's indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddf.config.sections import PartitionConfig
from feddf.seeds import derive, numpy_generator

Indices = NDArray[np.int64]
Shards = list[Tensor]


def split(n: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return (rest, held out): ``share`` of the n examples chosen at random, and all others.

    Args:
        n: the number of examples.
        share: the share to hold out, between 0 and 1.
        seed: decides which examples are held out.
    """
    order = torch.from_numpy(numpy_generator(seed).permutation(n))
    held_out = round(share * n)
    return order[held_out:].sort().values, order[:held_out].sort().values


def iid(labels: Tensor, clients: int, partition: PartitionConfig, *, n_classes: int, seed: int) -> Shards:
    """Deal the examples at random into shards whose sizes differ by one at most.

    Args:
        labels: the class of each example.
        clients: how many shards to make.
        partition: not used: this scheme has no options.
        n_classes: M, the number of classes. Not used.
        seed: decides all random choices.
    """
    order = numpy_generator(seed).permutation(len(labels))
    return [_tensor(part) for part in np.array_split(order, clients)]


def dirichlet(labels: Tensor, clients: int, partition: PartitionConfig, *, n_classes: int, seed: int) -> Shards:
    """Give each client its own mix of classes (section 4.1 and appendix C.2 of the paper; Hsu et al. 2019).

    Client k draws q_k ~ Dir(α·M·p) over the M classes, p being the share of each class in the data (for
    balanced classes this is the usual symmetric Dir(α, ..., α)). The examples of class c are then dealt to
    the clients in proportion to q_kc, so all are used and none twice. α → ∞ gives every client the same
    mix; α → 0 leaves most clients with one class. Shards are of different sizes, hence the weights n_k.

    A shard smaller than ``partition.min_size`` takes random examples from the largest one, so the scheme ends for
    any α and any number of clients.

    Deviation: the paper writes Dir(α·p) with p summing to one. Its figures (α = 100 looks i.i.d., α = 1 has
    several classes a client) and the released code match α *per class*, which is what is drawn here.

    Args:
        labels: the class of each example.
        clients: how many shards to make.
        partition: the section ``[partition]``: α and ``min_size``.
        n_classes: M, the number of classes.
        seed: decides all random choices.

    >>> shards = dirichlet(torch.arange(100) % 10, 5, PartitionConfig(alpha=0.1), n_classes=10, seed=0)
    >>> torch.equal(torch.cat(shards).sort().values, torch.arange(100))
    True
    """
    n, least, needed = len(labels), partition.min_size, clients * partition.min_size
    if needed > n:
        raise ValueError(f"{clients} clients of at least {least} examples need {needed}, and there are {n}")
    numbers = labels.numpy()
    prior = np.bincount(numbers, minlength=n_classes) / n
    present = np.flatnonzero(prior)
    concentration = partition.alpha * n_classes * prior[present]
    mixes = numpy_generator(derive(seed, "mixes")).dirichlet(concentration, size=clients)
    random = numpy_generator(derive(seed, "deal"))
    members = [random.permutation(np.flatnonzero(numbers == label)) for label in present]
    by_class = [_cut(those, mix) for those, mix in zip(members, mixes.T, strict=True)]
    shards = [np.concatenate(parts) for parts in zip(*by_class, strict=True)]
    return [_tensor(shard) for shard in _fill_up(shards, least, random)]


def dirichlet_equal(
    labels: Tensor, clients: int, partition: PartitionConfig, *, n_classes: int, seed: int, group: int = 10
) -> Shards:
    """Deal as the authors' released code does: shards of (almost) equal size, and less skew than α says.

    The examples are dealt to groups of ten clients at random. Within a group each class is dealt by a fresh
    Dir(α, ..., α) over the clients; a client that has its fair share already gets no more of the classes that follow;
    and all is drawn again until the smallest shard has half the mean size. At last all shards are laid end to end and
    cut into equal slices, which mixes neighbors and softens α.
    """
    random = numpy_generator(seed)
    order = random.permutation(len(labels))
    groups = [min(group, clients - first) for first in range(0, clients, group)]
    ends = np.rint(np.cumsum(groups) / clients * len(order)).astype(np.int64)
    numbers = labels.numpy()
    laid_out: list[Indices] = []
    for members, size in zip(np.split(order, ends[:-1]), groups, strict=True):
        laid_out += _dealt_fairly(members, numbers[members], size, partition.alpha, n_classes, random)
    return [_tensor(part) for part in np.array_split(np.concatenate(laid_out), clients)]


def _dealt_fairly(
    members: Indices, labels: Indices, clients: int, alpha: float, n_classes: int, random: np.random.Generator
) -> list[Indices]:
    """Deal one group's examples until the smallest shard has half the mean size; the best of 1,000 if none has."""
    best, smallest, fair = list[Indices](), -1, len(members) / clients
    for _ in range(1_000):
        by_class, sizes = list[list[Indices]](), np.zeros(clients)
        for label in range(n_classes):
            shares = random.dirichlet([alpha] * clients) * (sizes < fair)
            by_class.append(_cut(random.permutation(members[labels == label]), shares))
            sizes += [len(part) for part in by_class[-1]]
        if sizes.min() > smallest:
            best, smallest = [np.concatenate(parts) for parts in zip(*by_class, strict=True)], sizes.min()
        if smallest >= fair / 2:
            break
    return best


def by_shards(labels: Tensor, clients: int, partition: PartitionConfig, *, n_classes: int, seed: int) -> Shards:
    """Give every client ``classes_per_client`` pieces of the examples sorted by class (McMahan et al. 2017).

    With pieces no larger than a class, a client has at most one class more than that, and usually as many.
    """
    per_client = partition.classes_per_client
    pieces = clients * per_client
    if pieces > len(labels):
        raise ValueError(f"{clients} clients of {per_client} pieces need more than {len(labels)} examples")
    random = numpy_generator(seed)
    mixed = random.permutation(len(labels))
    by_class = mixed[np.argsort(labels.numpy()[mixed], kind="stable")]
    cut = np.array_split(by_class, pieces)
    dealt = random.permutation(pieces).reshape(clients, per_client)
    return [_tensor(np.concatenate([cut[piece] for piece in mine])) for mine in dealt]


def by_groups(labels: Tensor, clients: int, partition: PartitionConfig, *, n_classes: int, seed: int) -> Shards:
    """Give every client the examples of one group (or class): client k those of group k mod M, in equal parts."""
    if clients < n_classes:
        raise ValueError(f"there are {n_classes} groups, and a client has one of them: {clients} clients are too few")
    random, numbers = numpy_generator(seed), labels.numpy()
    shards: list[Indices] = [np.zeros(0, dtype=np.int64)] * clients
    for group in range(n_classes):
        mine = range(group, clients, n_classes)
        members = random.permutation(np.flatnonzero(numbers == group))
        for client, part in zip(mine, np.array_split(members, len(mine)), strict=True):
            shards[client] = part
    return [_tensor(shard) for shard in shards]


def class_counts(labels: Tensor, shards: Shards, n_classes: int) -> Indices:
    """Return the clients × classes matrix of how many examples of each class every client has."""
    return np.stack([np.bincount(labels[shard].numpy(), minlength=n_classes) for shard in shards])


@dataclass(frozen=True)
class Skew:
    """How far a partition is from an even one, over the clients that have examples."""

    top_class_share: float
    effective_classes: float
    smallest: int
    median: float
    largest: int
    absent: int


def skew(counts: Indices) -> Skew:
    """Return the mean share of a client's largest class, the mean effective number of its classes, and the sizes.

    The effective number is exp(H) of a client's class mix: 1 for a single class, M for M classes alike. ``absent``
    counts the classes that no client has.

    >>> skew(np.array([[10, 0], [5, 5]])).effective_classes
    1.5
    """
    sizes = counts.sum(axis=1)
    mixes = counts[sizes > 0] / sizes[sizes > 0, None]
    entropy = -np.sum(mixes * np.log(np.where(mixes > 0, mixes, 1.0)), axis=1)
    share, effective = float(mixes.max(axis=1).mean()), float(np.exp(entropy).mean())
    absent = int((counts.sum(axis=0) == 0).sum())
    return Skew(share, effective, int(sizes.min()), float(np.median(sizes)), int(sizes.max()), absent)


def _cut(members: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    """Cut ``members`` into pieces proportional to ``shares``: cumulative rounding, so that none is lost."""
    total = shares.sum()
    if not total > 0:  # every client's draw underflowed to zero (tiny α)
        shares, total = np.ones_like(shares), float(len(shares))
    ends = np.rint(np.cumsum(shares) / total * len(members)).astype(np.int64)
    return np.split(members, ends[:-1])


def _fill_up(shards: list[Indices], min_size: int, random: np.random.Generator) -> list[Indices]:
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


def _tensor(indices: Indices) -> Tensor:
    return torch.from_numpy(np.sort(indices))
