from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from rich.console import Console

from feddf.report.plots import learning_curves
from feddf.report.read import ReportError, Run, alike, find_runs, read_run
from feddf.report.tables import compared, percent, runs_table, seconds_table, spread


def write(path: Path, method: str, seed: int, accuracies: list[float], cut: bool = False) -> Path:
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        f'seed = {seed}\nrounds = 3\nfusion.method = "{method}"\ndata.name = "toy"\nclients.number = 4\n'
        'clients.fraction = 0.5\npartition.scheme = "dirichlet"\npartition.alpha = 0.1\n'
    )
    lines = [
        json.dumps(
            {
                "round": number,
                "ensemble": None if number == 1 else accuracy + 0.1,
                "models": {"a": {"averaged": 0.1, "fused": accuracy}, "b": {"averaged": 0.2, "fused": accuracy / 2}},
                "seconds": {"train": 2.0, "fuse": 1.0},
            }
        )
        for number, accuracy in enumerate(accuracies, 1)
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines) + ('\n{"round": 9, "ens' if cut else "\n"))
    return path


def by_method(runs: list[Run]) -> dict[str, list[Run]]:
    return {method: [run for run in runs if run.method == method] for method in ("fedavg", "feddf")}


def text_of(table: object) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(table)
    return console.export_text()


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys; import feddf.report.plots, feddf.report.tables; "
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_is_read_as_far_as_it_got(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "run", "feddf", 3, [0.2, 0.4], cut=True))
    assert (run.method, run.seed, run.rounds, run.prototypes) == ("feddf", 3, [1, 2], ["a", "b"])
    assert run.curve("a") == [0.2, 0.4]
    assert run.curve() == pytest.approx([0.15, 0.3])
    assert run.curve("b", "averaged") == [0.2, 0.2]
    assert math.isnan(run.ensemble()[0])
    assert run.seconds() == {"train": 4.0, "fuse": 2.0}


def test_side_by_side_with_mean_and_standard_deviation(tmp_path: Path) -> None:
    values = {("fedavg", 0): 0.2, ("fedavg", 1): 0.4, ("feddf", 0): 0.5, ("feddf", 1): 0.9}
    for (method, seed), value in values.items():
        write(tmp_path / f"{method}-{seed}", method, seed, [0.1, value])
    result = compared(by_method(find_runs(tmp_path)))
    text = text_of(result.table())
    assert result.markdown().splitlines()[2:5] == [
        "| model | fedavg | feddf | gain |",
        "| --- | ---: | ---: | ---: |",
        "| a | 30.0 ± 14.1 | 70.0 ± 28.3 | +40.0 ± 14.1 |",
    ]
    assert result.csv().splitlines()[1] == "a,30.0 ± 14.1,70.0 ± 28.3,+40.0 ± 14.1"
    assert "after round 2, in % (seeds 0, 1: mean ± sample standard deviation (n − 1))" in text
    row = next(line for line in text.splitlines() if " a " in line)
    assert "30.0 ± 14.1" in row
    assert "70.0 ± 28.3" in row
    assert "+40.0 ± 14.1" in row


def test_rounds_to_a_target_are_never_made_up(tmp_path: Path) -> None:
    write(tmp_path / "a0", "fedavg", 0, [0.1, 0.2, 0.3])
    write(tmp_path / "a1", "fedavg", 1, [0.1, 0.2, 0.2])
    write(tmp_path / "b0", "feddf", 0, [0.1, 0.9, 0.3])
    write(tmp_path / "b1", "feddf", 1, [0.1, 0.2, 0.9])
    rows = {row[0]: row[1:] for row in compared(by_method(find_runs(tmp_path)), target=0.5).rows}
    assert rows["rounds to 50.0 %: a"] == ["not reached in 3", "2.5 ± 0.7", ""]
    assert rows["rounds to 50.0 %: b"] == ["not reached in 3", "not reached in 3", ""]
    one = {row[0]: row[1:] for row in compared(by_method(find_runs(tmp_path)), target=0.25).rows}
    assert one["rounds to 25.0 %: a"][0] == "3, ≥ 3 in 1 of 2"


def test_tables_of_unfinished_runs(tmp_path: Path) -> None:
    write(tmp_path / "half", "feddf", 0, [0.5, 0.4])
    write(tmp_path / "none", "feddf", 1, [])
    runs = find_runs(tmp_path)
    text = text_of(runs_table(runs))
    assert "2/3" in text
    assert "0/3" in text
    assert "50.0" in text  # the best
    assert "2.0" in text_of(seconds_table(runs[:1]))
    with pytest.raises(ReportError, match="no round that all these runs have done"):
        compared({"feddf": runs})


