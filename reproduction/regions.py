"""Figure 1 (and its detail in appendix C.1): the decision regions of the toy's models after one round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from feddf import evaluate
from feddf.data.unlabeled import all_rows
from feddf.engines import in_process
from feddf.fusion.ensemble import avg_logits
from feddf.report.headline import title_of
from feddf.report.plots import COLORS, in_one_style, save_figure
from feddf.report.tables import percent
from feddf.rounds import run_round
from feddf.runs.build import Parts
from feddf.types import Inputs, WeightedLogits


def draw_regions(parts: Parts, path: Path, extent: float = 3.0, resolution: int = 160) -> list[tuple[str, float]]:
    """Draw the decision regions of the toy's local, averaged, fused and ensemble models; return their accuracies."""
    train, test, pool = parts.task.train, parts.task.data.test, parts.task.pool
    line = torch.linspace(-extent, extent, resolution)
    plane = Inputs(torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1).reshape(-1, 2), test.inputs.encode)

    def predict(models: Sequence[nn.Module], inputs: Inputs) -> Tensor:
        return avg_logits(WeightedLogits(evaluate.logits(model, inputs)) for model in models)

    panels = []
    for title, models in _first_models(parts).items():
        image = predict(models, plane).reshape(resolution, resolution, 3).numpy()
        panels.append((title, evaluate.accuracy_of(predict(models, test.inputs), test.labels), image))
    shards = {client.id: indices for client, indices in zip(parts.federation.clients, parts.task.shards, strict=True)}
    shards["all data"] = torch.arange(len(train))
    points = [(title, train.inputs.raw[one].numpy(), train.labels[one].numpy()) for title, one in shards.items()]
    _draw(panels, points, all_rows(pool.raw).numpy() if pool else None, path, extent)
    return [(title, accuracy) for title, accuracy, _ in panels]


def _first_models(parts: Parts) -> dict[str, list[nn.Module]]:
    """Run the first round, and return its models, those of an ensemble together."""
    parts.engine.become(in_process)
    method, name = parts.method, parts.experiment.prototypes[0].label
    closed = run_round(
        parts.server, parts.federation, engine=in_process, train=parts.train, fuse=method.fuse, parts=method.parts
    )
    load = parts.prototypes[name].load
    trained = {update.client_id: parts.prototypes[update.prototype].load(update.state) for update in closed.updates}
    return {
        **{client: [model] for client, model in trained.items()},
        "averaged (FedAvg)": [load(closed.fused.start[name])],
        f"fused ({title_of(parts.experiment.fusion.method)})": [load(closed.server.models[name])],
        "ensemble": list(trained.values()),
    }


@in_one_style()
def _draw(
    panels: Sequence[tuple[str, float, NDArray[np.float32]]],
    shards: Sequence[tuple[str, NDArray[np.float32], NDArray[np.int64]]],
    pool: NDArray[np.float32] | None,
    path: Path,
    extent: float,
) -> None:
    """Draw data in the top row, class probabilities as colors in the bottom row.

    A panel is (title, accuracy, H×W×3 probabilities); a shard is (title, N×2 points, N labels).
    """
    columns = max(len(panels), len(shards) + 1)
    palette = np.array([to_rgb(color) for color in COLORS[:3]])
    figure = Figure(figsize=(1.6 * columns, 3.9), layout="constrained")
    grid = figure.subplots(2, columns)
    for axes in grid.flat:
        axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", xticks=[], yticks=[])
    clouds: list[Any] = [(title, points, palette[labels], 5) for title, points, labels in shards]
    if pool is not None:
        clouds.append((f"unlabeled pool ({len(pool)})", pool, "gray", 6))
    for axes, (title, points, colors, size) in zip(grid[0], clouds, strict=False):
        axes.scatter(points[:, 0], points[:, 1], c=colors, s=size)
        axes.set_title(title)
    for axes in [*grid[0][len(clouds) :], *grid[1][len(panels) :]]:
        axes.axis("off")
    for axes, (title, accuracy, image) in zip(grid[1], panels, strict=False):
        mixed = np.clip(image @ palette, 0, 1)  # a class is its color, a doubt the mixture
        axes.imshow(mixed, origin="lower", extent=(-extent, extent, -extent, extent), interpolation="bilinear")
        axes.set_title(f"{title}\n{percent(accuracy)} % on all data")
    save_figure(figure, path)
