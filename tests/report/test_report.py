from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from feddf.report.headline import colors_of, headline, task_of
from feddf.report.plots import learning_curves, partition_dots, sweep
from feddf.report.read import ReportError, Run, alike, collect, differing, read_run, side_by_side
from feddf.report.tables import compared, percent, runs_table, seconds_table, spread


def write(path: Path, method: str, seed: int, accuracies: list[float], cut: bool = False) -> Path:
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        f'seed = {seed}\nrounds = 3\nfusion.method = "{method}"\ndata.name = "toy"\nclients.total = 4\n'
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
    result = compared(by_method(collect([tmp_path])[0]))
    text = text_of(result.table())
    assert result.markdown().splitlines()[2:5] == [
        "| model | fedavg | feddf | gain |",
        "| --- | ---: | ---: | ---: |",
        "| a | 30.0 ± 14.1 | 70.0 ± 28.3 | +40.0 ± 14.1 |",
    ]
    assert result.csv().splitlines()[:4] == [
        "method,model,measure,mean,std,n",
        "fedavg,a,accuracy in %,30.0,14.1421,2",
        "feddf,a,accuracy in %,70.0,28.2843,2",
        "gain,a,accuracy in %,40.0,14.1421,2",
    ]
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
    rows = {row[0]: row[1:] for row in compared(by_method(collect([tmp_path])[0]), target=0.5).rows}
    assert rows["rounds to 50.0 %: a"] == ["> 3, > 3", "2.5 ± 0.7", ""]
    assert rows["rounds to 50.0 %: b"] == ["> 3, > 3", "> 3, > 3", ""]
    one = compared(by_method(collect([tmp_path])[0]), target=0.25)
    assert {row[0]: row[1:] for row in one.rows}["rounds to 25.0 %: a"][0] == "3, > 3"
    entry = next(row for row in one.numbers if row["measure"] == "rounds to 25.0 %")
    rest = {"mean": "", "std": "", "n": 1, "not reached": 1, "each": "3, > 3"}  # no mean of the lucky seed alone
    assert entry == {"method": "fedavg", "model": "a", "measure": "rounds to 25.0 %", **rest}
    assert 'fedavg,a,rounds to 25.0 %,,,1,1,"3, > 3"' in one.csv().splitlines()


def test_tables_of_unfinished_runs(tmp_path: Path) -> None:
    write(tmp_path / "half", "feddf", 0, [0.5, 0.4])
    write(tmp_path / "none", "feddf", 1, [])
    runs = collect([tmp_path])[0]
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


def labels_of(runs: list[Run], monkeypatch: pytest.MonkeyPatch, path: Path) -> list[str]:
    """Return the labels of the lines in the first panel of the learning curves."""
    labels: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Axes, "plot", lambda *args, label, **rest: labels.append(label))
        learning_curves(runs, path)
    return labels[: len(labels) // len(runs[0].prototypes)]


def test_an_ensemble_that_was_not_logged_has_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged, unlogged = (write(tmp_path / name, "feddf", 0, [0.2, 0.5]) for name in ("logged", "unlogged"))
    lines = [json.loads(line) for line in (unlogged / "metrics.jsonl").read_text().splitlines()]
    (unlogged / "metrics.jsonl").write_text("".join(json.dumps({**line, "ensemble": None}) + "\n" for line in lines))
    for path, expected in (
        (logged, ["feddf", "feddf, averaged", "feddf, ensemble"]),
        (unlogged, ["feddf", "feddf, averaged"]),
    ):
        assert labels_of([read_run(path)], monkeypatch, tmp_path / "curves.png") == expected


def test_methods_differ_in_color_and_seeds_have_a_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        read_run(write(tmp_path / f"{method}{seed}", method, seed, [0.2 + seed / 10, 0.5]))
        for method in ("fedavg", "feddf")
        for seed in (0, 1)
    ]
    colors: dict[str, set[str]] = {}
    bands: list[tuple[list[float], list[float]]] = []
    monkeypatch.setattr(
        Axes, "plot", lambda *args, label, color, **rest: colors.setdefault(label.split(",")[0], set()).add(color)
    )
    monkeypatch.setattr(Axes, "fill_between", lambda self, x, low, high, **rest: bands.append((low, high)))
    learning_curves(runs, tmp_path / "curves.svg")
    assert {len(found) for found in colors.values()} == {1}
    assert colors["fedavg"] != colors["feddf"]
    deviation = 100 * math.sqrt(2 * 0.05**2)
    assert bands[0][0] == pytest.approx([25 - deviation, 50])
    assert bands[0][1] == pytest.approx([25 + deviation, 50])


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_come_in_three_formats_and_are_the_same_twice(tmp_path: Path, kind: str, start: bytes) -> None:
    runs = [read_run(write(tmp_path / m, m, 0, [0.5])) for m in ("fedavg", "feddf")]  # one round, too
    for name in ("first", "second"):
        learning_curves(runs, tmp_path / f"{name}.{kind}")
    content = (tmp_path / f"first.{kind}").read_bytes()
    assert content.startswith(start)
    assert content == (tmp_path / f"second.{kind}").read_bytes()


