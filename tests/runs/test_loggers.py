from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from feddf.config import ConfigError, Experiment, load, parse
from feddf.runs.build import build
from feddf.runs.loggers import check_installed, numbers_of
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder


def small(track: list[str], rounds: int = 2) -> Experiment:
    return parse(
        {
            "name": "small",
            "rounds": rounds,
            "data": {"name": "toy"},
            "prototypes": ["mlp"],
            "clients": {"total": 2, "fraction": 1.0},
            "local": {"epochs": 1},
            "fusion": {"method": "fedavg"},
            "run": {"engine": "in-process", "loggers": track},
        }
    )


def run(path: Path, track: list[str], rounds: int = 2) -> tuple[list[Any], list[str]]:
    experiment, said = small(track, rounds), []
    folder = RunFolder.open(path) if path.exists() else RunFolder.create(path, small(track))
    folder.continue_as(experiment)
    records = list(run_experiment(build(experiment), folder, complain=said.append))
    return records, said


SEEN: list[tuple[str, Any]] = []


class Mine:
    """A tracker of the user's own."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        SEEN.append(("open", (folder.name, config["data.name"], done)))

    def __call__(self, round: int, numbers: Mapping[str, float]) -> None:
        SEEN.append(("round", round))
        if round == 2 and "fails" in SEEN[0][1][0]:
            raise OSError("no space")

    def close(self) -> None:
        SEEN.append(("close", None))


def test_a_tracker_of_ones_own_sees_every_round_and_resumes(tmp_path: Path) -> None:
    SEEN.clear()
    _, said = run(tmp_path / "run", [f"{__name__}:Mine"])
    run(tmp_path / "run", [f"{__name__}:Mine"], rounds=3)
    assert said == []
    assert SEEN == [
        ("open", ("run", "toy", 0)), ("round", 1), ("round", 2), ("close", None),
        ("open", ("run", "toy", 2)), ("round", 3), ("close", None),
    ]  # fmt: skip


def test_a_tracker_that_fails_says_so_once_and_stops_nothing(tmp_path: Path) -> None:
    SEEN.clear()
    records, said = run(tmp_path / "fails", [f"{__name__}:Mine"], rounds=3)
    assert [record["round"] for record in records] == [1, 2, 3]
    assert said == [f"the tracker '{__name__}:Mine' is left out of this run: OSError: no space"]
    assert ("round", 3) not in SEEN


def test_a_missing_package_is_said_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"run.loggers = 'wandb': .* pip install 'feddf\[wandb\]', or leave it out"):
        build(small(["wandb"]))
    check_installed(["somebodys:Tracker"])  # is looked for when it is opened


def test_one_name_is_a_list_of_one() -> None:
    assert load("toy", ["loggers=wandb"]).run.loggers == ("wandb",)
    assert load("toy", ["loggers=wandb,mlflow"]).run.loggers == ("wandb", "mlflow")
    assert load("toy", ['loggers=["wandb"]']).run.loggers == ("wandb",)


def test_an_unknown_tracker_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"run.loggers = 'tensorbord': did you mean 'tensorboard'\?"):
        small(["tensorbord"])


def test_numbers_have_names_and_unknown_ones_are_left_out(tmp_path: Path) -> None:
    records, _ = run(tmp_path / "run", [])
    found = numbers_of({**records[0], "ensemble": 0.25, "avg_logits": 0.5})
    assert (found["ensemble"], found["avg_logits"]) == (0.25, 0.5)
    found = numbers_of({**records[0], "ensemble": None})
    assert {"mlp/fused", "mlp/averaged", "clients/used", "clients/dropped", "seconds/train", "bytes/up"} <= found.keys()
    assert "ensemble" not in found
    assert found["clients/used"] == 2


def test_tensorboard_has_the_curves_of_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records, said = run(tmp_path / "run", ["tensorboard"])
    assert said == []
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("mlp/fused")]
    assert found == [(record["round"], pytest.approx(record["models"]["mlp"]["fused"])) for record in records]


def test_mlflow_has_the_curves_and_a_resumed_run_goes_on_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlruns.db'}")
    assert run(tmp_path / "run", ["mlflow"])[1] == []
    assert run(tmp_path / "run", ["mlflow"], rounds=3)[1] == []
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert found.data.params["data.name"] == "toy"
    assert [metric.step for metric in client.get_metric_history(found.info.run_id, "mlp/fused")] == [1, 2, 3]


def test_wandb_works_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert run(tmp_path / "run", ["wandb"])[1] == []
    (file,) = (tmp_path / "run").rglob("run-*.wandb")
    assert b"mlp/fused" in file.read_bytes()


def pretend_trackio(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put something that notes how it is called, and that chats, in the place of Trackio."""
    calls: list[Any] = []

    class Run:
        def log(self, numbers: dict[str, float], step: int) -> None:
            calls.append((step, "mlp/fused" in numbers))

    def init(**given: Any) -> Run:
        print("* Trackio project initialized")
        calls.append((given["project"], given["name"], given["resume"]))
        return Run()

    library = ModuleType("trackio")
    library.init, library.finish = init, lambda: calls.append("finish")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", library)
    return calls


def test_trackio_is_called_like_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend_trackio(monkeypatch)
    assert run(tmp_path / "run", ["trackio"])[1] == []
    run(tmp_path / "run", ["trackio"], rounds=3)
    (project, name, first), *_, (_, again, second), _, _ = calls
    assert calls[1:4] == [(1, True), (2, True), "finish"]
    assert calls[5:] == [(3, True), "finish"]
    assert (project, first, second) == ("small", "never", "allow")
    assert name == again


def test_runs_of_one_name_stay_apart_in_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend_trackio(monkeypatch)
    for above in ("first", "second"):
        run(tmp_path / above / "feddf-seed0", ["trackio"])
    names = [call[1] for call in calls if len(call) == 3]
    assert len(set(names)) == 2
    assert all(name.startswith("feddf-seed0-") for name in names)


def test_what_a_tracker_prints_stays_out_of_the_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_trackio(monkeypatch)
    run(tmp_path / "run", ["trackio"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "initialized" in printed.err


def test_trackio_itself_has_the_curves_and_a_resumed_run_goes_on_in_them(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_loggers import run
import trackio
for rounds in (2, 3):
    assert run(Path("run"), ["trackio"], rounds)[1] == []
(found,) = trackio.Api().runs("small")
print([row["step"] for row in trackio.sqlite_storage.SQLiteStorage.get_logs("small", found.name)])
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "[1, 2, 3]\n", done.stderr
