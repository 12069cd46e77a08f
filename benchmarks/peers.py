"""FedAvg side by side: feddf, Flower's simulation and pfl-research do the same work: ``python benchmarks/peers.py``.

Each peer has a virtual environment of its own, which is made on the first call (``--folder`` keeps them), and does its
work in processes of its own (``peer_programs/``). The peers take turns, ``--repeats`` times. Of each command four
things are measured: the seconds of a round (all but the first, in which workers start, caches fill and pfl evaluates);
those that its processes computed in such a round, which a busy machine changes less; start-up and end, which is the
whole command without as many such rounds; and the peak of its memory (the sum of proportional set sizes of all of its
processes, looked at five times a second). That is looked at in the first repeat, whose times do not count: to add up
the pages of a process takes some of the time of both cores. Median, lowest and highest are given.
Nothing else should run meanwhile. ``bare`` is the floor: the training steps alone. A peer called ``feddf-NAME`` is
another version of feddf, in an environment that was made by hand (``FOLDER/venv-feddf-NAME``, with an empty file
``installed``). Other cases' results stay as they are.

    python benchmarks/peers.py                      # about an hour on two cores
    python benchmarks/peers.py --tiny --repeats 1   # does it work?
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).parent / "peer_programs"
sys.path.insert(0, str(PROGRAMS))

CASES: dict[str, dict[str, Any]] = {
    "large": {"clients": 20, "cohort": 8, "examples": 2250, "batch": 64, "rate": 0.05},
    "small": {"clients": 1000, "cohort": 50, "examples": 45, "batch": 64, "rate": 0.05},
    "batch 10": {"clients": 1000, "cohort": 50, "examples": 50, "batch": 10, "rate": 0.05},
    # benchmarks/image_classification/configs/baseline.yaml of pfl-research, word for word
    "pfl's own": {
        "clients": 1000, "cohort": 50, "examples": 50, "batch": 10, "rate": 0.1, "network": "simple_cnn", "tested": True
    },
}  # fmt: skip
TINY = {"clients": 8, "cohort": 4, "examples": 10}
TORCH = "torch==2.13.0"
PACKAGES = {
    "feddf": ["-c", str(ROOT / "constraints.txt"), TORCH, str(ROOT)],
    "flower": ["-c", str(ROOT / "constraints.txt"), TORCH, "flwr[simulation]==1.41.0"],
    "pfl": [TORCH, "pfl[pytorch]==0.6.0"],
    "bare": [TORCH, "numpy"],
}


@dataclass
class Measured:
    """What was measured of one peer in one case."""

    rounds: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    failure: str = ""


def environment(peer: str, folder: Path) -> Path | str:
    """Make a peer's virtual environment, unless it is there; return its Python, or why it cannot be installed."""
    place = folder / f"venv-{peer}"
    python, done = place / "bin" / "python", place / "installed"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[peer]]
    outcome = subprocess.run(install, capture_output=True, text=True, check=False)
    if outcome.returncode:
        said = [line for line in outcome.stderr.splitlines() if line.startswith("ERROR")]
        return f"cannot be installed here: {(said or ['pip failed'])[-1]}"
    done.touch()
    return python


def command(peer: str, python: Path, work: dict[str, Any]) -> list[str]:
    """Return how a peer is started: pfl's own way to use several processes is torchrun."""
    program = [str(PROGRAMS / f"with_{peer.partition('-')[0]}.py"), json.dumps(work)]
    if peer != "pfl" or work["workers"] < 2:
        return [str(python), *program]
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={work['workers']}"]
    return [str(python), *several, *program]


def surroundings(home: Path) -> dict[str, str]:
    """Return the environment variables of a peer's programs."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PEERS_"))}
    return {**clean, "PYTHONPATH": str(PROGRAMS), "FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"}


def measure(peer: str, python: Path, work: dict[str, Any], into: Measured, *, memory: bool, times: bool) -> None:
    """Run a peer once, and add what it took: memory, or times, which looking at memory makes longer."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        process = subprocess.Popen(
            command(peer, python, work),
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            cwd=PROGRAMS,
            env=surroundings(Path(home)),
        )
        family = Family(process.pid, memory)
        output, _ = process.communicate()
        whole = time.perf_counter() - began
        family.stop()
        lines = [line for line in output.splitlines() if line.startswith('{"rounds"')]
        if process.returncode or not lines:
            said.seek(0)
            into.failure = (said.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1][:200]
            return
    said_last = json.loads(lines[-1])
    rounds, ends = said_last["rounds"], said_last["ends"]
    if work.get("tested"):
        from common import Work, tried

        into.accuracies.append(tried(Work(**work)))
    if memory:
        into.memory.append(family.bytes / 2**20)
    if not times:
        return
    into.rounds += rounds[1:]
    into.outside.append(whole - len(rounds) * statistics.median(rounds[1:] or rounds))
    if len(ends) > 1:
        into.processor.append((family.computed(ends[-1]) - family.computed(ends[0])) / (len(ends) - 1))


