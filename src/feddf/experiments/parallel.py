"""Many run folders, each continued in a process of its own until it has ended or failed for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from feddf.report.read import read_run
from feddf.rounds import QuorumError
from feddf.runs.store import StoreError
from feddf.runtime.atomic import write_atomically


def has_ended(path: Path) -> bool:
    """Say whether a run folder needs no more work: all rounds are done, or it failed and would fail again."""
    run = read_run(path)
    return bool(failure_of(path)) or max(run.rounds, default=0) >= run.value("rounds")


def failure_of(path: Path) -> str:
    """Return why a run failed for good, if it did."""
    note = path / "failed.txt"
    return note.read_text(encoding="utf-8") if note.is_file() else ""


def run_folders(paths: Sequence[Path], parallel: int, *, trust: bool = False) -> Iterator[tuple[Path, str]]:
    """Run the trials, each in a process of its own, ``parallel`` at a time; yield each with why it failed."""
    workers = max(1, (os.cpu_count() or 1) // parallel)
    running: set[subprocess.Popen[str]] = set()

    def run(path: Path) -> str:
        command = [sys.executable, "-P", "-m", "feddf", "resume", str(path), f"run.workers={workers}"]
        command += ["--trust"] if trust else []
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.add(process)
        _, complaint = process.communicate()
        running.discard(process)
        if process.returncode == 0:
            return ""
        reason = (complaint.strip().splitlines() or [f"exit code {process.returncode}"])[-1].removeprefix("error: ")
        if process.returncode == QuorumError.exit_code:  # its clients diverged: trying again would end in the same way
            write_atomically(path / "failed.txt", reason.encode())
            return reason
        raise StoreError(f"{path}: {reason}")

    with ThreadPoolExecutor(parallel) as pool:
        futures = {pool.submit(run, path): path for path in paths}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            for process in list(running):
                process.terminate()
            raise
