"""Peak memory of fusing masks: ``python benchmarks/memory_of_masks.py N [TEACHERS]``, N pictures, 64×64, 8 classes.

Answers are in half precision on disk (65.5 kB a picture and teacher), and read a batch at a time.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import feddf
from feddf.config import DistillConfig
from feddf.fusing.inputs import RawInputs
from feddf.fusing.teachers import of_module
from feddf.saved.model import Images


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(n: int, teachers: int = 2) -> None:
    fed = Images((1, 64, 64), (0.5,), (0.5,))
    pool = RawInputs(torch.randint(0, 256, (n, 1, 64, 64), dtype=torch.uint8))
    models = [nn.Conv2d(1, 8, 3, padding=1) for _ in range(teachers)]
    names = ("background", *"1234567")
    known = [of_module(one, f"t{k}", classes=names, preprocess=fed) for k, one in enumerate(models)]
    student = feddf.StudentSpec("dilated-cnn", fed, {"width": 4, "depth": 1})
    before = peak()
    distill = DistillConfig(steps=20, eval_every=10, batch_size=32, early_stopping="held-out-loss")
    with TemporaryDirectory() as folder:
        feddf.fuse(known, student, pool, distill=distill, cache=Path(folder))
    found = {"pictures": n, "teachers": teachers, "MB of the pool": pool.rows.nbytes / 2**20}  # type: ignore[union-attr]
    print(json.dumps({**found, "MB before": round(before), "peak MB": round(peak())}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
