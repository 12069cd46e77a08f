from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from feddf.runtime.packages import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()


def work():
    blocks = [torch.ones(2_000_000 // (1 + k % 4)) for k in range(24)]  # 2 to 8 MB, as a step's activations
    while blocks:
        blocks.pop()  # and freed as in a backward pass, the last one first


for _ in range(5):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again_without_asking_the_kernel() -> None:
    mapped = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # glibc's default, without its learning by chance

    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, env=mapped, capture_output=True, text=True, check=True).stdout)

    assert faults("keep") < faults("leave") / 10
