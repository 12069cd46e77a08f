"""A run that is killed, at any moment, ends after ``feddf resume`` with the bytes of one that never was.

By default every place is tried once with a small run. ``make long-test`` (FEDDF_SOAK=1) takes a longer run, goes on
with worker processes everywhere, and kills again and again at random moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path

import pytest
import safetensors

from feddf.config import load, with_values
from feddf.config.foreign import parse_json
from feddf.privacy.releases import read_ledger
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.spool import StateOnDisk
from feddf.runs.store import RunFolder
from feddf.states import digest
from test_cli import feddf as feddf_here

pytestmark = pytest.mark.xdist_group("crash")

SOAK = os.environ.get("FEDDF_SOAK") == "1"
ROUNDS, EPOCHS, STEPS = (4, 60, 60) if SOAK else (3, 20, 20)

CONFIG = f"""
name = "crash"
rounds = {ROUNDS}
prototypes = ["mlp", {{model = "mlp", name = "wide", width = 200}}]

[data]
name = "toy"

[pool]
sources = ["plane"]

[clients]
total = 6
fraction = 0.5

[local]
epochs = {EPOCHS}

[distill]
steps = {STEPS}
eval_every = 10

[run]
workers = {2 if SOAK else 1}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "crash.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def reference(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    return straight(config, ROUNDS, tmp_path_factory.mktemp("reference") / "run")


def straight(config: Path, rounds: int, path: Path) -> tuple[str, list[dict]]:
    """The run that is never stopped; in this process, which must not matter."""
    experiment = load(str(config), ["engine=in-process", f"rounds={rounds}"])
    records = list(run_experiment(build(experiment), RunFolder.create(path, experiment)))
    assert len(records) == rounds
    return digest_of(path), [without_time(record) for record in records]


def digest_of(path: Path) -> str:
    server, complaints = RunFolder.open(path).latest()
    assert server is not None
    assert server.round == RunFolder.open(path).experiment().rounds
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
    experiment = with_values(folder.experiment(), {"run.engine": "in-process"})
    list(run_experiment(build(experiment), folder))


def check(run: Path, reference: tuple[str, list[dict]]) -> None:
    assert digest_of(run) == reference[0]
    assert [without_time(record) for record in RunFolder.open(run).records()] == reference[1]


PLACES = {
    # where the server kills itself: (module, function, the call at which it happens, before or after it)
    "while clients train": ("feddf.rounds", "admit", 5, "before"),
    "while students learn": ("feddf.fusion.ensemble.CachedTargets", "__call__", 4 * STEPS + 10, "before"),
    "while models are tested": ("feddf.runs.run.Recorder", "record", 2, "before"),
    "before a log line": ("feddf.runs.store.RunFolder", "append", 2, "before"),
    "between log line and checkpoint": ("feddf.runs.store.RunFolder", "append", 2, "after"),
    "after a checkpoint": ("feddf.runs.store.RunFolder", "save", 2, "after"),
    "before a checkpoint's rename": ("pathlib.Path", "replace", 13, "before"),
    "between checksum and checkpoint": ("feddf.runtime.atomic", "write_atomically", 6, "before"),
    "after the first finished client of a round": ("pathlib.Path", "replace", 9, "after"),
    "before the models are written": ("feddf.runs.store.RunFolder", "finish", 1, "before"),
}