def test_dots_of_a_partition_never_overlap_and_every_client_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **rest: drawn.append(self))
    counts = np.array([[9, 0, 3], [0, 4, 9]])
    partition_dots([("α = 1", counts), ("α = 9", counts)], tmp_path / "p.png", ["cat", "dog", "a very long name"])
    for axes in drawn[0].axes:
        (dots,) = axes.collections
        assert dots.get_widths().max() < 1
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1"]
    assert [label.get_text() for label in drawn[0].axes[0].get_yticklabels()] == ["cat", "dog", "a very long name"]


def test_what_differs_between_runs_is_named(tmp_path: Path) -> None:
    runs = [write_with(tmp_path / str(alpha), f"local.epochs = {alpha}\n") for alpha in (1, 5)]
    assert differing(runs) == ["local.epochs"]
    assert "epochs=5" in text_of(runs_table(runs))
    assert "what differs" not in text_of(runs_table(runs[:1]))
    sweep(runs, "local.epochs", tmp_path / "by.svg")
    assert (tmp_path / "by.svg").stat().st_size > 1000


def test_what_is_no_run_is_skipped_among_others_and_refused_alone(tmp_path: Path) -> None:
    run = write(tmp_path / "run", "feddf", 0, [0.5])
    (tmp_path / "table.csv").write_text("x")
    runs, skipped = collect([run, tmp_path / "table.csv"])
    assert [found.path for found in runs] == [run]
    assert skipped == [f"{tmp_path / 'table.csv'} is not a run folder: it has no config.toml"]
    with pytest.raises(ReportError, match="is not a run folder"):
        collect([tmp_path / "table.csv"])


def test_a_broken_run_does_not_hide_the_others(tmp_path: Path) -> None:
    good = write(tmp_path / "good", "feddf", 0, [0.5])
    deeper = write(tmp_path / "compare" / "deeper", "fedavg", 0, [0.4])
    for name, file, text in (
        ("cut", "config.toml", "rounds = ["),
        ("typed", "config.toml", 'rounds = "many"'),
        ("odd", "metrics.jsonl", '{"round": 1, "models": {"a": 3}}\n'),
    ):
        (write(tmp_path / name, "feddf", 0, [0.5]) / file).write_text(text)
    runs, skipped = collect([tmp_path, good])
    assert [run.path for run in runs] == [good, deeper]
    assert [line for name in ("cut", "odd", "typed") for line in skipped if str(tmp_path / name) in line] == skipped
    assert len(skipped) == 3
    assert "is damaged" in skipped[1]
    with pytest.raises(ReportError, match=r"cannot read .*config.toml"):
        collect([tmp_path / "cut"])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [read_run(write(tmp_path / above / "feddf", "feddf", 0, [0.5])) for above in ("first", "second")]
    assert "second/feddf" in text_of(runs_table(runs))
    assert "first/feddf" in text_of(seconds_table(runs))


def test_accuracies_that_nobody_knows_are_dashes(tmp_path: Path) -> None:
    path = write(tmp_path / "run", "feddf", 0, [0.1])
    unknown = {"averaged": None, "fused": None}
    (path / "metrics.jsonl").write_text(
        json.dumps({"round": 1, "ensemble": None, "models": {"a": unknown}, "seconds": {}}) + "\n"
    )
    assert text_of(runs_table([read_run(path)])).count("–") == 4


