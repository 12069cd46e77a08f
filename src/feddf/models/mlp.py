"""A multi-layer perceptron: the network of the paper's toy example (Figure 1)."""

from __future__ import annotations

from math import prod

from torch import Tensor, nn


class MLP(nn.Module):
    """Three linear layers with ReLU between them, on flattened inputs."""

    def __init__(self, shape: tuple[int, ...], n_classes: int, *, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(prod(shape), width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, n_classes),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(inputs)
        return logits
