"""Bounds on BatchNorm's running statistics, from the cohort: a step between the gate and every fusion.

The gate sees one update at a time, so its bound must leave room for an honest client that diverges (10⁴). A running
mean of that size, or one that is five deviations off, ruins an average all the same. Within a cohort honest statistics
lie close together, whatever the skew: the root mean square over a layer of (μ_k − median) / σ is at most 0.44, and that
of log σ²_k 0.88 (measured on digits and CIFAR-10, α from 0.01 to 1, rates of 0.1 and 0.5). Where a client is beyond the
bounds, that layer's statistics become the cohort's median; honest updates pass unchanged, to the last bit. To draw such
a layer back onto the bound would leave an attacker what is just inside it in every layer at once.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log
from typing import Any, cast

import torch
from torch import Tensor

from feddf.robust.rules import coordinate_median
from feddf.types import Fused, Fusion, ServerState, Update

MOST_MEAN = 0.75  # the most that a layer's running means may be off the median, in deviations of the features
MOST_VARIANCE = log(4.0)  # the same of the variances' logarithms: four times, or a quarter
FEWEST = 4  # updates of a prototype; of fewer a median says little, and the gate's bounds are all there is
MEAN, VARIANCE, TINY = "running_mean", "running_var", 1e-5


def bounded_statistics(inner: Fusion) -> Fusion:
    """Return ``inner`` for updates whose running statistics are not farther from the cohort's median than the bounds.

    It is done within each prototype. Where it changes anything the note ``bounded_statistics`` says by how much: for
    each client, how many times the bound its farthest layer was off.
    """

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        drawn: dict[str, dict[str, Tensor]] = {}
        off: dict[str, float] = {}
        for name in sorted({update.prototype for update in updates}):
            group = [update for update in updates if update.prototype == name]
            layers = [key.removesuffix(MEAN) for key in group[0].state if key.endswith(MEAN)]
            for layer in layers if len(group) >= FEWEST else ():
                for client, key, tensor, ratio in _out_of_bounds(layer, group):
                    drawn.setdefault(client, {})[key] = tensor
                    off[client] = max(ratio, off.get(client, 0.0))
        if not off:
            return inner(server, updates, seed)
        others = {one.client_id: ChainMap(drawn.get(one.client_id, {}), cast(Any, one.state)) for one in updates}
        bounded = [replace(one, state=others[one.client_id]) if one.client_id in drawn else one for one in updates]
        fused = inner(server, bounded, seed)  # what is not replaced stays where it is, perhaps on disk
        note = {client: round(ratio, 1) for client, ratio in sorted(off.items())}
        return replace(fused, notes={**fused.notes, "bounded_statistics": note})

    return fuse


def _out_of_bounds(layer: str, group: Sequence[Update]) -> Iterator[tuple[str, str, Tensor, float]]:
    """Yield a client, a statistic, what takes its place, and how many times the bound it was off."""
    means, variances = (
        torch.stack([update.state[layer + which].to(torch.float64) for update in group]) for which in (MEAN, VARIANCE)
    )
    logs = (variances + TINY).log()
    deviation = (coordinate_median(logs, 0) / 2).exp()
    for which, rows, unit, most in ((MEAN, means, deviation, MOST_MEAN), (VARIANCE, logs, 1.0, MOST_VARIANCE)):
        center = coordinate_median(rows, 0)
        usual = center if which == MEAN else (center.exp() - TINY).clamp_min(0)
        ratios = ((rows - center) / unit).square().mean(dim=1).sqrt() / most
        for update, ratio in zip(group, ratios.tolist(), strict=True):
            if ratio > 1:
                key = layer + which
                yield update.client_id, key, usual.to(update.state[key].dtype), ratio