def test_a_folder_without_runs_is_said(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="holds no run"):
        collect([tmp_path])[0]


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
        "local.prox_mu = 0.0\n": "feddf",
        "local.prox_mu = 0.01\nensemble.swag_samples = 10\n": "feddf+prox_mu=0.01+swag_samples=10",
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
        ('name = "other"\ndescription = "x"\n', 1),  # the same experiment
        ("ensemble.swag_samples = 3\n", 1),  # another method on it
        ('run.workers = 3\ndata.folder = "/x"\nversions.cpu = "y"\n', 1),  # elsewhere
        ("data.train_size = 100\n", 2),  # another experiment
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
    assert (run.value("clients.total"), run.value("local.epochs"), run.value("pool.size")) == (4, 40, None)
    assert not run.over_flower
    assert write_with(tmp_path / "flower", "flower.evaluate_fraction = 0.5\n").over_flower


def test_a_run_of_another_version_is_named_and_not_read_with_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "old"\n[clients]\nnumber = 5\n')
    with pytest.raises(ReportError, match=r"a run of another version: it has the key 'clients\.number'"):
        read_run(tmp_path)


def test_a_name_leaves_out_what_all_methods_share_and_what_a_preset_sets(tmp_path: Path) -> None:
    adam = 'local.optimizer = "adam"\n'
    runs = [
        write_with(tmp_path / "a", f"{adam}ensemble.swag_samples = 3\n"),
        write_with(tmp_path / "b", f"{adam}local.prox_mu = 0.5\n"),
    ]
    (group,) = alike(runs)
    assert [run.method for run in group] == ["feddf+swag_samples=3", "feddf+prox_mu=0.5"]
    preset, own = (write_with(tmp_path / name, f'name = "{name}"\n{adam}') for name in ("digit-grid", "mine"))
    assert [run.method for (run,) in (side_by_side([preset]), side_by_side([own]))] == [
        "feddf",
        "feddf+local.optimizer=adam",
    ]
    base = write(tmp_path / "c", "fedavg", 0, [0.1])
    (base / "config.toml").write_text((base / "config.toml").read_text() + adam)
    (both,) = alike([preset, read_run(base)])
    assert headline(both).startswith("FedDF +7.5 points over FedAvg after round 1 of 3")


def test_a_seed_that_was_run_twice_counts_once_as_far_as_it_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = (
        read_run(write(tmp_path / name, "feddf", 0, [0.2, 0.4, 0.6][:n])) for name, n in (("a", 2), ("b", 3))
    )
    assert headline([long, short]) == "FedDF 45.0 % after round 3, seed 0, α = 0.1, two architectures"
    drawn: list[list[float]] = []
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, *rest, **look: drawn.append(list(y)))
    monkeypatch.setattr(Axes, "fill_between", lambda *given, **rest: pytest.fail("one seed has no band"))
    learning_curves([long, short], tmp_path / "curves.png")
    assert drawn[0] == pytest.approx([20, 40, 60])


def test_seeds_of_different_length_are_averaged_over_those_that_have_done_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [read_run(write(tmp_path / str(seed), "feddf", seed, [0.2, 0.4, 0.6][: 3 - seed])) for seed in (0, 1)]
    drawn: list[list[float]] = []
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, *rest, **look: drawn.append(list(y)))
    learning_curves(runs, tmp_path / "curves.png")
    assert drawn[0] == pytest.approx([20, 40, 60])


def test_a_methods_color_follows_from_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["FedAvg", "mine:one", "FedDF", "feddf+swag"]
    colors = colors_of(methods)
    assert len({tuple(colors[name]) for name in methods}) == len(methods)
    for left_out in range(len(methods)):
        rest = methods[:left_out] + methods[left_out + 1 :]
        assert {name: colors[name] for name in rest} == {name: colors_of(rest)[name] for name in rest}
    assert len(colors_of(map(str, range(40)))) == 46  # more methods than colors
    found: dict[str, str] = {}
    monkeypatch.setattr(Axes, "plot", lambda *args, label, color, **rest: found.update({label: color}))
    for order in (("fedavg", "feddf"), ("feddf", "fedavg")):
        runs = [read_run(write(tmp_path / "-".join([*order, name]), name, 0, [0.5])) for name in order]
        learning_curves(runs, tmp_path / "curves.png")
        assert (found["fedavg"], found["feddf"]) == (colors["FedAvg"][0], colors["FedDF"][0])


