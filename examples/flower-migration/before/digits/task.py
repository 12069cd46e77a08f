"""The model, the data and the training of the example: plain PyTorch, with nothing federated about them."""

import torch
from sklearn.datasets import load_digits
from torch import nn

CLIENTS = 10


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def load_data(partition: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's digits: mostly of two kinds. The last 500 are everybody's test."""
    images, labels = all_digits()
    images, labels = images[:-500], labels[:-500]
    kinds = (labels == partition) | (labels == (partition + 3) % 10)
    few = torch.arange(len(labels)) % 40 == partition
    return images[kinds | few], labels[kinds | few]


def load_test() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = all_digits()
    return images[-500:], labels[-500:]


def all_digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels, dtype=torch.int64)[order]


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int = 10, rate: float = 0.1) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss = torch.zeros(())
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(32):
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return (model(images).argmax(1) == labels).float().mean().item()
