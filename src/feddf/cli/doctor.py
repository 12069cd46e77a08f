"""``feddf doctor``: whether this machine can run feddf, in one line for each thing that matters."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import typer

from feddf.cli.arguments import err_console, give, say

EXTRAS = {
    "demo": "sklearn", "fedma": "scipy", "images": "PIL", "tables": "pyarrow", "text": "transformers",
    "onnx": "onnxruntime", "ray": "ray", "flower": "flwr", "privacy": "dp_accounting", "metrics": "sklearn",
    "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio",
}  # fmt: skip
"""Extras of the package, and the module by which each is known to be installed."""

WORKERS = """
from types import SimpleNamespace
from feddf.engines import Processes
with Processes(2) as engine:
    answers = list(engine(repr, [SimpleNamespace(id="one"), SimpleNamespace(id="other")]))
assert all(isinstance(answer, str) for answer in answers), answers
"""


def doctor() -> None:
    """Check devices, extras, data and disk on this machine."""
    found: dict[str, str] = {}
    err_console.print("trying what this machine can do ...", style="dim")
    for name, line in _examine():
        found[name] = line
        say(f"{name:<10} {line}")
    give(found)
    if not found["cpu"].startswith("works"):
        raise typer.Exit(1)


def _examine() -> Iterator[tuple[str, str]]:
    """Yield the name of each thing and what was found."""
    import torch

    from feddf.data.catalog import CATALOG, root_of, state
    from feddf.runtime import device

    yield "machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield "feddf", f"{version('feddf')}, Python {platform.python_version()}, numpy {version('numpy')}"
    built = torch.version.cuda or torch.version.hip
    backend = f"CUDA or ROCm {built}" if built else "CPUs (and Apple's GPUs on a Mac) only"
    processor = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    yield "torch", f"{torch.__version__}, {processor}, built for {backend}"
    for kind, count in device.present().items():
        yield kind, _try_device(kind, count)
    yield "set", _advice()
    yield "workers", _try_code(WORKERS)
    yield "extras", _extras()
    folder = root_of(None)
    here = [entry.name for entry in CATALOG.values() if state(entry, folder) == "here"]
    yield "data", f"{folder} has {', '.join(here) or 'no data set'}; more: feddf data list"
    yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.1f} GB are free for runs in {Path.cwd()}"


def _try_device(kind: str, count: int) -> str:
    """Compare a short training on a device with the CPU's, in a child process, which may well crash."""
    import torch

    from feddf.runtime.device import described, memory, placed, works
    from feddf.runtime.execution import can_compile

    if not works(kind, "float32"):
        return "DOES NOT WORK: a short training crashed there, or differs from the CPU's; do not set run.device to it"
    room = None if kind == "cpu" else memory(placed(torch.device(kind)))
    precisions = [name for name in ("tf32", "bfloat16") if (name != "tf32" or kind == "cuda") and works(kind, name)]
    return "; ".join([
        f"works ({count} × {described(torch.device(kind))})" if kind != "cpu" else "works",
        *([f"{room[0] / 1e9:.1f} of {room[1] / 1e9:.1f} GB free"] if room else []),
        f"run.precision may be {', '.join(['float32', *precisions])}",
        f"run.compile {'works' if can_compile(kind) else 'does not work: no C++ compiler'}",
    ])  # fmt: skip


def _advice() -> str:
    """Say what the default device is, and how many workers suit it."""
    from feddf.runtime.device import choose, count

    chosen = choose("auto").type
    several = f"; run.workers = {n} or a multiple: workers take turns" if (n := count(chosen)) > 1 else ""
    return f"run.device = 'auto', the default, is '{chosen}' here{several}"


def _try_code(code: str) -> str:
    """Return ``work``, or in one line why a piece of code fails in a child process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    said = done.stderr.strip().splitlines()
    return "work" if done.returncode == 0 else f"DO NOT WORK: {said[-1][:300] if said else f'code {done.returncode}'}"


def _extras() -> str:
    here = [name for name, module in EXTRAS.items() if find_spec(module)]
    lacking = [name for name in EXTRAS if name not in here]
    remedy = f"; for more: pip install 'feddf[{','.join(lacking)}]'" if lacking else ""
    return f"{', '.join(here) or 'none'}{remedy}"
