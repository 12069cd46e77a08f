"""FedDF in one file: Algorithm 3 of Lin, Kong, Stich, Jaggi (2020) from nothing but torch.

Read this first. The package does the same for real data, many clients, crashes and hostile clients; a test keeps both
in agreement. Run it: python examples/feddf_in_one_file.py
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def train_client(server: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int, lr: float) -> nn.Module:
    """Algorithm 2: SGD on the client's own examples, from the server's weights."""
    model = copy.deepcopy(server).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for chosen in torch.randperm(len(y)).split(batch):
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def average(models: list[nn.Module], sizes: list[int]) -> nn.Module:
    """Line 11: the mean of the weights of one architecture's clients, weighted by their numbers of examples."""
    fused = copy.deepcopy(models[0])
    states = [model.state_dict() for model in models]
    for key, value in fused.state_dict().items():
        mean = sum(n * state[key].double() for n, state in zip(sizes, states, strict=True)) / sum(sizes)
        value.copy_(mean)
    return fused


@torch.no_grad()
def ensemble(teachers: list[nn.Module], pool: Tensor) -> Tensor:
    """AvgLogits: the softmax of the mean of all teachers' logits, whatever their architectures."""
    return torch.stack([teacher.eval()(pool) for teacher in teachers]).mean(dim=0).softmax(dim=1)


def distill(student: nn.Module, targets: Tensor, pool: Tensor, steps: int, batch: int, lr: float) -> nn.Module:
    """Lines 12 to 15: draw the student towards the ensemble on unlabeled inputs, with Adam and cosine annealing."""
    student = copy.deepcopy(student).train()
    optimizer = torch.optim.Adam(student.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for _ in range(steps):
        chosen = torch.randperm(len(pool))[:batch]
        loss = F.kl_div(student(pool[chosen]).log_softmax(dim=1), targets[chosen], reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return student


def feddf_round(
    server: dict[str, nn.Module],
    clients: list[tuple[str, Tensor, Tensor]],
    pool: Tensor,
    *,
    epochs: int = 20,
    steps: int = 300,
    batch: int = 64,
    lr: float = 0.1,
    distill_lr: float = 1e-3,
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return each architecture's averaged and fused model after one round. A client is (architecture, x, y)."""
    trained = [(name, train_client(server[name], x, y, epochs, batch, lr), len(y)) for name, x, y in clients]
    targets = ensemble([model for _, model, _ in trained], pool)
    averaged, fused = {}, {}
    for name in server:
        mine = [(model, n) for other, model, n in trained if other == name]
        averaged[name] = average([model for model, _ in mine], [n for _, n in mine]) if mine else server[name]
        fused[name] = distill(averaged[name], targets, pool, steps, 2 * batch, distill_lr)
    return averaged, fused


def spirals(n: int) -> tuple[Tensor, Tensor]:
    """Three arms in the plane, one a class."""
    y, t = torch.arange(n) % 3, torch.rand(n) ** 0.5
    angle = 4 * t + 2 * torch.pi * y / 3 + 0.15 * torch.randn(n)
    return torch.stack([3 * t * angle.cos(), 3 * t * angle.sin()], dim=1), y


def mlp(width: int) -> nn.Module:
    """A network for points in the plane."""
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def main(rounds: int = 3) -> dict[str, float]:
    """Fuse two small and two large networks; each client knows mostly two of the three classes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # networks this small gain nothing by a second one
    x, y = spirals(1200)
    clients = []
    for k, name in enumerate(("small", "large", "small", "large")):
        keep = ((y != k % 3) | (torch.rand(len(y)) < 0.05)) & (torch.arange(len(y)) % 4 == k)
        clients.append((name, x[keep], y[keep]))
    server, pool, (test_x, test_y) = {"small": mlp(16), "large": mlp(48)}, 6 * torch.rand(600, 2) - 3, spirals(600)
    for number in range(1, rounds + 1):
        averaged, server = feddf_round(server, clients, pool)
        score = {
            f"{name} {kind}": float((model.eval()(test_x).argmax(dim=1) == test_y).float().mean())
            for kind, models in (("averaged", averaged), ("fused", server))
            for name, model in models.items()
        }
        print(f"round {number}: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in score.items()))
    return score


if __name__ == "__main__":
    main()
