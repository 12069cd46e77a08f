"""The plain loop: FedDF as a good researcher would write it in an afternoon, to measure against.

Ordinary PyTorch, default memory format, all the machine's threads, one client after the other, and teachers asked
again on every batch, as the paper's pseudo code reads. Nothing in it is slower than it needs to be for its kind:
images are padded and normalized once, batches are cut by index, augmentation is one gather for a batch.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def augment(padded: Tensor, padding: int = 4) -> Tensor:
    """Flip and crop a batch of images that were padded beforehand."""
    n, channels, height, width = padded.shape
    rows = torch.randint(0, 2 * padding + 1, (n, 1)) + torch.arange(height - 2 * padding)
    columns = torch.randint(0, 2 * padding + 1, (n, 1)) + torch.arange(width - 2 * padding)
    flip = torch.rand(n) < 0.5
    columns[flip] = columns[flip].flip(1)
    index = torch.arange(n)[:, None, None, None]
    channel = torch.arange(channels)[None, :, None, None]
    return padded[index, channel, rows[:, None, :, None], columns[:, None, None, :]]


def train_client(
    server: nn.Module, padded: Tensor, labels: Tensor, epochs: int, batch: int = 64, rate: float = 0.1
) -> nn.Module:
    """Algorithm 2, on images that were padded with black and normalized beforehand."""
    model = copy.deepcopy(server).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(batch):
            loss = F.cross_entropy(model(augment(padded[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def average(models: list[nn.Module], weights: list[int]) -> nn.Module:
    """Line 6 of Algorithm 1, BatchNorm's statistics included."""
    fused = copy.deepcopy(models[0])
    states = [model.state_dict() for model in models]
    total = sum(weights)
    mean = {}
    for key, first in states[0].items():
        if first.is_floating_point():
            mean[key] = sum(state[key] * (weight / total) for state, weight in zip(states, weights, strict=True))
        else:
            mean[key] = first
    fused.load_state_dict(mean)
    return fused


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Top-1 accuracy."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(500), labels.split(500), strict=True)
        )
    return right / len(labels)


def distill(
    student: nn.Module,
    teachers: list[nn.Module],
    pool: Tensor,
    steps: int,
    batch: int = 128,
    rate: float = 1e-3,
    check_every: int = 100,
    validation: tuple[Tensor, Tensor] | None = None,
) -> nn.Module:
    """Lines 7 to 10 of Algorithm 1; with validation data the best snapshot is returned."""
    optimizer = torch.optim.Adam(student.parameters(), lr=rate)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for teacher in teachers:
        teacher.eval()
    best = (accuracy(student, *validation), copy.deepcopy(student.state_dict())) if validation else None
    student.train()
    for step in range(1, steps + 1):
        images = pool[torch.randint(0, len(pool), (batch,))]
        with torch.no_grad():
            target = torch.stack([teacher(images) for teacher in teachers]).mean(0).softmax(1)
        loss = F.kl_div(F.log_softmax(student(images), 1), target, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cosine.step()
        if validation and best and step % check_every == 0:
            score = accuracy(student, *validation)
            student.train()
            if score > best[0]:
                best = (score, copy.deepcopy(student.state_dict()))
    if best:
        student.load_state_dict(best[1])
    return student
