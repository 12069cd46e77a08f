"""A long trial of what must never be lost: kills, damaged bytes, and clients that fail. ``make soak`` runs it.

Each part is a function of its size, so that the tests run the same code in seconds. The summary is written to
``docs/reliability.md``, between its markers.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import tomli_w
import torch
from fuzz import PARSERS, Lost, fuzz, memory

from feddf.config import load, parse
from feddf.engines import in_process
from feddf.report.read import read_run
from feddf.rounds import run_rounds
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.states import digest
from feddf.types import Job, Reply

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
PLACES = Path(__file__).parents[1] / "tests" / "runs" / "test_crash.py"

REAL = {
    "name": "soak",
    "rounds": 6,
    "prototypes": ["mlp", {"model": "mlp", "name": "wide", "width": 200}],
    "data": {"name": "toy"},
    "pool": {"sources": ["plane"]},
    "clients": {"total": 8, "fraction": 0.5},
    "local": {"epochs": 40},
    "distill": {"steps": 60, "eval_every": 20},
    "run": {"workers": 2},
}


MARK = "FEDDF_SOAK_MARK"
"""A variable that tells the processes of this trial from others."""

LONGEST = 9.0
"""Seconds that a run may go on before it is killed: about as long as it takes from its start to its third round."""


@dataclass(frozen=True)
class Part:
    """What a part of the trial did and found."""

    name: str
    found: str
    seconds: float


# Kills


def kills(count: int, folder: Path, seed: int = 0) -> str:
    """Kill a run with worker processes at random moments, go on each time; all runs end with one hash."""
    moments = random.Random(seed)
    config = folder / "soak.toml"
    config.write_text(tomli_w.dumps(REAL))
    expected = _straight(config, folder / "straight")
    done = runs = 0
    while done < count:
        path = folder / f"killed-{runs}"
        RunFolder.create(path, load(str(config)))
        while done < count and not _has_ended(path):
            done += _killed(path, moments.uniform(0, LONGEST))
        _command(["resume", str(path)])
        if _hash(path) != expected:
            raise Lost(f"{path} ended with other models after kills")
        shutil.rmtree(path)
        runs += 1
    return f"{done} SIGKILLs at random moments of {runs} runs with worker processes: one hash, {orphans()} orphans left"


def _straight(config: Path, path: Path) -> str:
    experiment = load(str(config), ["engine=in-process"])
    list(run_experiment(build(experiment), RunFolder.create(path, experiment)))
    return _hash(path)


def _killed(path: Path, after: float) -> bool:
    """Go on with a run and kill it, with its workers, after some seconds; return whether it was still going on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "feddf", "resume", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, MARK: str(os.getpid())},
    )
    try:
        process.wait(timeout=after)
        return False
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)  # the server alone: its workers must end by themselves
        process.wait()
        return True


def _has_ended(path: Path) -> bool:
    return (path / "models").is_dir() and max(read_run(path).rounds, default=0) >= REAL["rounds"]


def _command(words: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "feddf", *words], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise Lost(f"feddf {' '.join(words)}: {done.stderr.strip()[-300:]}")


def _hash(path: Path) -> str:
    server, complaints = RunFolder.open(path).latest()
    if server is None or complaints:
        raise Lost(f"{path}: {complaints or 'no checkpoint'}")
    return digest(server.models)


def orphans(wait: float = 20.0) -> int:
    """Return how many processes of feddf are left that have lost their parent, once they have had time to end."""
    until = time.monotonic() + wait
    while (found := _orphans()) and time.monotonic() < until:
        time.sleep(0.2)
    if found:
        raise Lost(f"processes left: {found}")
    return 0