VICTIMS = """
# Imports torch once; then for every line of its input a fork runs the command line and kills itself at a place.
import importlib, json, os, signal, sys
import torch._dynamo  # which the first step of an optimizer would import
import feddf.cli, feddf.fusion.feddf, feddf.runs.build, feddf.runs.run
def kill_at(place, name, call, when):
    try:
        home = importlib.import_module(place)
    except ModuleNotFoundError:
        module, _, kind = place.rpartition(".")
        home = getattr(importlib.import_module(module), kind)
    original, calls = getattr(home, name), 0
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(home, name, wrapped)
for line in sys.stdin:
    place, words = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(2, 1)  # what the command prints is no answer
        kill_at(*place)
        sys.argv = ["feddf", *words]
        feddf.cli.main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Kill = Callable[[tuple[str, str, int, str], list[str]], int]


@pytest.fixture(scope="module")
def kill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kill]:
    """Run the command line until it kills itself at a place, and return its exit code."""
    script = tmp_path_factory.mktemp("victims") / "victims.py"
    script.write_text(VICTIMS)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def one(place: tuple[str, str, int, str], words: list[str]) -> int:
            process.stdin.write(json.dumps([place, words]) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield one


@pytest.mark.parametrize("place", PLACES)
def test_killed_at_a_chosen_place(
    place: str, kill: Kill, config: Path, reference: tuple[str, list[dict]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code = kill(PLACES[place], ["run", str(config), "engine=in-process", "--out", str(run)])
    assert code == -signal.SIGKILL
    if SOAK:
        subprocess.run(["sed", "-i", "s/in-process/processes/", str(run / "config.toml")], check=True)
        (run / "config.sha256").unlink()
        resume(run)
    else:
        resume_here(run)
    check(run, reference)


KEPT_PLACES = {
    "before a client's state is written": ("feddf.runs.spool.ClientStates", "write", 5, "before"),
    "after a client's state is written": ("feddf.runs.spool.ClientStates", "write", 5, "after"),
    "within the writing of a client's state": ("feddf.runs.spool", "write_checked", 4, "before"),
    "after an update is in the spool": ("feddf.runs.spool.DiskSpool", "keep", 5, "after"),
    "between log line and checkpoint": ("feddf.runs.store.RunFolder", "append", 2, "after"),
    "after a checkpoint": ("feddf.runs.store.RunFolder", "save", 2, "after"),
}
ANSWER_PLACES = {
    **{name: KEPT_PLACES[name] for name in ("before a client's state is written", "after an update is in the spool")},
    "while a client learns from the others' answers": ("feddf.fusion.answers.Digest", "distance", 3, "before"),
    "while a client answers": ("feddf.fusion.answers", "as_answers", 6, "before"),
    "while students learn": ("feddf.fusion.ensemble.CachedTargets", "__call__", 4 * STEPS + 10, "before"),
    "between log line and checkpoint": ("feddf.runs.store.RunFolder", "append", 2, "after"),
}
KEEPING = [("feddf+scaffold", place) for place in KEPT_PLACES] + [("feddf+answers", place) for place in ANSWER_PLACES]


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def path_of(method: str) -> Path:
        path = tmp_path_factory.mktemp("whole") / "run"
        experiment = load(str(config), ["engine=in-process", f"method={method}"])
        list(run_experiment(build(experiment), RunFolder.create(path, experiment)))
        return path

    return path_of


@pytest.mark.parametrize(("method", "place"), KEEPING)
def test_killed_while_clients_keep_states(
    method: str, place: str, kill: Kill, config: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    """What clients keep (SCAFFOLD's control variates, or their own models) is that of a run that was never killed."""
    run, reference = tmp_path / "run", whole(method)
    words = ["run", str(config), "engine=in-process", f"method={method}", "--out", str(run)]
    assert kill({**KEPT_PLACES, **ANSWER_PLACES}[place], words) == -signal.SIGKILL
    resume_here(run)
    (expected, _), (found, _) = (RunFolder.open(path).latest() for path in (reference, run))
    assert expected is not None
    assert found is not None
    assert digest(found.models) == digest(expected.models)
    assert {name: digest(one) for name, one in found.memory.items()} == {
        name: digest(one) for name, one in expected.memory.items()
    }
    newest = [
        {path.parent.name: path.read_bytes() for path in sorted((folder / "clients").glob("*/round-*.safetensors"))}
        for folder in (reference, run)
    ]
    assert newest[0] == newest[1]


WAYS = [signal.SIGKILL, signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("ways", [WAYS, WAYS[::-1], 4 * WAYS[:1]] if SOAK else [WAYS])
def test_killed_or_asked_to_stop_with_its_workers_running(
    config: Path, tmp_path: Path, ways: list[signal.Signals]
) -> None:
    """Each try is ended after one more finished round, as soon as its line is seen. Asked, it says how to go on."""
    run = tmp_path / "run"
    words = ["run", str(config), "rounds=1000", "--out", str(run)]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job would ignore it
    for way in ways:
        server = feddf(*words, start_new_session=True, preexec_fn=listen)
        assert server.stdout is not None
        while ": round " not in (line := server.stdout.readline()):
            assert line or server.poll() is None, server.communicate()
        if way == signal.SIGKILL:
            server.kill()
            server.communicate()
        else:
            os.killpg(server.pid, way)  # as a terminal does: to the workers too
            _, errors = server.communicate(timeout=30)
            assert server.returncode == 130
            assert f"feddf resume {run}" in errors
            assert "Traceback" not in errors
        words = ["resume", str(run)]
    rounds = len(RunFolder.open(run).records()) + 1  # one more, and then compared
    config_file = run / "config.toml"
    config_file.write_text(config_file.read_text().replace("rounds = 1000", f"rounds = {rounds}"))
    config_file.with_suffix(".sha256").unlink()
    (resume if SOAK else resume_here)(run)
    check(run, straight(config, rounds, tmp_path / "straight"))


@pytest.mark.skipif(not SOAK, reason="minutes; make long-test")
@pytest.mark.parametrize("seed", range(5))
def test_killed_again_and_again_at_random_moments(
    config: Path, reference: tuple[str, list[dict]], tmp_path: Path, seed: int
) -> None:
    run, moments = tmp_path / "run", random.Random(seed)
    for _ in range(8):
        there = (run / "config.toml").exists()
        server = feddf(*(["resume", str(run)] if there else ["run", str(config), "--out", str(run)]))
        time.sleep(moments.uniform(2, 7))
        server.kill()
        server.communicate()
    resume(run)
    check(run, reference)


def test_a_damaged_checkpoint_costs_one_round_and_is_said(
    config: Path, reference: tuple[str, list[dict]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    straight(config, ROUNDS, run)
    path = run / "checkpoints" / f"round-{ROUNDS:04d}.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    resumed = feddf_here("resume", "run", cwd=tmp_path)
    assert f"{path.name} is damaged (its checksum does not match)" in resumed.stderr
    assert f"{ROUNDS - 1} of {ROUNDS} rounds are done" in resumed.stdout
    check(run, reference)


def test_a_clock_that_is_set_back_changes_nothing(
    config: Path, reference: tuple[str, list[dict]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines and seconds are taken from clocks that nobody sets; wall-clock time is shown and no more."""
    experiment = load(str(config), ["clients.timeout=60"])
    folder = RunFolder.create(tmp_path / "run", experiment)
    jumps = count(time.time(), -86_400.0)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    records = list(run_experiment(build(experiment), folder))
    server, _ = folder.latest()
    assert server is not None
    assert digest(server.models) == reference[0]
    assert all(seconds >= 0 for record in records for seconds in record["seconds"].values())
    assert not any(record["dropped"] for record in records)


PRIVATE = {
    "record": [
        "privacy.level=record",
        "privacy.epsilon=200",
        "privacy.noise=0.6",
        "privacy.sampling=0.25",
        "local.epochs=2",
    ],
    "client": ["privacy.level=client", "privacy.epsilon=600", "prototypes=linear", "privacy.clip=5"],
}
PRIVATE_PLACES = {
    ("record", "while clients train"): ("feddf.rounds", "admit", 5, "before"),
    ("record", "before an update is stored"): ("feddf.runs.spool.DiskSpool", "keep", 5, "before"),
    ("record", "between store and ledger"): ("feddf.privacy.releases.Releases", "write_down", 5, "before"),
    ("record", "after the ledger's line"): ("feddf.privacy.releases.Releases", "write_down", 5, "after"),
    ("record", "between log line and checkpoint"): ("feddf.runs.store.RunFolder", "append", 2, "after"),
    ("client", "before the noise"): ("feddf.privacy.noise", "normal", 3, "before"),
    ("client", "between store and ledger"): ("feddf.privacy.releases.Releases", "write_down", 2, "before"),
    ("client", "after the ledger's line"): ("feddf.privacy.releases.Releases", "write_down", 2, "after"),
    ("client", "while students learn"): ("feddf.fusion.ensemble.CachedTargets", "__call__", STEPS + 10, "before"),
    ("client", "between log line and checkpoint"): ("feddf.runs.store.RunFolder", "append", 2, "after"),
    ("client", "after a checkpoint"): ("feddf.runs.store.RunFolder", "save", 2, "after"),
}


@pytest.mark.parametrize("place", PRIVATE_PLACES, ids=" ".join)
def test_killed_with_privacy_it_spends_the_same_and_releases_nothing_twice(
    place: tuple[str, str], kill: Kill, config: Path, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", PRIVATE[place[0]]
    code = kill(PRIVATE_PLACES[place], ["run", str(config), "engine=in-process", *words, "--out", str(run)])
    assert code == -signal.SIGKILL
    before = read_ledger(run)
    stored = {path.name: path.read_bytes() for path in (*run.glob("spool/*.safe*"), *run.glob("releases/*.safe*"))}
    resume_here(run)
    after, records = read_ledger(run), RunFolder.open(run).records()
    assert after[: len(before)] == before  # nothing is taken back
    names = [(line["round"], line["what"]) for line in after[1:]]
    assert len(set(names)) == len(names)  # nothing is released twice
    trained = sum(len(record["clients"]) for record in records)
    assert len(names) == (trained if place[0] == "record" else ROUNDS)
    assert all(not record["dropped"] for record in records)
    for name, content in stored.items():  # what was stored before the kill is what was used
        if (run / "releases" / name).exists():
            assert (run / "releases" / name).read_bytes() == content
    untouched = build(RunFolder.open(run).experiment()).privacy
    assert untouched is not None
    counts = Counter(what for _, what in names)
    assert records[-1]["privacy"]["epsilon"] == pytest.approx(untouched.plan.spent(max(counts.values())), abs=1e-3)


def test_an_update_that_was_stored_before_the_kill_is_the_one_that_is_released(
    kill: Kill, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    place = PRIVATE_PLACES["record", "between store and ledger"]
    assert (
        kill(place, ["run", str(config), "engine=in-process", *PRIVATE["record"], "--out", str(run)]) == -signal.SIGKILL
    )
    found = [
        parse_json(safetensors.safe_open(path, "pt").metadata()["feddf"]) for path in run.glob("spool/*.safetensors")
    ]
    unwritten = {(one["round"], one["client_id"]) for one in found} - {
        (line["round"], line["what"]) for line in read_ledger(run)[1:]
    }
    assert len(unwritten) == 1
    (number, client) = unwritten.pop()
    (path,) = (path for path in run.glob("spool/*.safetensors") if f"round-{number:04d}-{client}-" in path.name)
    expected = digest({"weights": dict(StateOnDisk(path, "state"))})
    resume_here(run)
    lines = {(line["round"], line["what"]): line["sha256"] for line in read_ledger(run)[1:]}
    assert lines[number, client] == expected
