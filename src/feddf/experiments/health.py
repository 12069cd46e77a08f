"""Whether feddf works on this machine: versions, devices, what they can do, and what to set. For ``feddf doctor``.

Everything that may crash is tried in a child process: ``python -m feddf.experiments.health DEVICE`` trains and fuses a
small federation there and prints what came out.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import torch

from feddf import evaluate
from feddf.client import local_update
from feddf.config import ClientsConfig, DistillConfig, LocalConfig, RunConfig, Settings
from feddf.data.encode import Pixels
from feddf.engines import in_process
from feddf.models.cnn import CNN
from feddf.outputs import classes
from feddf.rounds import Federation, run_round
from feddf.runs.methods import feddf
from feddf.runtime import device as devices
from feddf.runtime.compile import can_compile
from feddf.runtime.execution import Execution
from feddf.seeds import torch_generator
from feddf.states import initial
from feddf.types import Client, Examples, Inputs, Prototype, Resources, ServerState

PACKAGES = ("feddf", "torch", "numpy", "safetensors", "ray", "flwr", "transformers", "scipy", "pandas")
SHAPE, CLASSES = (3, 32, 32), 4
TOLERANCE = 0.02
"""The largest difference in a class probability, after one round, between a device in float32 and the CPU."""

PATIENCE = 300.0
"""Seconds after which a check counts as failed."""


@dataclass(frozen=True)
class Trial:
    """A small round on one device: accuracy of the fused model, its answers, and the seconds of each stage."""

    accuracy: float
    seconds: dict[str, float]
    probabilities: list[list[float]] = field(repr=False)


@dataclass(frozen=True)
class Health:
    """All that was found."""

    versions: dict[str, str]
    machine: dict[str, str]
    devices: dict[str, dict[str, Any]]
    checks: dict[str, str]
    advice: list[str]

    def as_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=2)


def examined(say: Callable[[str], None] = lambda line: None) -> Health:
    """Look at this machine; ``say`` is told what is tried next."""
    found: dict[str, dict[str, Any]] = {}
    here = None
    for name, n in devices.present().items():
        say(f"a small round on {name}")
        trial = tried_in_child(name)
        here = here or trial
        found[name] = {"number": n, **_about(name), **compared(trial, here)}
        for precision in ("bfloat16", *(("tf32",) if name == "cuda" else ())):
            say(f"{precision} on {name}")
            found[name][precision] = devices.works(name, precision)
        say(f"compilation for {name}")
        found[name]["compile"] = can_compile(name)
    checks = {}
    for name, code in CHECKS.items():
        say(name)
        checks[name] = checked(code)
    return Health(versions(), machine(), found, checks, advice(found))


def versions() -> dict[str, str]:
    """Return the versions of what matters; a package that is not there is optional."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, str]:
    """Return what this machine is."""
    built = torch.version.cuda or torch.version.hip
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch was built for": f"CUDA or ROCm {built}" if built else "CPUs (and Apple's GPUs on a Mac) only",
    }


def _about(name: str) -> dict[str, Any]:
    device = torch.device(name)
    if name == "cpu":
        return {"name": platform.processor() or platform.machine()}
    free, whole = devices.memory(devices.placed(device)) or (0, 0)
    return {"name": devices.described(device), "free_MiB": free >> 20, "memory_MiB": whole >> 20}


# A small round


def tried_in_child(name: str) -> Trial | str:
    """Return the round of a device, or why there is none."""
    outcome = _child([sys.executable, "-m", "feddf.experiments.health", name])
    if isinstance(outcome, str):
        return outcome
    return Trial(**json.loads(outcome.stdout.splitlines()[-1]))


def tried(name: str) -> Trial:
    """Train four clients on bright bands, fuse them with FedDF, and try the fused model: all on one device."""
    train, pool, test = (_bands(n, seed) for n, seed in ((1024, 1), (512, 2), (64, 3)))
    prototypes = {"cnn": Prototype("cnn", partial(CNN, SHAPE, CLASSES, width=16))}
    run = RunConfig(device=name, threads=1)
    config = Settings(
        clients=ClientsConfig(number=4, fraction=1.0),
        local=LocalConfig(epochs=1, batch=32, rate=0.05),
        distill=DistillConfig(steps=40, batch=64, check=20),
        run=run,
    )
    clients = [Client(f"client-{k}", "cnn", torch.arange(k, 1024, 4)) for k in range(4)]
    local = partial(
        local_update, prototypes=prototypes, train=train, local=config.local, execution=Execution(device=name)
    )
    fuse = feddf(Resources(prototypes, pool.inputs, test), config, in_process)
    server = ServerState(0, {"cnn": initial(prototypes["cnn"], 0)})
    began = perf_counter()
    closed = run_round(server, Federation(clients, config.clients), engine=in_process, train=local, fuse=fuse)
    with Execution(device=name).begun() as place:
        model = prototypes["cnn"].load(closed.server.models["cnn"], place)
        answers = evaluate.logits(model, test.inputs).softmax(dim=1).to("cpu")
    seconds = {**closed.seconds, "all": perf_counter() - began}
    return Trial(
        evaluate.accuracy_of(answers, test.labels),
        {stage: round(value, 2) for stage, value in seconds.items()},
        answers.tolist(),
    )


