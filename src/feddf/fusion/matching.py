"""Which neurons of different networks correspond: the matching of one layer, as FedMA needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import log

import numpy as np
from numpy.typing import NDArray

from feddf.seeds import numpy_generator

Neurons = NDArray[np.float64]
"""A client's neurons of one layer: incoming weights and bias of each."""

Places = NDArray[np.int64]
"""For each neuron of a client, the matched neuron that it belongs to."""

Cost = Callable[[Neurons, Neurons, NDArray[np.float64], int], Neurons]


def match(clients: Sequence[Neurons], *, most: int, sweeps: int = 3, seed: int = 0, gamma: float = 1.0) -> list[Places]:
    """Return, for each client's neurons (rows of incoming weights and bias), the matched neuron of each.

    Every neuron is a noisy copy of a hidden global one: v ~ N(θ_l, σ²), θ_l ~ N(0, σ²), their number unknown
    (a Beta-Bernoulli process with mass γ; Yurochkin et al. 2019). One client after the other is assigned, given the
    others, by the assignment (Hungarian algorithm) that maximizes the posterior, i.e. the sum over its neurons v of

        ‖S_l + v‖² / (σ²(m_l + 2)) − ‖S_l‖² / (σ²(m_l + 1)) + 2 log(m_l / (J − m_l))    matched with l,
        ‖v‖² / 2σ² − 2 log t + 2 log(γ / J)                                             as the t-th new one,

    S_l being the sum and m_l the number of other clients' neurons in l, J the number of clients. ``most`` bounds the
    number of matched neurons. σ² is the mean square of all the weights at hand, so scaling a layer changes nothing.
    """
    variance = float(np.mean(np.concatenate(clients) ** 2)) or 1.0
    score = partial(_score, variance=variance, n_clients=len(clients), gamma=gamma)
    largest = max(range(len(clients)), key=lambda client: (len(clients[client]), -client))
    places: dict[int, Places] = {largest: np.arange(len(clients[largest]))}
    order = [client for client in range(len(clients)) if client != largest]
    random = numpy_generator(seed)
    for _ in range(sweeps if len(clients) > 1 else 0):
        for client in order:
            others = [(clients[other], at) for other, at in places.items() if other != client]
            places[client] = _assign(clients[client], others, most, score)
        order = random.permutation(len(clients)).tolist()
    return _renumbered([places[client] for client in range(len(clients))])


def _assign(rows: Neurons, others: Sequence[tuple[Neurons, Places]], most: int, score: Cost) -> Places:
    """Return the best places for one client's neurons, given everybody else's."""
    from scipy.optimize import linear_sum_assignment

    size = int(max(at.max() for _, at in others)) + 1
    sums, counts = np.zeros((size, rows.shape[1])), np.zeros(size)
    for other, at in others:
        sums[at] += other  # no client has two neurons in one place
        counts[at] += 1
    used, empty = np.flatnonzero(counts), np.flatnonzero(counts == 0)
    n_new = min(len(rows), most - len(used))
    _, columns = linear_sum_assignment(score(rows, sums[used], counts[used], n_new), maximize=True)
    places: Places = np.concatenate([used, empty, size + np.arange(len(rows))])[columns]
    return places


def _score(
    rows: Neurons,
    sums: Neurons,
    counts: NDArray[np.float64],
    n_new: int,
    *,
    variance: float,
    n_clients: int,
    gamma: float,
) -> Neurons:
    """Return what each neuron (row) would add to the posterior in each place (column), the new ones last."""
    norms, mine = (sums**2).sum(axis=1), (rows**2).sum(axis=1)
    together = norms[None] + mine[:, None] + 2 * rows @ sums.T
    old = together / (variance * (counts + 2)) - norms / (variance * (counts + 1))
    old = old + 2 * np.log(counts / (n_clients - counts))
    new = mine[:, None] / (2 * variance) - 2 * np.log(np.arange(1, n_new + 1))[None] + 2 * log(gamma / n_clients)
    return np.hstack([old, new])


def _renumbered(places: Sequence[Places]) -> list[Places]:
    """Close the gaps that neurons without any client left."""
    used = np.unique(np.concatenate(places))
    return [np.searchsorted(used, where) for where in places]
