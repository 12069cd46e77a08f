"""Measure the memory of a fusion of many teachers: peak of the whole process with 5, 100 and 101 of them.

    python examples/fuse-digits/many_teachers.py OUT

The teachers are wide MLPs (7 MB of weights each) that were not trained: memory does not depend on what they know. The
hundred and first is evaluated alone, as the predictions of the others are cached.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from feddf import MODELS

MEASURED = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(done.stderr.strip() or next(line for line in done.stdout.splitlines() if "teachers evaluated" in line))
print(f"peak {peak / 1024:.0f} MB")
"""


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for number in range(101):
        torch.manual_seed(number)
        save_file(MODELS["mlp"]((1, 28, 28), 10, width=1024).state_dict(), out / f"{number:03d}.safetensors")
    for count in (5, 100, 101):
        command = [sys.executable, "-m", "feddf", "fuse", "--student", "{model = 'cnn', size = 28, channels = 1}"]
        for number in range(count):
            fed = "size = 28, channels = 1, mean = [0.13], std = [0.31]"
            table = f"{{path = '{out}/{number:03d}.safetensors', model = 'mlp', options = {{width = 1024}}, {fed}}}"
            command += ["--teacher", table]
        command += ["--unlabeled", "mnist-5k", "--cache", str(out / "answers"), "--out", str(out / f"of-{count}")]
        command += ["distill.steps=5", "run.threads=1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        said = subprocess.run(
            [sys.executable, "-c", MEASURED, *command], env=environment, capture_output=True, text=True
        )
        print(count, "teachers:", said.stdout.strip().replace("\n", "; "), said.stderr.strip(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    main(**vars(parser.parse_args()))
