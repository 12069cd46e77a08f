from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from feddf.config import ConfigError, Experiment, parse, with_values
from feddf.report.read import read_run
from feddf.runs.many import PAPER, Trial, beyond, table, tune
from feddf.runs.store import RunFolder
from test_cli import feddf

BASE = parse(
    {
        "data": {"name": "toy", "validation": 0.2}, "pool": {"sources": ["plane"]}, "clients": {"total": 4},
        "prototypes": [{"model": "mlp", "width": 8}], "rounds": 1, "local": {"epochs": 1}, "distill": {"steps": 5},
        "fusion": {"method": "fedavg"}, "run": {"engine": "in-process"},
    }
)  # fmt: skip


def test_the_initial_grids_are_the_papers() -> None:
    assert set(PAPER["local.lr"]) == {1.5, 1, 0.5, 0.1, 0.05, 0.01}
    assert set(PAPER["local.prox_mu"]) == {0.001, 0.01, 0.1, 1}
    assert set(PAPER["fusion.momentum"]) == {0.1, 0.2, 0.3, 0.4}


@pytest.mark.parametrize(
    ("key", "values", "best", "expected"),
    [
        ("local.lr", [0.01, 0.1, 1.0], 0.1, None),
        ("local.lr", [0.01, 0.1, 1.0], 1.0, 10.0),
        ("local.lr", [0.01, 0.05, 1.0], 0.01, 0.002),
        ("fusion.momentum", [0.1, 0.2, 0.3, 0.4], 0.4, 0.5),
        ("fusion.momentum", [0.1, 0.2], 0.1, 0.0),
        ("fusion.momentum", [0.0, 0.1], 0.0, -0.1),
        ("local.prox_mu", [0.0, 0.1], 0.1, 0.2),
        ("local.lr", [0.1], 0.1, None),
    ],
)
def test_a_grid_is_extended_where_its_best_lies_on_the_edge(
    key: str, values: list[float], best: float, expected: float | None
) -> None:
    assert beyond(key, values, best) == expected


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6, unique=True))
def test_what_is_beyond_is_outside(values: list[float]) -> None:
    values = sorted({float(f"{value:.2g}") for value in values})
    if len(values) > 1:
        above, below = beyond("local.lr", values, values[-1]), beyond("local.lr", values, values[0])
        assert above is not None
        assert above > values[-1]
        assert below is not None
        assert below < values[0]


