"""Many small clients in one step, or one after the other: ``python benchmarks/batched.py``.

K clients of one architecture take a step of SGD each: in turn, and stacked (``torch.func``: the gradient of a
functional call, mapped over clients with ``vmap``). Two things are compared: the operations that torch dispatches,
views left out, which on a GPU are about the kernels that it launches; and the milliseconds on this machine's CPU, on
one thread.

    python benchmarks/batched.py --count     # the operations only: they are the same on any machine, busy or not
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from feddf.models.resnet import ResNet
from feddf.models.small import CNN, MLP
from feddf.runtime.device import threads

RATE = 0.05
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, width 64, on 28×28": (partial(MLP, (1, 28, 28), 10, width=64), (1, 28, 28)),
    "CNN, width 8, GroupNorm, on 28×28": (partial(CNN, (1, 28, 28), 10, width=8, norm="group"), (1, 28, 28)),
    "ResNet-8, GroupNorm, on 32×32": (partial(ResNet, (3, 32, 32), 10, depth=8, norm="group"), (3, 32, 32)),
}


class Operations(TorchDispatchMode):
    """Counts what would be a kernel: operations that are neither views nor bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = all(result.alias_info is None or result.alias_info.is_write for result in function._schema.returns)
        self.count += int(made and bool(function._schema.returns))
        return function(*args, **(kwargs or {}))


def in_turn(models: list[nn.Module], images: Tensor, labels: Tensor) -> None:
    """Let every client take a step, one after the other."""
    for model, inputs, wanted in zip(models, images, labels, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=True)  # as on a GPU
        F.cross_entropy(model(inputs), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()


def stacked(models: list[nn.Module]) -> Callable[[Tensor, Tensor], Mapping[str, Tensor]]:
    """Return what lets all clients take a step at once, and gives their weights."""
    plain = models[0]
    weights, buffers = stack_module_state(models)
    weights = {name: tensor.detach() for name, tensor in weights.items()}

    def loss(own: Mapping[str, Tensor], state: Mapping[str, Tensor], inputs: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(plain, (dict(own), dict(state)), (inputs,)), wanted)

    gradients = vmap(grad(loss))

    def step(images: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        found = gradients(weights, buffers, images, labels)
        names = list(weights)
        torch._foreach_add_([weights[name] for name in names], [found[name] for name in names], alpha=-RATE)
        return weights

    return step


def agree(models: list[nn.Module], images: Tensor, labels: Tensor) -> float:
    """Return the largest difference between weights after a step, in turn and stacked."""
    after = stacked(models)(images, labels)
    in_turn(models, images, labels)
    pairs = ((after[name][k], weight) for k, model in enumerate(models) for name, weight in model.named_parameters())
    return max(float((one - other.detach()).abs().max()) for one, other in pairs)


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of a piece of work, after one that does not count."""
    work()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", action="store_true", help="count operations, and time nothing")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    print("| model | clients | operations in turn | stacked | ms in turn | stacked | largest difference |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (build, shape) in MODELS.items():
        for clients in given.clients:
            torch.manual_seed(0)
            models = [build() for _ in range(clients)]
            images = torch.randn(clients, given.batch, *shape)
            labels = torch.randint(0, 10, (clients, given.batch))
            with threads(1):
                apart = agree(models, images, labels)
                together = stacked(models)
                works = (lambda: in_turn(models, images, labels), lambda: together(images, labels))  # noqa: B023
                counts = []
                for work in works:
                    with Operations() as counted:
                        work()
                    counts.append(counted.count)
                times = ["", ""] if given.count else [f"{milliseconds(work, given.repeats):.1f}" for work in works]
            cells = [name, clients, *counts, *times, f"{apart:.1g}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
