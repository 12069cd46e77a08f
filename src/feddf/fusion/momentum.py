"""Server momentum (FedAvgM, Hsu et al. 2019), around any fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from feddf.types import Fused, Fusion, Prototype, ServerState, State, Update

VELOCITY = "velocity"
"""What the velocities are called in the server's memory."""


def momentum(beta: float, inner: Fusion, prototypes: Mapping[str, Prototype]) -> Fusion:
    """Return v := β v + Δx; x := x − v (appendix C.2), Δx being the previous weights minus those of ``inner``.

    Only parameters have momentum; buffers (BatchNorm's statistics) are taken from ``inner``. The velocities are
    the server's memory, so a resumed run goes on with them. With β = 0 this is ``inner``, up to rounding.

    Args:
        beta: β, between 0 and 1.
        inner: the fusion that momentum is added to.
        prototypes: the architectures, which tell parameters from buffers.
    """
    names = {
        name: {key for key, _ in prototype.build().named_parameters(remove_duplicate=False)}  # tied weights too
        for name, prototype in prototypes.items()
    }

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        fused = inner(server, updates, seed)
        models: dict[str, State] = {}
        velocities: dict[str, State] = {}
        for name, new in fused.server.models.items():
            old, before = server.models[name], server.memory.get(VELOCITY, {}).get(name, {})
            velocity = {key: old[key] - new[key] + beta * before.get(key, torch.zeros(())) for key in names[name]}
            velocities[name] = velocity
            models[name] = {key: old[key] - velocity[key] if key in velocity else new[key] for key in new}
        memory = {**fused.server.memory, VELOCITY: velocities}
        return replace(fused, server=replace(fused.server, models=models, memory=memory))

    return fuse
