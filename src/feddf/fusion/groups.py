"""Group averages as teachers: asking costs as much for ten thousand clients as for a few (FedSDD, arXiv 2312.17029)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from feddf.seeds import derive, torch_generator
from feddf.states import weighted_mean
from feddf.types import Update


def group_averages(updates: Sequence[Update], groups: int, seed: int) -> list[Update]:
    """Return the averages Σ n_k x_k / Σ n_k of at most so many groups of each prototype's clients.

    Clients are dealt at random, anew in every round, so that no group is one client's for long. FedSDD keeps a global
    model for each group instead, and trains its clients from it; here all of them start from the one fused model.
    """
    trained = sorted((update for update in updates if update.n_examples > 0), key=lambda update: update.prototype)
    found = []
    for prototype, members in groupby(trained, key=lambda update: update.prototype):
        clients = list(members)
        order = torch.randperm(len(clients), generator=torch_generator(derive(seed, "groups", prototype))).tolist()
        for number in range(min(groups, len(clients))):
            group = [clients[k] for k in sorted(order[number::groups])]  # a sum depends on its order
            counts = [update.n_examples for update in group]
            state = weighted_mean([update.state for update in group], counts)
            found.append(Update(f"group {number + 1} of {prototype}", prototype, group[0].round, state, sum(counts)))
    return found
