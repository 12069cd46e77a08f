"""A long trial of what must never be lost: kills, damaged bytes, and clients that fail. ``make soak`` runs it.

Each part is a function of its size, so that the tests run the same code in seconds. The summary is written to
``docs/reliability.md``, between its markers.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import safetensors
import safetensors.torch
import tomli_w
import torch

from feddf.admit import admit
from feddf.config import load, parse
from feddf.config.errors import FeddfError
from feddf.engines import in_process
from feddf.report.read import read_run
from feddf.rounds import run_rounds
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder, pack
from feddf.states import digest
from feddf.types import Client, Failure, Job, Reply, ServerState

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


class Lost(Exception):
    """Something that must never happen."""


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


def mutations(count: int, folder: Path, seed: int = 0) -> str:
    """Change bytes of updates, configurations, checkpoints and logs; each is refused, or read as what it was."""
    each = max(1, count // 4)
    made = {
        "updates": _mutated_updates(each, folder, seed),
        "configurations": _mutated_configurations(each, seed),
        "checkpoints": _mutated_checkpoints(each, folder, seed),
        "logs": _mutated_logs(each, folder, seed),
    }
    shown = ", ".join(f"{refused:,} of {each:,} {name} refused or repaired" for name, refused in made.items())
    return f"{4 * each:,} mutations: {shown}; no crash, and no wrong model believed"


def _changed(content: bytes, chance: random.Random) -> bytes:
    """Return the bytes with some of them changed, cut off, doubled or left out."""
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found)) if found else 0
        kind = chance.randrange(5)
        if kind < 3 and found:
            found[at] ^= 1 << chance.randrange(8)
        elif kind == 3:
            del found[at : at + chance.randint(1, 8)]
        else:
            found[at:at] = found[at : at + chance.randint(1, 8)]
    return bytes(found)


def _mutated_updates(count: int, folder: Path, seed: int) -> int:
    """Uploads as safetensors bytes, as a server would read them."""
    chance, refused = random.Random(seed), 0
    state = {"layer.weight": torch.randn(4, 3), "layer.bias": torch.zeros(4), "n": torch.tensor(3)}
    job = Job(Client("c", "m"), 1, state, 0)
    content = safetensors.torch.save(state)
    for _ in range(count):
        try:
            read = safetensors.torch.load(_changed(content, chance))
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError):
            refused += 1
            continue
        reply = Reply("c", "m", 1, read, chance.choice([10, -1, 0, 10**30]))
        refused += isinstance(admit(reply, {"c": job}), Failure)
    return refused


def _mutated_configurations(count: int, seed: int) -> int:
    import tomllib

    chance, refused = random.Random(seed + 1), 0
    content = tomli_w.dumps(REAL).encode()
    for _ in range(count):
        try:
            parse(tomllib.loads(_changed(content, chance).decode()))
        except (FeddfError, ValueError):
            refused += 1
    return refused


def _mutated_checkpoints(count: int, folder: Path, seed: int) -> int:
    chance, refused = random.Random(seed + 2), 0
    run = RunFolder.create(folder / "checkpoints", parse({**REAL}))
    states = [ServerState(number, {"m": {"w": torch.full((20,), float(number))}}) for number in (1, 2)]
    for state in states:
        run.save(state, keep=2)
    newest = run.checkpoints / "round-0002.safetensors"
    content, checksum = newest.read_bytes(), newest.with_suffix(".sha256").read_bytes()
    for _ in range(count):
        path, whole = chance.choice([(newest, content), (newest.with_suffix(".sha256"), checksum)])
        path.write_bytes(_changed(whole, chance))
        found, complaints = run.latest()
        if found is None or pack(found) not in (pack(states[0]), pack(states[1])):
            raise Lost("a damaged checkpoint was believed")
        refused += bool(complaints)
        path.write_bytes(whole)
    return refused


def _mutated_logs(count: int, folder: Path, seed: int) -> int:
    chance, repaired = random.Random(seed + 3), 0
    run = RunFolder.create(folder / "logs", parse({**REAL}))
    for number in range(1, 6):
        run.append({"round": number, "models": {}})  # type: ignore[typeddict-item]
    content = run.metrics.read_bytes()
    lines = content.splitlines()
    for _ in range(count):
        found = _changed(content, chance)
        run.metrics.write_bytes(found)
        read = {record["round"] for record in run.records()}
        repaired += bool(run.damage())
        whole = {number for number, line in enumerate(lines, 1) if line in found.split(b"\n")}
        if not whole <= read or not read_run(run.path).config:
            raise Lost(f"a damaged line cost others: rounds {sorted(whole)} are whole, {sorted(read)} were read")
    run.metrics.write_bytes(content)
    return repaired


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
            early = _megabytes()
        if closed == rounds:
            late = _megabytes()
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


def _megabytes() -> float:
    for line in Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []:
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# The whole


PARTS: dict[str, Callable[[Path, float], str]] = {
    "kills": lambda folder, size: kills(max(1, round(200 * size)), folder),
    "failpoints": lambda folder, size: failpoints(folder),
    "mutations": lambda folder, size: mutations(max(4, round(100_000 * size)), folder),
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