class Landscape:
    """Instead of training: folders whose records say what a made-up function of the setting gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peak: float, broken: tuple[float, ...] = ()) -> None:
        self.ran: list[str] = []

        def run_all(paths: list[Path], parallel: int, trust: bool) -> list[tuple[Path, str]]:
            found = []
            for path in paths:
                self.ran.append(path.name)
                rate = RunFolder.open(path).experiment().local.lr
                reason = "round 1 had too few usable updates" if rate in broken else ""
                if reason:
                    (path / "failed.txt").write_text(reason)
                else:
                    score = 1 / (1 + abs(rate - peak))
                    models = {"mlp": {"averaged": 0, "fused": 1 - score, "validation": score}}
                    (path / "metrics.jsonl").write_text(json.dumps({"round": 1, "models": models}) + "\n")
                    (path / "README.md").touch()  # a run's last file
                found.append((path, reason))
            return found

        monkeypatch.setattr("feddf.runs.many._run_in_processes", run_all)


def rates(trials: list[Trial]) -> list[float]:
    return sorted(trial.values["local.lr"] for trial in trials)


def test_it_stops_when_the_best_lies_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Landscape(monkeypatch, peak=3.1)
    trials, best = tune(BASE, {"local.lr": [0.1, 0.5, 1.0]}, [0], tmp_path)
    assert rates(trials) == [0.1, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert best.values["local.lr"] == 4.0


def test_the_validation_accuracy_decides_and_not_the_test_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Landscape(monkeypatch, peak=0.5)  # its test accuracy is the opposite
    _, best = tune(BASE, {"local.lr": [0.1, 0.5, 1.0]}, [0], tmp_path)
    assert best.values["local.lr"] == 0.5


def test_it_gives_up_after_so_many_extensions_and_at_the_edge_of_what_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Landscape(monkeypatch, peak=1e9)
    trials, _ = tune(BASE, {"local.lr": [1.0, 10.0]}, [0], tmp_path / "few", extensions=2)
    assert rates(trials) == [1, 10, 100, 1000]
    trials, _ = tune(BASE, {"fusion.momentum": [0.5, 0.9]}, [0], tmp_path / "edge")  # 1.3 is not below 1
    assert {trial.values["fusion.momentum"] for trial in trials} <= {0.5, 0.9, 0.1}


def test_a_second_start_runs_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land = Landscape(monkeypatch, peak=0.5, broken=(1.0,))
    first = tune(BASE, {"local.lr": [0.1, 0.5, 1.0]}, [0, 1], tmp_path)
    ran = list(land.ran)
    assert len(ran) == len(set(ran)) == 6
    second = tune(BASE, {"local.lr": [0.1, 0.5, 1.0]}, [0, 1], tmp_path)
    assert land.ran == ran
    assert first[1].values == second[1].values


def test_a_setting_that_fails_is_said_and_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Landscape(monkeypatch, peak=1.0, broken=(1.0,))
    trials, best = tune(BASE, {"local.lr": [0.1, 0.5, 1.0, 2.0]}, [0], tmp_path, extensions=0)
    text = table(trials, best).markdown()
    assert "| 1 | failed | round 1 had too few usable updates |  |" in text
    assert best.values["local.lr"] == 0.5
    assert text.count("best") == 1


def test_nothing_that_works_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Landscape(monkeypatch, peak=1.0, broken=(0.1, 0.5))
    with pytest.raises(ConfigError, match="no setting came to its end"):
        tune(BASE, {"local.lr": [0.1, 0.5]}, [0], tmp_path)


def test_without_validation_data_nothing_can_be_chosen(tmp_path: Path) -> None:
    blind = with_values(BASE, {"data.validation": 0.0})
    with pytest.raises(ConfigError, match="chosen on validation data"):
        tune(blind, {"local.lr": [0.1]}, [0], tmp_path)


def config_file(folder: Path, experiment: Experiment) -> Path:
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps(experiment.model_dump(exclude_none=True)))
    return path


@pytest.mark.xdist_group("tune")
def test_the_command_runs_real_trials_in_parallel_and_goes_on_after_sigkill(tmp_path: Path) -> None:
    file = config_file(tmp_path, with_values(BASE, {"rounds": 2}))
    words = [
        "tune",
        str(file),
        "local.lr=0.01,0.1,1.0",
        "--parallel",
        "2",
        "--extensions",
        "0",
        "--out",
        str(tmp_path / "out"),
    ]
    command = [sys.executable, "-m", "feddf", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()  # as soon as one trial has ended
    assert "validation" in first
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = [path for path in (tmp_path / "out").iterdir() if len(read_run(path).records) == 2]
    before = {path.name: (path / "metrics.jsonl").read_bytes() for path in finished}
    deadline = time.monotonic() + 60
    while True:  # a trial that outlived its parent still holds its folder's lock
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        if "another process is running" not in done.stderr or time.monotonic() > deadline:
            break
    assert done.returncode == 0, done.stderr
    assert "best by validation: local.lr" in done.stdout
    assert {name: (tmp_path / "out" / name / "metrics.jsonl").read_bytes() for name in before} == before
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tune.md", "tune.csv", "best.toml", "local.lr=0.1-seed0"} <= names
    assert feddf("run", "out/best.toml", "--out", "again", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to tune: name a key"),
        (["rounds"], "the paper has grids for local.lr, prox_mu, momentum"),
        (["local.lr=0.1,x"], "local.lr = 'x'"),
        (["local.lr=0.1,-1"], "local.lr = -1"),
        (["lr=0.1,1"], "'lr' could mean local.lr or distill.lr"),
        (["local.rat=0.1,1"], "unknown key 'local.rat'; did you mean 'local.lr'?"),
        (["local.lr", "--parallel", "0"], "'--parallel': 0 is not in the range x>=1"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    config_file(tmp_path, BASE)
    done = feddf("tune", "small.toml", *words, "--out", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