@pytest.mark.parametrize("width", [60, 80])
def test_names_are_folded_and_never_cut(tmp_path: Path, width: int) -> None:
    name = "a-run-with-a-name-that-is-longer-than-any-column-of-a-narrow-terminal"
    runs = [read_run(write(tmp_path / f"{name}{seed}", "feddf", seed, [0.5, 0.9, 0.4])) for seed in (0, 1)]
    comparison = compared({name: runs, name.upper(): runs, "third": runs})
    for table, expected in (
        (runs_table(runs), [f"{name}0", f"{name}1"]),
        (seconds_table(runs), [f"{name}0", f"{name}1"]),
        (comparison.table(), [name, name.upper()]),
    ):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
        console.print(table)
        lines = [re.split("[│┃]", line)[1:-1] for line in console.export_text().splitlines()]
        columns = zip(*(line for line in lines if line and len(line) == len(table.columns)), strict=True)
        texts = ["".join(cell.strip() for cell in column) for column in columns]
        assert all(any(text in column for column in texts) for text in expected)
        assert "…" not in "".join(texts)
    assert "90.0 (2)" in text_of(runs_table(runs))  # the best with its round


def test_the_headline_is_the_gain_over_fedavg_paired_by_seed(tmp_path: Path) -> None:
    ends = {"fedavg": [0.4, 0.5, 0.1], "feddf": [0.6, 0.8]}  # of models a; b has half of it
    runs = [
        read_run(write(tmp_path / f"{method}{seed}", method, seed, [0.1, 0.2, end]))
        for method, found in ends.items()
        for seed, end in enumerate(found)
    ]
    gains = [75 * (ends["feddf"][seed] - ends["fedavg"][seed]) for seed in (0, 1)]  # the mean of a model and a half one
    mean, deviation = np.mean(gains), np.std(gains, ddof=1)
    expected = (
        f"FedDF +{mean:.1f} ± {deviation:.1f} points over FedAvg after round 3, seeds 0, 1, α = 0.1, two architectures"
    )
    assert headline(runs) == expected
    assert task_of(runs) == ["toy", "4 clients", "C = 0.5", "α = 0.1"]


def test_the_headline_without_a_baseline_or_a_common_seed_or_a_round(tmp_path: Path) -> None:
    (feddf, other), none = (
        [read_run(write(tmp_path / name, name, seed, [0.4, 0.6])) for name, seed in (("feddf", 0), ("fedavg", 1))],
        read_run(write(tmp_path / "none", "feddf", 0, [])),
    )
    assert headline([feddf]) == "FedDF 45.0 % after round 2 of 3, seed 0, α = 0.1, two architectures"
    assert headline([feddf, other]).startswith("FedDF 45.0 %, FedAvg 45.0 % after round 2 of 3, seeds 0, 1")
    assert headline([none]) == "No round is finished yet"


def test_architectures_that_only_some_runs_have_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (read_run(write(tmp_path / name, name, 0, [0.4, 0.6])) for name in ("fedavg", "feddf"))
    lines = (tmp_path / "feddf" / "metrics.jsonl").read_text().replace('"b":', '"c":')
    (tmp_path / "feddf" / "metrics.jsonl").write_text(lines)
    second = read_run(tmp_path / "feddf")
    rows = {row[0]: row[1:] for row in compared({"fedavg": [first], "feddf": [second]}).rows}
    assert list(rows)[:3] == ["a", "b", "c"]
    assert (rows["b"], rows["c"]) == (["30.0", "–", "–"], ["–", "30.0", "–"])
    titles: list[str] = []
    monkeypatch.setattr(Axes, "set", lambda self, title="", **rest: titles.append(title))
    learning_curves([first, second], tmp_path / "curves.png")
    assert {"a", "b", "c"} <= set(titles)
