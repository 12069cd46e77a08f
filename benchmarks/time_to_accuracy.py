"""Seconds until a model is so good, which is what people wait for: ``python benchmarks/time_to_accuracy.py``.

The task: 5,000 images of CIFAR-10, 20 clients whose classes are skewed (Dirichlet, α = 0.1), 8 of them a round, five
epochs, and a network of 80 thousand weights. Flower, pfl-research and feddf have the same images at the same clients,
the same epochs, batches and rate (that of the best of feddf's FedAvg in the pilot), two workers, and their own way to
draw clients and first weights. FedDF also has 4,000 unlabeled images of CIFAR-100, which is what it is about. Each
command has a budget from its start to its end: imports, data and workers are in the seconds.

Targets are 50, 75 and 90 % of the best that feddf's FedAvg reaches in a pilot with a seed that is not reported. Every
program leaves its model behind after each round; they are tried on CIFAR-10's test images when all is over.

    python benchmarks/time_to_accuracy.py --pilot       # fixes rate and targets: results/time_to_accuracy.json
    python benchmarks/time_to_accuracy.py --seeds 0     # six minutes at most; --seeds 0,1,2 for all
    python benchmarks/time_to_accuracy.py --table
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peers

TASK: dict[str, Any] = {
    "clients": 20, "cohort": 8, "examples": 250, "rounds": 60, "workers": 2, "batch": 32, "network": "small_cnn",
    "epochs": 5, "kept": True,
}  # fmt: skip
ALPHA, SMALLEST, POOL, BUDGET = 0.1, 10, 4000, 60.0
PILOT, RATES, SHARES = 1000, (0.02, 0.05, 0.1), (0.5, 0.75, 0.9)
RUNS = {
    "Flower, FedAvg": ("flower", "fedavg"),
    "pfl-research, FedAvg": ("pfl", "fedavg"),
    "pfl-research, SCAFFOLD": ("pfl", "scaffold"),
    "feddf, FedAvg": ("feddf", "fedavg"),
    "feddf, FedDF": ("feddf", "feddf"),
    "feddf, feddf-plus": ("feddf", "feddf-plus"),
}
OUT = Path(__file__).parent / "results" / "time_to_accuracy.json"


def write_task(folder: Path, source: Path, seed: int) -> None:
    """Write the images, whose are whose, the pool and the test images of a seed."""
    import numpy as np
    from common import SHARDS, write_cifar

    write_cifar(folder, source, TASK["clients"] * TASK["examples"])
    labels, random = np.load(folder / "labels.npy"), np.random.default_rng(seed)
    sizes = [0]
    while min(sizes) < SMALLEST:  # a client without images has nothing to train on
        parts: list[list[int]] = [[] for _ in range(TASK["clients"])]
        for label in range(10):
            rows = random.permutation(np.flatnonzero(labels == label))
            ends = (np.cumsum(random.dirichlet([ALPHA] * TASK["clients"]))[:-1] * len(rows)).astype(int)
            for part, some in zip(parts, np.split(rows, ends), strict=True):
                part += some.tolist()
        sizes = [len(part) for part in parts]
    (folder / SHARDS).write_text(json.dumps([random.permutation(part).tolist() for part in parts]))
    import pickle

    found = pickle.loads((source / "cifar-100-python" / "train").read_bytes(), encoding="bytes")[b"data"]
    np.save(
        folder / "pool-images.npy",
        found[np.random.default_rng(0).permutation(len(found))[:POOL]].reshape(-1, 3, 32, 32),
    )


def run(peer: str, python: Path, method: str, seed: int, rate: float, source: Path) -> dict[str, Any]:
    """Run a command within its budget; return seconds and accuracy after each round, and why it ended early."""
    from common import Work, tried

    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as said:
        folder = Path(name)
        write_task(folder, source, seed)
        work = {**TASK, "folder": name, "method": method, "seed": seed, "rate": rate}
        began = time.time()
        process = subprocess.Popen(
            peers.command(peer, python, work),
            stdout=subprocess.DEVNULL,
            stderr=said,
            cwd=peers.PROGRAMS,
            env=peers.surroundings(folder),
            start_new_session=True,
        )
        failure = ""
        try:
            if process.wait(BUDGET):
                said.seek(0)
                failure = (said.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1][:200]
        except subprocess.TimeoutExpired:
            for pid in peers.members(process.pid):
                os.kill(pid, 9)
            process.wait()
        files = sorted(folder.glob("round-*.pt"), key=lambda path: int(path.name.split("-")[1]))
        found = [(float(path.stem.split("-")[2]) - began, tried(Work(**work), path.name)) for path in files]
    return {"rounds": [(round(seconds, 2), accuracy) for seconds, accuracy in found], "failure": failure}


def reached(found: dict[str, Any], target: float) -> float | None:
    """Return the seconds after which a run was first so good."""
    return next((seconds for seconds, accuracy in found["rounds"] if accuracy >= target), None)


def table(kept: dict[str, Any]) -> str:
    """Return the results as Markdown: seconds for each seed, and for all; a dash where the budget did not suffice."""
    targets = kept["targets"]
    lines = [
        "| | " + " | ".join(f"{target:.1%}" for target in targets) + " | best within the budget | rounds |",
        "|---|" + "---:|" * (len(targets) + 2),
    ]
    for name in RUNS:
        runs = [kept["runs"][key] for key in sorted(kept["runs"]) if key.rpartition(", seed ")[0] == name]
        if not runs:
            continue
        cells = []
        for target in targets:
            times = [reached(one, target) for one in runs]
            shown = ", ".join("–" if one is None else f"{one:.1f}" for one in times)
            known = [one for one in times if one is not None]
            cells.append(f"**{statistics.median(known):.1f}** ({shown})" if len(known) == len(runs) else f"({shown})")
        best = ", ".join(f"{max((a for _, a in one['rounds']), default=0):.1%}" for one in runs)
        cells += [best, ", ".join(str(len(one["rounds"])) for one in runs)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--pilot", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default=";".join(RUNS))
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FEDDF_DATA", "data")))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "feddf-peers")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {"runs": {}}
    if not given.table:
        measure(kept, given)
    print(table(kept))


def measure(kept: dict[str, Any], given: argparse.Namespace) -> None:
    """Run what was asked for, and keep it."""
    import quiet

    print(found := quiet.look(), flush=True)
    if not found.enough:
        sys.exit(1)
    names = ["feddf, FedAvg"] if given.pilot else given.runs.split(";")
    given.folder.mkdir(parents=True, exist_ok=True)
    pythons = {peer: peers.environment(peer, given.folder) for peer in {RUNS[name][0] for name in names}}
    jobs = [(name, int(seed)) for seed in given.seeds.split(",") for name in names]
    for name, seed in [("feddf, FedAvg", PILOT)] if given.pilot else jobs:
        peer, method = RUNS[name]
        python = pythons[peer]
        if isinstance(python, str):
            kept["runs"][f"{name}, seed {seed}"] = {"rounds": [], "failure": python}
            continue
        if given.pilot:
            tried = {rate: run(peer, python, method, seed, rate, given.data) for rate in RATES}
            best = {rate: max(accuracy for _, accuracy in one["rounds"]) for rate, one in tried.items()}
            rate = max(best, key=lambda one: best[one])
            kept |= {"rate": rate, "pilot": best, "targets": [round(share * best[rate], 4) for share in SHARES]}
            print(kept["pilot"], kept["targets"], [len(one["rounds"]) for one in tried.values()])
        else:
            kept["runs"][f"{name}, seed {seed}"] = done = run(peer, python, method, seed, kept["rate"], given.data)
            print(name, seed, done["rounds"][-1:], done["failure"], flush=True)
        OUT.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
