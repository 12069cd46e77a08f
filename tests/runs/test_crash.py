"""A run that is killed, at any moment, ends after ``feddf resume`` with the bytes of one that never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from feddf.runs import RunFolder, build, load, play
from feddf.states import digest

pytestmark = pytest.mark.xdist_group("crash")

CONFIG = """
name = "crash"
data = "toy"
pool = "plane"
clients = 6
fraction = 0.5
alpha = 1.0
rounds = 4
local_epochs = 60
distill_steps = 60
distill_check = 20
workers = 2
prototypes = ["mlp", {model = "mlp", name = "wide", width = 200}]
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "crash.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def reference(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    """The run that is never stopped; in this process, which must not matter."""
    experiment = load(str(config), ["engine=in-process"])
    folder = RunFolder.create(tmp_path_factory.mktemp("reference") / "run", experiment)
    records = list(play(build(experiment), folder))
    return digest_of(folder.path), [without_time(record) for record in records]


def digest_of(path: Path) -> str:
    server, complaints = RunFolder.open(path).latest()
    assert server is not None
    assert server.round == 4
    assert complaints == []
    return digest(server.models)


def without_time(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "seconds"}


def feddf(*words: str, **options: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", "feddf", *words], stdout=pipe, stderr=pipe, text=True, **options)


def resume(run: Path) -> None:
    """Go on with a process of its own, and with worker processes."""
    resumed = feddf("resume", str(run))
    _, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors


def resume_here(run: Path) -> None:
    """Go on in this process, which is quicker."""
    folder = RunFolder.open(run)
    list(play(build(folder.experiment()), folder))


def check(run: Path, reference: tuple[str, list[dict]]) -> None:
    assert digest_of(run) == reference[0]
    assert [without_time(record) for record in RunFolder.open(run).records()] == reference[1]


PLACES = {
    # where the server kills itself: (module, function, the call at which it happens, before or after it)
    "while clients train": ("feddf.rounds", "admit", 5, "before"),
    "while students learn": ("feddf.fusion.distill", "kl_divergence", 250, "before"),
    "while models are tested": ("feddf.runs.run", "judge", 2, "before"),
    "before a log line": ("feddf.runs.store.RunFolder", "append", 2, "before"),
    "between log line and checkpoint": ("feddf.runs.store.RunFolder", "append", 2, "after"),
    "after a checkpoint": ("feddf.runs.store.RunFolder", "save", 2, "after"),
    "before a checkpoint's rename": ("pathlib.Path", "replace", 11, "before"),
    "between checksum and checkpoint": ("feddf.runs.store", "write_atomically", 5, "before"),
    "after the first finished client of a round": ("pathlib.Path", "replace", 7, "after"),
    "before the models are written": ("feddf.runs.store.RunFolder", "finish", 1, "before"),
}

SUICIDE = """
import importlib, os, signal, sys
place, name, call, when = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1)), sys.argv.pop(1)
try:
    home = importlib.import_module(place)
except ModuleNotFoundError:
    module, _, kind = place.rpartition(".")
    home = getattr(importlib.import_module(module), kind)
original, calls = getattr(home, name), 0
def wrapped(*args, **kwargs):
    global calls
    calls += 1
    if calls == call and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*args, **kwargs)
    if calls == call:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
if __name__ == "__main__":
    import feddf.cli
    setattr(home, name, wrapped)
    sys.argv[0] = "feddf"
    feddf.cli.main()
"""


@pytest.mark.parametrize("place", PLACES)
def test_killed_at_a_chosen_place(place: str, config: Path, reference: tuple[str, list[dict]], tmp_path: Path) -> None:
    script, run = tmp_path / "suicide.py", tmp_path / "run"
    script.write_text(SUICIDE)
    words = [*map(str, PLACES[place]), "run", str(config), "engine=in-process", "--out", str(run)]
    died = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=120)
    assert died.returncode == -signal.SIGKILL, died.stderr
    resume_here(run)
    check(run, reference)


def test_killed_again_and_again_with_its_workers_running(
    config: Path, reference: tuple[str, list[dict]], tmp_path: Path
) -> None:
    """Each try is killed after one more finished round, as soon as its line is seen; then it is resumed."""
    run = tmp_path / "run"
    words = ["run", str(config), "--out", str(run)]
    for _ in range(3):
        server = feddf(*words)
        assert server.stdout is not None
        while "fused" not in (line := server.stdout.readline()):
            assert line or server.poll() is None, server.communicate()
        server.kill()
        server.communicate()
        words = ["resume", str(run)]
    resume(run)
    check(run, reference)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGINT, 130)])
def test_asked_to_stop_it_stops_soon_and_says_how_to_go_on(
    config: Path, reference: tuple[str, list[dict]], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job would ignore it
    server = feddf("run", str(config), "--out", str(run), start_new_session=True, preexec_fn=listen)
    assert server.stdout is not None
    while "fused" not in server.stdout.readline():
        assert server.poll() is None
    os.killpg(server.pid, number)  # as a terminal does: to the workers too
    _, errors = server.communicate(timeout=10)
    assert server.returncode == code
    assert f"feddf resume {run}" in errors
    assert "Traceback" not in errors
    resume(run)
    check(run, reference)


def test_a_damaged_checkpoint_costs_one_round_and_is_said(
    config: Path, reference: tuple[str, list[dict]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = feddf("run", str(config), "engine=in-process", "--out", str(run))
    done.communicate(timeout=120)
    path = run / "checkpoints" / "round-0004.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    resumed = feddf("resume", str(run))
    output, errors = resumed.communicate(timeout=120)
    assert "round-0004.safetensors is damaged (its checksum does not match)" in errors
    assert "3 of 4 rounds are done" in output
    assert digest_of(run) == reference[0]
    assert [record["round"] for record in RunFolder.open(run).records()] == [1, 2, 3, 4]
