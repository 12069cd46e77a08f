"""What asking costs by the number of teachers: each of them, averages of groups, and heads as one matrix product.

``python benchmarks/asking.py [OUT]``: a row for each way and number of teachers, each in a process of its own, which
prints its seconds and its peak memory. Teachers lie on disk, as a run keeps them; the pool has 1,000 images of 32×32.
Heads are linear layers on 384 frozen features, whose probabilities are averaged: Σ_k σ(X W_k) is one product with all
W_k side by side, in pieces that fit the memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from feddf import MODELS, Inputs, Job, Prototype, Update, in_process, init_state
from feddf.data.datasets import Pixels
from feddf.fusion.ensemble import make_ensemble
from feddf.runs.spool import DiskSpool
from feddf.runtime.packages import keep_freed_memory
from feddf.types import Client

TEACHERS = (8, 100, 1_000, 10_000)
SIZE, GROUPS, FEATURES, CLASSES, PIECE = 1_000, 8, 384, 10, 256
NETWORK = {"resnet8": Prototype("resnet8", partial(MODELS["resnet8"], (3, 32, 32), CLASSES))}


def ask(teachers: int, groups: int) -> float:
    """Return the seconds that targets for the pool take, reading the teachers included."""
    raw = torch.randint(0, 256, (SIZE, 3, 32, 32), dtype=torch.uint8)
    state = init_state(NETWORK["resnet8"], 0)
    with tempfile.TemporaryDirectory() as folder:
        spool, updates = DiskSpool(Path(folder)), []
        for number in range(teachers):
            job = Job(Client(f"{number:05d}", "resnet8"), 1, state, number)
            own = {key: tensor.clone() for key, tensor in state.items()}
            kept = spool.keep(job, Update(job.id, "resnet8", 1, own, 25))
            assert isinstance(kept, Update)
            updates.append(kept)
        targets = make_ensemble(NETWORK, Inputs(raw, Pixels((0.5,) * 3, (0.25,) * 3)), in_process, groups=groups)
        began = time.perf_counter()
        targets(updates, 0, {})
        return time.perf_counter() - began


def multiply(teachers: int) -> float:
    """Return the seconds that the mean probabilities of all heads take; features of the pool are there."""
    torch.set_num_threads(1)
    features = torch.randn(SIZE, FEATURES)
    heads = torch.randn(teachers, FEATURES, CLASSES)
    began = time.perf_counter()
    total = torch.zeros(SIZE, CLASSES, dtype=torch.float64)
    for some in heads.split(PIECE):
        logits = features @ some.permute(1, 0, 2).reshape(FEATURES, -1)
        total += logits.view(SIZE, len(some), CLASSES).softmax(dim=2).sum(dim=1)
    (total / teachers).float()
    return time.perf_counter() - began


WAYS = {"each": lambda n: ask(n, 0), f"{GROUPS} groups": lambda n: ask(n, GROUPS), "heads, one product": multiply}


def one(way: str, teachers: int) -> None:
    """Measure one way here, and print what was found."""
    keep_freed_memory()
    seconds = WAYS[way](teachers)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "MiB": int(peak.split()[1]) / 1024}))


def main(out: Path | None) -> None:
    """Measure all, and print (and write) a table."""
    lines = ["| way | teachers | seconds | peak memory, MiB |", "|---|---:|---:|---:|"]
    for way in WAYS:
        for teachers in TEACHERS if way != "each" else TEACHERS[:-1]:  # ten thousand would take ten times a thousand
            command = [sys.executable, __file__, "one", way, str(teachers)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            found = json.loads(said)
            lines.append(f"| {way} | {teachers:,} | {found['seconds']:.2f} | {found['MiB']:.0f} |")
            print(lines[-1], flush=True)
    if out:
        out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        one(sys.argv[2], int(sys.argv[3]))
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
