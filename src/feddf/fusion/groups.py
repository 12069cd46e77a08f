"""Groups of clients: with their averages as teachers, predicting the pool costs the same for any number of clients.

Clients are dealt at random, anew in every round, so that no group is one client's for long. FedSDD (arXiv 2312.17029)
keeps a global model for each group instead, and trains its clients from it; here all start from the one fused model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from feddf.seeds import derive, torch_generator
from feddf.states import weighted_mean
from feddf.types import Update

Groups = Mapping[str, Sequence[Update]]


def deal(updates: Sequence[Update], groups: int, seed: int) -> dict[str, list[Update]]:
    """Return the clients of each architecture in groups of nearly equal size, by the group's name."""
    dealt: dict[str, list[Update]] = {}
    for prototype in sorted({update.prototype for update in updates}):
        members = [update for update in updates if update.prototype == prototype]
        order = torch.randperm(len(members), generator=torch_generator(derive(seed, "groups", prototype))).tolist()
        for place, number in enumerate(order):
            dealt.setdefault(f"{prototype} group-{place % groups}", []).append(members[number])
    return dealt


def group_averages(dealt: Groups) -> list[Update]:
    """Return Σ n_k x_k / Σ n_k of each group; where none of its clients has examples, all count alike."""
    found = []
    for name, members in dealt.items():
        counts = [update.n_examples for update in members]
        state = weighted_mean([update.state for update in members], counts if any(counts) else [1] * len(counts))
        found.append(Update(name, members[0].prototype, members[0].round, state, sum(counts)))
    return found