def _orphans() -> list[int]:
    """Return the processes that were started here, by the mark in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={os.getpid()}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def failpoints(folder: Path) -> str:
    """Kill a run at every stage, by the test that knows the places."""
    command = [sys.executable, "-m", "pytest", "-n", "0", str(PLACES), "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PLACES.parents[2])
    if done.returncode:
        raise Lost(done.stdout[-500:])
    return f"a kill at every stage of a round: {done.stdout.strip().splitlines()[-1].strip('= ')}"


# Mutations


def mutations(count: int, folder: Path, processes: int = 0) -> str:
    """Give changed inputs to every parser of files and messages from elsewhere (benchmarks/fuzz.py)."""
    each = max(1, count // len(PARSERS))
    if processes:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            found = list(pool.map(fuzz, PARSERS, [each] * len(PARSERS)))
    else:
        found = [fuzz(name, each) for name in PARSERS]
    most = max(one.megabytes for one in found)
    said = "no crash, nothing written, no wrong model believed"
    return f"{len(PARSERS) * each:,} mutations: {'; '.join(map(str, found))}; {said}; memory up to {most:.0f} MB"


# Clients that fail


def unreliable(rounds: int, folder: Path, seed: int = 0) -> str:
    """Rounds in which a tenth of the clients fails, is late or sends nonsense: each ends, and memory stays flat."""
    experiment = parse(
        {**REAL, "clients": {"total": 20, "fraction": 0.5, "quorum": 0.5}, "run": {"engine": "in-process"}}
    )
    parts = build(experiment)
    chance = random.Random(seed)
    train = partial(_unreliable, parts.train, chance)
    closed = failures = 0
    early = late = 0.0
    parts.engine.become(in_process)
    running = run_rounds(
        parts.server,
        parts.federation,
        engine=in_process,
        train=train,
        fuse=parts.method.fuse,
        parts=parts.method.parts,
    )
    for closed, one in enumerate(running, 1):
        failures += len(one.failures)
        if one.server.round != closed:
            raise Lost(f"round {closed} was counted as {one.server.round}")
        if closed == max(1, rounds // 3):
            early = memory()
        if closed == rounds:
            late = memory()
            break
    if late > early * 1.2 + 50:
        raise Lost(f"memory grew from {early:.0f} to {late:.0f} MB")
    return (
        f"{closed} rounds with {failures} failed clients: every round ended; memory {early:.0f} MB, later {late:.0f} MB"
    )


def _unreliable(train: Callable[[Job], Reply], chance: random.Random, job: Job) -> Reply:
    drawn = chance.random()
    if drawn < 0.04:
        raise RuntimeError("the client's machine caught fire")
    reply = train(job)
    if drawn < 0.07:
        return replace(reply, round=reply.round - 1)  # a straggler's, of the round before
    if drawn < 0.10:
        return replace(reply, state={key: tensor * float("nan") for key, tensor in reply.state.items()})
    return reply


# The whole


PARTS: dict[str, Callable[[Path, float], str]] = {
    "kills": lambda folder, size: kills(max(1, round(200 * size)), folder),
    "failpoints": lambda folder, size: failpoints(folder),
    "mutations": lambda folder, size: mutations(max(10, round(1_000_000 * size)), folder, processes=2),
    "unreliable": lambda folder, size: unreliable(max(3, round(50 * size)), folder),
}


def run(names: Sequence[str], size: float) -> Iterator[Part]:
    """Run parts, one after the other, and yield each when it is done; the first loss ends the trial."""
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="feddf-soak-") as folder:
            said = PARTS[name](Path(folder), size)
        yield Part(name, said, time.monotonic() - began)


def write(part: Part, page: Path = PAGE) -> None:
    """Write a part's row between the page's markers; rows of the other parts stay as they are."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {line.split(" | ")[0].strip("| "): line for line in old.splitlines() if line.startswith("| ")}
    day = time.strftime("%Y-%m-%d")
    rows[part.name] = f"| {part.name} | {part.found} | {part.seconds:.0f} | {day}, {os.cpu_count()} cores |"
    table = "\n".join(rows[name] for name in PARTS if name in rows)
    head = "| part | found | seconds | run on |\n|---|---|---:|---|"
    page.write_text(f"{before}{BEGIN}\n{head}\n{table}\n{END}{after}", encoding="utf-8")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    words.add_argument("--size", type=float, default=1.0, help="a share of the full size")
    words.add_argument("--write", action="store_true", help="write the summary to docs/reliability.md")
    given = words.parse_args()
    torch.set_num_threads(1)
    for part in run(given.parts, given.size):
        print(f"{part.name}: {part.found} ({part.seconds:.0f} s)", flush=True)
        if given.write:
            write(part)


if __name__ == "__main__":
    main()
