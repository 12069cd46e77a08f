"""The paper's tables and figures run at the smoke scale, and verdicts follow from numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from typer.testing import CliRunner

from feddf.config import ConfigError, Experiment, load, parse, with_values
from feddf.config.keys import keys_of
from feddf.runs.store import RunFolder
from feddf.states import digest
from reproduction import NAMES, cells, find
from reproduction.__main__ import app
from reproduction.artifact import SCALES, cells_at
from reproduction.cells import decisive_values, experiments_of, frozen_defaults, hash_of, is_kept
from reproduction.judging import CONTRADICTED, UNDECIDED, UNTESTED
from reproduction.page import data_of, honest, page, read_results, summary, verdicts
from reproduction.page_plots import bars, curves_of
from reproduction.scales import TUNED

pytestmark = pytest.mark.xdist_group("reproduce")  # the smoke runs are made once


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_an_experiment_at_every_scale(name: str) -> None:
    artifact = find(name)
    for scale in SCALES:
        experiments = experiments_of(artifact, scale, [0, 1])
        assert set(experiments) == {cell.name for cell in cells_at(artifact, scale)}
        assert all(isinstance(one, Experiment) for mine in experiments.values() for one in mine)
        assert len({cell.name for cell in artifact.cells}) == len(artifact.cells), "two cells have one name"


def test_the_cpu_scale_is_as_small_as_it_says() -> None:
    for name in set(NAMES) - {"why", "middle", "one-round", "fedma"}:
        for cell, (experiment,) in experiments_of(find(name), "cpu", [0]).items():
            assert experiment.rounds <= 12, cell
            seen = experiment.local.epochs * (experiment.data.train_size or 0) / experiment.clients.total
            assert seen <= 10_000 or name in ("fig1", "fig8"), cell  # examples that a client sees in a round


def test_the_small_task_is_the_same_for_every_method_but_for_what_was_tuned() -> None:
    mine = experiments_of(find("table1"), "cpu", [0])
    assert {one.data.name for experiments in mine.values() for one in experiments} == {"mnist-5k"}
    for alpha in (1.0, 0.1):
        (prox,), (momentum,), (plain,) = (
            mine[f"{method}, E = 20, C = 0.4, α = {alpha:g}"] for method in ("FedProx", "FedAvgM", "FedAvg")
        )
        assert prox.local.prox_mu == TUNED["local.prox_mu"][alpha]
        assert momentum.fusion.momentum == TUNED["fusion.momentum"][alpha]
        assert plain.local.prox_mu == plain.fusion.momentum == 0
        assert with_values(prox, {"local.prox_mu": 0.0}) == with_values(momentum, {"fusion.momentum": 0.0}) == plain


def test_group_norm_stays_group_norm_where_networks_are_narrow() -> None:
    for cell, (experiment,) in experiments_of(find("table2"), "cpu", [0]).items():
        (prototype,) = experiment.prototypes
        assert prototype.options == {"width": 8, **({"norm": "group"} if "GN" in cell else {})}, cell


def test_the_paper_scale_is_the_preset_but_for_what_the_cell_is_about() -> None:
    experiments = experiments_of(find("table1"), "paper", [0])
    for cell in find("table1").cells:
        assert experiments[cell.name] == [with_values(load(cell.preset), cell.changes)]


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproduce")
    arguments = ["all", "--scale", "smoke", "--seeds", "0"]
    result = CliRunner().invoke(app, [*arguments, "--runs", str(folder / "cells"), "--out", str(folder / "results")])
    assert result.exit_code == 0, result.output
    return folder


def test_all_of_them_run_and_have_a_verdict(smoke: Path) -> None:
    results = {one["artifact"]: one for one in read_results(smoke / "results")}
    assert set(results) == set(NAMES)
    for one in results.values():
        assert one["verdict"] == UNDECIDED, "one seed decides nothing"
        assert one["findings"]
        assert all(len(cell["values"]) == 1 for cell in one["cells"]), one["artifact"]


def test_finished_cells_are_used_again_and_give_the_same_bytes_elsewhere(smoke: Path, tmp_path: Path) -> None:
    arguments = ["table5", "--scale", "smoke", "--seeds", "0", "--out", str(tmp_path / "results")]
    shutil.copytree(smoke / "results" / "cells", tmp_path / "results" / "cells")
    again = CliRunner().invoke(app, [*arguments, "--runs", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()
    count = json.loads((tmp_path / "results" / "smoke" / "table5.json").read_text())
    hashes = {name for cell in count["cells"] for name in cell["hashes"]}
    assert f"{len(hashes)} of {len(hashes)} runs are finished already" in again.output
    shutil.rmtree(tmp_path / "results")
    CliRunner().invoke(app, [*arguments, "--runs", str(tmp_path / "cells")])
    for name in hashes:
        here, there = (RunFolder.open(root / name).latest()[0] for root in (smoke / "cells", tmp_path / "cells"))
        assert here is not None
        assert there is not None
        assert digest(here.models) == digest(there.models)
        for root in (smoke, tmp_path):
            assert (root / "results" / "cells" / name / "models.sha256").read_text().strip() == digest(here.models)


def test_what_is_finished_can_be_judged_before_all_is(smoke: Path, tmp_path: Path) -> None:
    whole = json.loads((smoke / "results" / "smoke" / "table8.json").read_text())
    kept = {cell["row"] + ", " + cell["column"]: cell["hashes"][0] for cell in whole["cells"]}
    arguments = ["table8", "--scale", "smoke", "--seeds", "0", "--out", str(tmp_path), "--finished"]

    written = tmp_path / "smoke" / "table8.json"

    def judge() -> None:
        assert CliRunner().invoke(app, [*arguments, "--runs", str(tmp_path / "none")]).exit_code == 0
        assert not (tmp_path / "none").exists(), "nothing is run"

    judge()
    assert not written.exists(), "there is nothing to judge by"
    for cell in ("SGD, α = 1, FedDF", "SGD, α = 1, FedAvg", "SGD, α = 0.1, FedDF"):
        shutil.copytree(smoke / "results" / "cells" / kept[cell], tmp_path / "cells" / kept[cell], dirs_exist_ok=True)
    judge()
    found = json.loads(written.read_text())
    assert [one["claim"] for one in found["findings"] if one["seeds"]] == [
        "SGD, α = 1, FedDF is above SGD, α = 1, FedAvg"
    ]
    computed = CliRunner().invoke(app, ["bound", *arguments[1:]])
    assert "leave out --finished" in computed.output
    assert not (tmp_path / "smoke" / "bound.json").exists()
    shown = page([{**found, "seeds": [0, 1]}], {"table8": ("Table 8", "")})
    assert "4 undecided; 2 seeds, 3 runs" in shown
    assert shown.count("not run yet") == 3
    assert shown.count("1 of 2 seeds") == 3
    assert "4 undecided; 1 seed, 3 runs" in page([found], {"table8": ("Table 8", "")})
    assert "(one seed; " in shown, "one seed has no interval"


def test_the_page_has_every_claim_and_needs_nothing_else(smoke: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(smoke / "results"), "--html", str(smoke / "index.html")])
    text = (smoke / "index.html").read_text(encoding="utf-8")
    assert "page:" in result.output
    for name in NAMES:
        assert f"id='{name}'" in text
    assert "http" not in text.replace("http://www.w3.org", "").replace("http://creativecommons", "").replace(
        "http://purl.org", ""
    ).replace("https://matplotlib.org", "")


def test_the_terminal_has_a_line_for_every_claim(smoke: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(smoke / "results")])
    results = read_results(smoke / "results")
    assert [line.split()[0] for line in result.output.splitlines()[1:-1]] == list(NAMES), "one line each, in order"
    (row,) = verdicts(results, ["fig15"])
    assert row[:-1] == ("fig15", "smoke", UNDECIDED, "2 undecided", "1", "2")
    assert verdicts([], ["fig6"]) == [("fig6", "", UNTESTED, "", "", "", "")]
    assert result.output.splitlines()[-1] == summary(results)
    distinct = {name for one in results for cell in one["cells"] for name in cell["hashes"]}
    assert f"{len(NAMES)} verdicts ({len(NAMES)} undecided) from {len(distinct)} distinct runs" in summary(results)
    assert len(distinct) < sum(len(cell["hashes"]) for one in results for cell in one["cells"])


def test_the_page_shows_every_scale_that_was_run(smoke: Path) -> None:
    (one,) = (one for one in read_results(smoke / "results") if one["artifact"] == "fig1")
    text = page([{**one, "scale": "cpu", "verdict": CONTRADICTED}, one], {"fig1": (one["title"], "")})
    assert text.index("<h3>Small scale") < text.index("<h3>Smoke scale")
    assert text.count("<section") == 1
    assert f"Small scale: <span class='verdict fails'>{CONTRADICTED}" in text


def test_the_page_names_the_data_that_were_used_and_keeps_the_papers_numbers_apart() -> None:
    (one,) = (one for one in read_results(KEPT[0].parent.parent) if one["artifact"] == "table2")
    text = page([one], {"table2": (one["title"], "")})
    before, _, rest = text.partition("<details>")
    apart, _, after = rest.partition("</details>")
    assert "cifar10" not in before + after
    assert text.count("digits, 14×14, α = 1") > 2
    assert one["cells"][0]["paper"] not in before + after
    assert one["cells"][0]["paper"] in apart
    same = page([{**one, "scale": "paper"}], {"table2": (one["title"], "")})
    assert f"<small>paper: {one['cells'][0]['paper']}</small>" in same
    assert "<details>" not in same


def test_rows_about_pools_keep_their_names() -> None:
    cell = {"preset": "cifar10-resnet8", "configuration": {"data": {"name": "cifar10", "image_size": 16}}}
    assert data_of(cell) == "CIFAR-10, 16×16"
    assert honest("CIFAR-100", cell) == "CIFAR-100"
    assert honest("CIFAR-10, FedDF is above CIFAR-10, FedAvg", cell).count("16×16") == 2


def test_finished_runs_keep_small_files_only(smoke: Path) -> None:
    kept = list((smoke / "results" / "cells").glob("*/*"))
    assert {path.name for path in kept} == {"config.toml", "metrics.jsonl", "models.sha256"}
    assert max(path.stat().st_size for path in kept) < 20_000


def test_what_was_not_run_could_not_be_tested_and_text_is_no_markup() -> None:
    text = page([], {"table9": ("Table <script>", "a GPU & a week")})
    assert "could not be tested here" in text
    assert "Table &lt;script&gt;" in text
    assert "a GPU &amp; a week" in text


def test_no_two_bars_of_a_group_look_alike() -> None:
    figure = bars({"digits": {f"method {number}": [1.0, 2.0] for number in range(11)}}, "rounds")
    looks = [(bar.get_facecolor(), bar.get_hatch()) for bar in figure.axes[0].patches]
    assert len(looks) == len(set(looks)) == 11


def test_a_band_is_one_standard_deviation_as_in_every_other_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    bands: list[list[list[float]]] = []
    monkeypatch.setattr(Axes, "fill_between", lambda self, x, low, high, **look: bands.append([list(low), list(high)]))
    curves = [{"fused": [0.2, 0.5, 0.9]}, {"fused": [0.3, 0.5]}, {"fused": [0.4, 0.5]}]
    text = curves_of([{"row": "a", "column": "b", "curves": curves}, {"row": "a", "column": "c", "curves": curves[:1]}])
    assert "± 1 standard deviation" in text
    assert bands == [[pytest.approx([20, 50]), pytest.approx([40, 50])]]  # one seed has none


def test_cells_that_differ_only_in_where_they_run_are_one() -> None:
    base = load("demo")
    assert hash_of(base) == hash_of(with_values(base, {"run.workers": 1, "name": "other", "data.folder": "/x"}))
    assert hash_of(base) != hash_of(with_values(base, {"local.epochs": 11}))
    assert hash_of(base) != hash_of(with_values(base, {"pool.views": 2}))


def test_a_key_that_came_later_changes_no_name_and_every_value_does() -> None:
    """Whatever is not at its default on the frozen day is in the name, and nothing else is."""
    base = load("cifar10-resnet8")
    table, known = frozen_defaults(), keys_of(Experiment)
    assert set(known) - set(json.loads(DEFAULTS.read_text())) >= {"fusion.parts", "clients.lost_state"}
    for name, other in (("fusion.parts", ["scaffold"]), ("clients.lost_state", "anew"), ("distill.keep_init", True)):
        assert table[name] == json.loads(json.dumps(known[name].default))
        assert hash_of(with_values(base, {name: other})) != hash_of(base)
    assert all(value != table.get(name) for name, value in decisive_values(base).items())


def test_a_default_that_changed_finds_no_wrong_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load("toy", ["rounds=1"])
    kept = tmp_path / hash_of(base)
    RunFolder.create(kept, base)
    assert is_kept(kept, base)
    frozen = {**frozen_defaults(), "clients.attempts": 7}  # in the table: what has the new default has another name
    monkeypatch.setattr("reproduction.cells.frozen_defaults", lambda: frozen)
    assert hash_of(base) != kept.name
    flipped = with_values(base, {"clients.lost_state": "anew"})  # not in the table: a run of this name is refused
    monkeypatch.setattr("reproduction.cells.frozen_defaults", lambda: {**frozen, "clients.lost_state": "anew"})
    with pytest.raises(ConfigError, match=r"lost_state.*defaults\.json"):
        is_kept(kept, flipped)


DEFAULTS = Path(cells.__file__).with_name("defaults.json")
KEPT = sorted((Path(__file__).parents[2] / "results" / "cells").iterdir())


def test_every_kept_run_is_found_by_its_configuration() -> None:
    assert len(KEPT) > 100
    assert [run.name for run in KEPT if hash_of(load(str(run / "config.toml"))) != run.name] == []


def test_every_configuration_in_a_result_names_the_kept_runs_beside_it() -> None:
    checked = 0
    for result in map(json.loads, map(Path.read_text, KEPT[0].parent.parent.glob("*/*.json"))):
        for cell in result["cells"]:
            experiment = parse(cell["configuration"])
            seeds = map(int, cell["values"]) if cell["hashes"] else ()
            seeded = [with_values(experiment, {"seed": seed}) for seed in seeds]
            assert list(map(hash_of, seeded)) == cell["hashes"], (
                f"{result['artifact']}: {cell['row']}, {cell['column']}"
            )
            assert set(cell["hashes"]) <= {run.name for run in KEPT}
            checked += len(seeded)
    assert checked > 200


def test_the_toy_is_drawn_whatever_its_clients_and_method(tmp_path: Path) -> None:
    words = ["clients.total=12", "fraction=0.25", "method=fedavg", "local.epochs=1", "--seed", "3"]
    result = CliRunner().invoke(app, ["regions", *words, "--out", str(tmp_path / "crowd.png")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "crowd.png").read_bytes().startswith(b"\x89PNG")
    assert all(row in result.output for row in ("averaged (FedAvg)", "fused (FedAvg)", "ensemble"))


def test_one_that_cannot_be_run_does_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDDF_DATA", str(tmp_path / "no data"))
    arguments = ["fig4,fig1", "--scale", "paper", "--estimate", "--seeds", "0"]
    result = CliRunner().invoke(app, [*arguments, "--runs", str(tmp_path), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "fig4: data 'cifar10' is not complete" in result.output
    assert "fig1: 1 run to do" in result.output
    assert str(result.exception) == "not reproduced, for the reasons above: fig4"


def test_the_table_in_the_documents_is_that_of_the_kept_results() -> None:
    text = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    table = CliRunner().invoke(app, ["report", str(KEPT[0].parent.parent), "--markdown"]).output
    assert f"report --markdown -->\n{table}<!-- end of verdicts -->" in text


def test_unknown_names_are_one_line() -> None:
    with pytest.raises(ConfigError, match="'table11'; did you mean 'table1'"):
        find("table11")
    assert CliRunner().invoke(app, ["--list"]).output.count("Table ") >= 8
