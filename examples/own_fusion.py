"""A fusion of your own: for each architecture, the median of its clients' weights, coordinate by coordinate.

python own_fusion.py          # from Python, as below (needs the extra "demo")
feddf run own_fusion.toml     # by its name in a configuration: fusion.method = "own_fusion:median"
"""

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

import feddf


def rule(previous: feddf.State, updates: Sequence[feddf.Update]) -> feddf.State:
    states = [update.state for update in updates] or [previous]
    medians = {key: np.median([state[key].numpy() for state in states], axis=0) for key in previous}
    return {key: torch.as_tensor(value, dtype=previous[key].dtype) for key, value in medians.items()}


def median(resources: feddf.Resources, settings: feddf.Settings, engine: feddf.Engine) -> feddf.Fusion:
    def fuse(server: feddf.ServerState, updates: Sequence[feddf.Update], seed: int) -> feddf.Fused:
        models = feddf.average_by_prototype(rule, server, updates)
        return feddf.Fused(server.next(models), models)

    return fuse


if __name__ == "__main__":
    parts = feddf.build(feddf.load(str(Path(__file__).with_suffix(".toml")), sys.argv[1:]))
    fuse = median(feddf.Resources(parts.prototypes), parts.experiment, feddf.in_process)
    rounds = feddf.run_rounds(parts.server, parts.federation, engine=feddf.in_process, train=parts.train, fuse=fuse)
    for closed in islice(rounds, parts.experiment.rounds):
        for name, state in closed.server.models.items():
            reached = feddf.accuracy(parts.prototypes[name].load(state), parts.task.data.test)
            print(f"round {closed.server.round}: {name} {reached:.3f}")