def test_curves_are_drawn(tmp_path: Path) -> None:
    runs = [read_run(write(tmp_path / m, m, 0, [0.1, 0.5, 0.6])) for m in ("fedavg", "feddf")]
    learning_curves(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_ensemble_that_was_not_logged_has_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged, unlogged = (write(tmp_path / name, "feddf", 0, [0.1, 0.5]) for name in ("logged", "unlogged"))
    lines = [json.loads(line) for line in (unlogged / "metrics.jsonl").read_text().splitlines()]
    (unlogged / "metrics.jsonl").write_text("".join(json.dumps({**line, "ensemble": None}) + "\n" for line in lines))
    labels: list[str] = []
    monkeypatch.setattr(Axes, "plot", lambda *args, label, **rest: labels.append(label))
    monkeypatch.setattr(Axes, "legend", lambda *args, **rest: None)
    for path, expected in ((logged, ["a", "b", "ensemble"]), (unlogged, ["a", "b"])):
        labels.clear()
        learning_curves([read_run(path)], tmp_path / "curves.png")
        assert labels == [f"feddf, {name}" for name in expected]


def test_accuracies_that_nobody_knows_are_dashes(tmp_path: Path) -> None:
    path = write(tmp_path / "run", "feddf", 0, [0.1])
    unknown = {"averaged": None, "fused": None}
    (path / "metrics.jsonl").write_text(
        json.dumps({"round": 1, "ensemble": None, "models": {"a": unknown}, "seconds": {}}) + "\n"
    )
    assert text_of(runs_table([read_run(path)])).count("–") == 4


def test_a_folder_without_runs_is_said(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="holds no run"):
        find_runs(tmp_path)


def test_numbers_are_percentages() -> None:
    assert (percent(0.1234), percent(math.nan)) == ("12.3", "–")
    assert (spread([math.nan]), spread([0.5, math.nan])) == ("–", "–")
    assert (spread([0.5]), spread([0.5], signed=True), spread([0.1, 0.3])) == ("50.0", "+50.0", "20.0 ± 14.1")


def write_with(path: Path, extra: str) -> Run:
    write(path, "feddf", 0, [0.2])
    (path / "config.toml").write_text((path / "config.toml").read_text() + extra)
    return read_run(path)


def test_a_methods_name_says_what_is_unusual_about_it(tmp_path: Path) -> None:
    extras = {
        "": "feddf",
        "local.proximal = 0.0\n": "feddf",
        "local.proximal = 0.01\nteachers.swag_samples = 10\n": "feddf+proximal=0.01+swag_samples=10",
        'local.optimizer = "adam"\n': "feddf+local.optimizer=adam",
        "fusion.options.x = 3\n": "feddf+fusion.options.x=3",
        "run.log_ensemble = false\n": "feddf",
        'versions.torch = "1.0"\n': "feddf",
    }
    runs = [write_with(tmp_path / str(number), extra) for number, extra in enumerate(extras)]
    assert [run.method for run in runs] == list(extras.values())
    assert [len(group) for group in alike(runs)] == [len(extras)]


@pytest.mark.parametrize(
    ("extra", "groups"),
    [
        ('name = "other"\nabout = "x"\n', 1),  # the same experiment
        ("teachers.swag_samples = 3\n", 1),  # another method on it
        ('run.workers = 3\ndata.folder = "/x"\nversions.cpu = "y"\n', 1),  # elsewhere
        ("data.size = 100\n", 2),  # another experiment
        ("local.epochs = 3\n", 2),
        ("run.threads = 2\n", 2),  # it changes the last bits
        ('pool.sources = [{name = "noise"}]\n', 2),
        ("distill.steps = 3\n", 2),
    ],
)
def test_runs_are_drawn_together_if_they_are_about_one_experiment(tmp_path: Path, extra: str, groups: int) -> None:
    runs = [write_with(tmp_path / "a", ""), write_with(tmp_path / "b", extra)]
    assert len(alike(runs)) == groups


def test_a_value_that_a_run_does_not_say_is_the_default(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "run", "feddf", 0, [0.2]))
    assert (run.value("clients.number"), run.value("local.epochs"), run.value("pool.size")) == (4, 40, None)
    assert not run.over_flower
    assert write_with(tmp_path / "flower", "flower.evaluate_fraction = 0.5\n").over_flower