def _bands(n: int, seed: int) -> Examples:
    """Noisy images whose class is the place of a bright band."""
    labels = torch.arange(n) % CLASSES
    images = torch.randint(0, 120, (n, *SHAPE), generator=torch_generator(seed), dtype=torch.uint8)
    for number in range(CLASSES):
        images[number::CLASSES, :, 8 * number : 8 * number + 8] += 120
    return Examples(Inputs(images, Pixels((0.4,) * 3, (0.3,) * 3)), labels, classes(CLASSES))


def compared(trial: Trial | str, cpu: Trial | str | None) -> dict[str, Any]:
    """Return what a device's round says about it, against that of the CPU."""
    if isinstance(trial, str):
        return {"works": False, "reason": trial}
    if not isinstance(cpu, Trial):
        return {"works": True, "seconds": trial.seconds, "accuracy": trial.accuracy}
    rows = zip(trial.probabilities, cpu.probabilities, strict=True)
    apart = max(abs(one - other) for mine, theirs in rows for one, other in zip(mine, theirs, strict=True))
    works = apart <= TOLERANCE
    return {
        "works": works,
        "seconds": trial.seconds,
        "accuracy": trial.accuracy,
        "largest_difference_from_cpu": apart,
        **({} if works else {"reason": f"its probabilities differ from the CPU's by {apart:.3g}"}),
    }


# Other checks


CHECKS = {
    "worker processes": (
        "from feddf.engines import Processes\nfrom feddf.experiments.health import Number, doubled\n"
        "with Processes(2) as e: assert sorted(e(doubled, [Number(1), Number(2)])) == [2, 4]"
    ),
    "ray": (
        "import ray\nfrom feddf.engines import RayWorkers\nfrom feddf.experiments.health import Number, doubled\n"
        "with RayWorkers(1) as e: assert list(e(doubled, [Number(1)])) == [2]"
    ),
    "flower": "import flwr, feddf.flower",
}


@dataclass(frozen=True)
class Number:
    """A job."""

    value: int

    @property
    def id(self) -> str:
        """Its name."""
        return str(self.value)


def doubled(job: Number) -> int:
    """Do a job."""
    return 2 * job.value


def checked(code: str) -> str:
    """Return ``works``, ``not installed``, or what went wrong with a piece of code."""
    outcome = _child([sys.executable, "-c", code])
    if not isinstance(outcome, str):
        return "works"
    return "not installed" if "ModuleNotFoundError" in outcome else outcome


def _child(command: list[str]) -> subprocess.CompletedProcess[str] | str:
    """Run a child process; return it, or in one line why it failed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment)
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE:g} s"
    if done.returncode == 0:
        return done
    said = done.stderr.strip().splitlines()
    return said[-1][:300] if said and done.returncode > 0 else f"the process ended with code {done.returncode}"


def advice(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what to write into a configuration on this machine."""
    working = [name for name, about in found.items() if about["works"]]
    best = next((name for name in devices.ACCELERATORS if name in working), "cpu")
    automatic = str(devices.choose("auto"))
    lines = [f"run.device = '{best}' ('auto', the default, chooses '{automatic}')"]
    broken = [name for name in found if name not in working]
    lines += [f"do not use run.device = '{name}': {found[name]['reason']}" for name in broken]
    if found[best].get("bfloat16") and best != "cpu":
        lines.append("run.precision = 'bfloat16' works there, for more speed at less precision")
    elif not found[best].get("bfloat16"):
        lines.append("run.precision = 'float32': bfloat16 does not work there")
    if found[best]["number"] > 1:
        lines.append(f"run.workers = {found[best]['number']} or a multiple: workers are dealt round the devices")
    if not found[best]["compile"]:
        lines.append("run.compile = false: there is no working compiler")
    return lines


if __name__ == "__main__":
    print(json.dumps(asdict(tried(sys.argv[1]))))
