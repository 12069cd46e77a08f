"""Figure 1 (and its detail in appendix C.1): the decision regions of local, averaged, fused and ensemble models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddf import evaluate
from feddf.data.unlabeled import all_rows
from feddf.engines import in_process
from feddf.fusion.ensemble import avg_logits
from feddf.report.plots import decision_regions
from feddf.rounds import run_round
from feddf.runs.build import Parts
from feddf.types import Inputs, WeightedLogits

EXTENT, RESOLUTION = 3.0, 160
Panel = tuple[str, float, NDArray[np.float32]]


def draw(parts: Parts, path: Path) -> list[tuple[str, float]]:
    """Run the first round again (same seed, same bytes), draw its models, and return their accuracies."""
    experiment = parts.experiment
    parts.engine.become(in_process)
    closed = run_round(
        parts.server,
        parts.federation,
        engine=in_process,
        train=parts.train,
        fuse=parts.method.fuse,
        parts=parts.method.parts,
    )
    locals_ = [parts.prototypes[update.prototype].load(update.state) for update in closed.updates]
    name = experiment.prototypes[0].label
    averaged = parts.prototypes[name].load(closed.fused.start[name])
    fused = parts.prototypes[name].load(closed.server.models[name])
    groups = [(update.client_id, [model]) for update, model in zip(closed.updates, locals_, strict=True)]
    groups += [
        ("averaged (FedAvg)", [averaged]),
        (f"fused ({experiment.fusion.method})", [fused]),
        ("ensemble", locals_),
    ]
    panels = [_panel(title, models, parts) for title, models in groups]
    pool = all_rows(parts.task.pool.raw).numpy() if parts.task.pool else None
    decision_regions(panels, list(_points(parts)), pool, path, EXTENT)
    return [(title, accuracy) for title, accuracy, _ in panels]


def _panel(title: str, models: list[torch.nn.Module], parts: Parts) -> Panel:
    line = torch.linspace(-EXTENT, EXTENT, RESOLUTION)
    plane = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).reshape(-1, 2)
    test = parts.task.data.test

    def probabilities(inputs: Inputs) -> Tensor:
        return avg_logits(WeightedLogits(evaluate.logits(model, inputs)) for model in models)

    image = probabilities(Inputs(plane, test.inputs.encode)).reshape(RESOLUTION, RESOLUTION, 3)
    return title, evaluate.accuracy_of(probabilities(test.inputs), test.labels), image.numpy()


def _points(parts: Parts) -> Iterator[tuple[str, NDArray[np.float32], NDArray[np.int64]]]:
    train = parts.task.train
    shards = [(client.id, client.indices) for client in parts.federation.clients]
    for title, indices in [*shards, ("all data", torch.arange(len(train)))]:
        assert indices is not None, "simulated clients have indices"
        yield title, train.inputs.raw[indices].numpy(), train.labels[indices].numpy()
