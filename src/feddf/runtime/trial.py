"""A self-test to be run as a program of its own: ``python trial.py DEVICE PRECISION``. It needs torch and no feddf.

A small network takes a few training steps there and, in float32, on the CPU; the losses must agree. With ``compile`` in
place of a precision, a small function is compiled there.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

TOLERANCE = {"float32": 1e-3, "tf32": 2e-2, "bfloat16": 1e-1}
"""The largest difference of a loss around log 10 = 2.3."""


def losses(device: str, precision: str) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10)
    network = nn.Sequential(*layers).to(device)
    images, labels = torch.randn(32, 3, 16, 16).to(device), (torch.arange(32) % 10).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    found = []
    for _ in range(4):
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = network(images)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def main(device: str, precision: str) -> int:
    """Return 0 where the losses agree with the CPU's, or the compiled function with its known sum."""
    if precision == "compile":
        return int(torch.compile(lambda x: x.relu() + 1)(torch.ones(8, device=device)).sum().item() != 16)
    tf32 = precision == "tf32"
    if tf32 and torch.cuda.get_device_capability(device) < (8, 0):
        return 1  # older ones compute in float32 without a word
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    pairs = zip(losses(device, precision), losses("cpu", "float32"), strict=True)
    return int(not max(abs(one - other) for one, other in pairs) <= TOLERANCE[precision])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
