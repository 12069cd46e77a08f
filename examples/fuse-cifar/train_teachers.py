"""Train five classifiers on disjoint, badly skewed parts of CIFAR-10, and write them as people have them.

Three architectures and two file formats: run it once, then fuse the files with ``feddf fuse`` (see README.md). The
files in CIFAR-10's own layout are looked for in the folder that FEDDF_DATA names.

    python examples/fuse-cifar/train_teachers.py OUT [--images 25000] [--epochs 8] [--seed 0]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from feddf import MODELS, Examples, dirichlet
from feddf.config import DataConfig, PartitionConfig
from feddf.data.datasets import flip_crop
from feddf.fusing.folder import write_onnx
from feddf.runs.loading import load_dataset

SIDE = 16
"""Images are made smaller, so that all of it takes minutes on one core."""

TEACHERS = [
    ("hospital-a", "resnet8", {}),
    ("hospital-b", "cnn", {"width": 32, "depth": 3}),
    ("hospital-c", "vgg9", {"scale": 0.25}),
    ("hospital-d", "resnet8", {}),
    ("hospital-e", "cnn", {"width": 32, "depth": 3}),
]
AS_ONNX = {"hospital-c", "hospital-d"}


def train(model: nn.Module, examples: Examples, epochs: int, seed: int) -> nn.Module:
    """Plain SGD with momentum, a one-cycle rate, flips and crops."""
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    batches = (len(examples) + 63) // 64
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=epochs * batches)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(examples), generator=random).split(64):
            if len(chosen) > 1:
                raw = flip_crop(examples.inputs.raw[chosen], random, padding=2)
                loss = F.cross_entropy(model(examples.inputs.encode(raw)), examples.labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            rates.step()
    return model.eval()


def main(out: Path, images: int, epochs: int, seed: int) -> None:
    data = load_dataset("data", "cifar10", DataConfig(name="cifar10", image_size=SIDE))
    some = data.train.take(torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))[:images])
    parts = dirichlet(some.labels, len(TEACHERS), PartitionConfig(alpha=0.5, min_size=500), n_classes=10, seed=seed + 1)
    out.mkdir(parents=True, exist_ok=True)
    for number, ((name, architecture, options), part) in enumerate(zip(TEACHERS, parts, strict=True)):
        own = 100 * seed + number
        torch.manual_seed(own)
        model = train(MODELS[architecture]((3, SIDE, SIDE), 10, **options), some.take(part), epochs, own)
        held = torch.bincount(some.labels[part], minlength=10).tolist()
        print(f"{name}: {architecture}, {len(part)} images, of each class {held}", flush=True)
        if name in AS_ONNX:
            write_onnx(model, data.train.inputs.batch(torch.arange(8)), out / f"{name}.onnx")
        else:
            save_file(model.state_dict(), out / f"{name}.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, default=25_000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