class Family:
    """Watches the memory of a process and of all that it has started, and the seconds that they have computed."""

    def __init__(self, root: int, memory: bool) -> None:
        self.bytes, self._memory = 0, memory
        self._seconds: dict[int, float] = {}  # by process; one that has ended keeps its last
        self._looks: list[tuple[float, float]] = []
        self._root, self._ended = root, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            pids = members(self._root)
            if self._memory:
                self.bytes = max(self.bytes, sum(_proportional(pid) for pid in pids))
            self._seconds |= {pid: seconds for pid in pids if (seconds := _computed(pid)) is not None}
            self._looks.append((time.time(), sum(self._seconds.values())))

    def computed(self, until: float) -> float:
        """Return the processor's seconds until a time."""
        return min(self._looks, key=lambda look: abs(look[0] - until))[1]

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()


def members(root: int) -> set[int]:
    """Return a process and its descendants. Ray's daemons leave their parents: they are known by their session."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(words[1]), int(words[3])
    found = {root}
    while more := {pid for pid, (parent, session) in parents.items() if parent in found or session in found} - found:
        found |= more
    return found


def _computed(pid: int) -> float | None:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # it has ended
        pass
    return 0


def table(results: dict[str, dict[str, Measured]]) -> str:
    """Return the measurements as Markdown."""
    lines = [
        "| work | peer | seconds a round | computed in it, s | start-up and end, s | peak memory, MiB | accuracy |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case, peers in results.items():
        for peer, found in peers.items():
            columns = found.rounds, found.processor, found.outside, found.memory, found.accuracies
            cells = " | ".join(map(_spread, columns)) if found.rounds else f"{found.failure} | | | |"
            lines.append(f"| {case} | {peer} | {cells} |")
        own = results[case].get("feddf", Measured()).rounds
        for peer, found in peers.items():
            if peer != "feddf" and own and found.rounds:
                ratio = statistics.median(found.rounds) / statistics.median(own)
                lines.append(f"| {case} | {peer} / feddf | {ratio:.2f} × | | | | |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--peers", default=",".join(PACKAGES))
    parser.add_argument("--rounds", type=int, default=4, help="of each command; the first is not counted")
    parser.add_argument("--tested-rounds", type=int, default=20, help="where the last model is tried")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cifar", type=Path, default=Path(os.environ.get("FEDDF_DATA", "data")), help="for pfl's own")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it works")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "feddf-peers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "peers.md")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    pythons = {peer: environment(peer, given.folder) for peer in given.peers.split(",")}
    import quiet
    from common import write_cifar, write_data  # need numpy and torch

    print(found := quiet.look(), flush=True)
    if not found.enough and not given.tiny:
        sys.exit(1)

    results: dict[str, dict[str, Measured]] = {}
    raw_file = given.out.with_suffix(".json")
    if raw_file.exists() and not given.tiny:  # cases that are not measured now stay
        kept = json.loads(raw_file.read_text(encoding="utf-8"))
        results = {case: {peer: Measured(**found) for peer, found in peers.items()} for case, peers in kept.items()}
    for case in given.cases.split(","):
        size = {**CASES[case], **(TINY if given.tiny else {})}
        results[case] = {peer: Measured() for peer in pythons}
        with tempfile.TemporaryDirectory() as data:
            if size.get("tested"):
                write_cifar(Path(data), given.cifar, size["clients"] * size["examples"])
            else:
                write_data(Path(data), size["clients"] * size["examples"])
            rounds = given.tested_rounds if size.get("tested") and not given.tiny else given.rounds
            work = {**size, "rounds": rounds, "workers": given.workers, "folder": data}
            for repeat in range(given.repeats):
                for peer, python in pythons.items():  # in turn: the machine's speed changes from minute to minute
                    if isinstance(python, str):
                        results[case][peer].failure = python
                        continue
                    alone = given.repeats == 1
                    measure(peer, python, work, results[case][peer], memory=repeat == 0, times=repeat > 0 or alone)
                    print(f"{case}, repeat {repeat + 1}, {peer}: {results[case][peer]}", file=sys.stderr, flush=True)
    text = table(results)
    print(text)
    if not given.tiny:
        given.out.parent.mkdir(exist_ok=True)
        given.out.write_text(text + "\n", encoding="utf-8")
        raw = {case: {peer: vars(found) for peer, found in peers.items()} for case, peers in results.items()}
        raw_file.write_text(json.dumps(raw, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
