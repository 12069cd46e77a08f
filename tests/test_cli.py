from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from feddf import cli
from feddf.config import load
from feddf.runs.run import run_experiment
from reproduction.__main__ import app as reproduction_app

CONFIG = """
name = "small"
rounds = 2
prototypes = ["mlp"]

[data]
name = "toy"

[pool]
sources = ["plane"]

[clients]
total = 4
fraction = 1.0

[local]
epochs = 1

[distill]
steps = 20

[run]
engine = "in-process"
"""


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def feddf(*words: str, cwd: Path, app: Callable[..., Any] = cli.app) -> Done:
    """Run the command line in this process, in another folder: two seconds less than a process of its own."""
    out, err = StringIO(), StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEDDF_DATA", raising=False)
        patch.syspath_prepend(cwd)
        code = cli.guarded(lambda: app(list(words), standalone_mode=False))
    return Done(code, out.getvalue(), err.getvalue())


def says(text: str, expected: str) -> bool:
    """Say whether a text has what is expected of it; "..." stands for any words, of which none matters."""
    return re.search(".*".join(re.escape(part) for part in expected.split("...")), text) is not None


def test_the_installed_command_speaks_in_codes_and_lines(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("feddf")), "run", "demo", "alpha=-1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert says(done.stderr, "error: partition.alpha = -1: ... greater than 0\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "small.toml").write_text(CONFIG)
    (folder / "typo.toml").write_text(CONFIG.replace("[distill]", "[distlil]"))
    done = feddf("run", "small.toml", "data.name=toy", "--out", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def commands(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)
        else:
            yield (*names, name), command


EVERY_COMMAND = dict(commands(typer.main.get_command(cli.app)))  # type: ignore[arg-type]


@pytest.mark.parametrize("words", EVERY_COMMAND, ids=" ".join)
def test_help_explains_every_command_and_each_of_its_arguments(words: tuple[str, ...], tmp_path: Path) -> None:
    assert words[-1] in feddf(*words[:-1], "--help", cwd=tmp_path).stdout
    done = feddf(*words, "--help", cwd=tmp_path)
    assert done.returncode == 0
    shown = "".join(re.findall(r"\w+", done.stdout))
    for parameter in EVERY_COMMAND[words].params:
        text = getattr(parameter, "help", None)
        assert text, parameter.name
        first = "".join(re.findall(r"\w+", text)[:3])
        assert first in shown, text


def test_the_version_quiet_and_json(place: Path) -> None:
    assert feddf("--version", cwd=place).stdout == f"feddf {version('feddf')}\n"
    for words in (("--quiet", "report", "out"), ("report", "out", "--quiet"), ("report", "-q", "out")):
        assert feddf(*words, cwd=place).stdout == ""
    (found,) = json.loads(feddf("report", "out", "--json", cwd=place).stdout)
    assert (found["run"], found["method"], found["round"], found["rounds"]) == ("out", "feddf", 2, 2)
    assert 0 <= found["models"]["mlp"]["fused"] <= 1
    assert "toy" in json.loads(feddf("presets", "--json", cwd=place).stdout)
    assert json.loads(feddf("config", "alpha", "--json", cwd=place).stdout)["partition.alpha"]["default"] == "1.0"


def test_presets_are_listed_and_one_is_printed_as_a_file_to_start_from(place: Path) -> None:
    assert feddf("presets", cwd=place).stdout.split()[0] == "demo"  # what takes minutes comes first
    assert list(json.loads(feddf("presets", "--json", cwd=place).stdout))[:3] == ["demo", "toy", "cifar10-small"]
    (place / "printed.toml").write_text(feddf("presets", "toy", cwd=place).stdout)
    assert load(str(place / "printed.toml")) == load("toy")
    (place / "printed.toml").write_bytes(b"\xef\xbb\xbf" + (place / "printed.toml").read_bytes())
    assert load(str(place / "printed.toml")) == load("toy")  # with the mark that some editors write


def test_a_finished_run_can_be_given_more_rounds(place: Path, tmp_path: Path) -> None:
    """The models are those of a run that had as many from the start."""
    shutil.copytree(place / "out", tmp_path / "longer")
    first = (place / "out" / "metrics.jsonl").read_text().splitlines()
    done = feddf("resume", str(tmp_path / "longer"), "rounds=3", cwd=place)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "longer" / "metrics.jsonl").read_text().splitlines()[:2] == first
    fresh = feddf("run", "small.toml", "rounds=3", "--out", str(tmp_path / "fresh"), "--json", cwd=place)
    assert json.loads(fresh.stdout)[0]["round"] == 3
    models = [(tmp_path / name / "models" / "mlp.safetensors").read_bytes() for name in ("longer", "fresh")]
    assert models[0] == models[1]
    refused = feddf("resume", str(tmp_path / "longer"), "rounds=1", cwd=place)
    assert refused.stderr.endswith("rounds = 1: 3 rounds are done already\n")


def test_a_stopped_comparison_says_how_to_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compare", "small.toml", "rounds=1", "--methods", "fedavg,fedprox", "--seeds", "0", "--out", "stopped")

    def stop_in_the_second(*given: Any) -> Iterator[Any]:
        if given[0].experiment.local.prox_mu:
            raise KeyboardInterrupt
        yield from run_experiment(*given)

    with monkeypatch.context() as patch:
        patch.setattr("feddf.runs.run.run_experiment", stop_in_the_second)
        done = feddf(*words, cwd=place)
    assert done.returncode == 130
    assert "run 1 of 2: fedavg, seed 0: round 1/1" in done.stdout
    assert done.stderr == f"stopped; finished rounds are safe. Continue with: feddf {' '.join(words)}\n"
    again = feddf(*words, cwd=place)
    assert "run 2 of 2: fedprox, seed 0: round 1/1" in again.stdout
    assert again.returncode == 0


def test_several_values_are_compared_in_one_table_and_one_picture(place: Path) -> None:
    done = feddf("compare", "small.toml", "alpha=0.5,5", "rounds=1", "--out", "sweep", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"]
    assert {row["setting"] for row in found} == {"alpha=0.5", "alpha=5"}
    assert (place / "sweep" / "by-alpha.png").is_file()
    header, *rows = (place / "sweep" / "comparison.csv").read_text().splitlines()
    assert header == "setting,method,model,measure,mean,std,n"
    assert all(0 <= abs(float(row.split(",")[4])) <= 100 for row in rows)


def test_a_report_on_several_runs_leaves_their_own_pictures_alone(place: Path) -> None:
    feddf("compare", "small.toml", "rounds=1", "--out", "two", cwd=place)
    for name in ("fedavg-seed0", "feddf-seed0"):
        (place / "two" / name / "curves.png").write_text("its own")
    paths = sorted(str(path.relative_to(place)) for path in (place / "two").iterdir())
    done = feddf("report", *paths, "--out", "drawn.svg", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("skipped: two/") == 3
    assert (place / "drawn.svg").is_file()
    assert (place / "two" / "feddf-seed0" / "curves.png").read_text() == "its own"


def test_a_second_run_with_the_same_words_says_that_one_is_finished(place: Path) -> None:
    words = ["run", "small.toml", "name=twice", "rounds=1"]
    assert feddf(*words, cwd=place).returncode == 0
    folder = place / "runs" / "twice-feddf-seed0"
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    again = feddf(*words, "workers=1", cwd=place)  # which changes no result
    assert again.returncode == 0
    assert "an equal run is finished, runs/twice-feddf-seed0" in again.stderr
    assert f"learning curves: runs/{folder.name}/curves.png; card: runs/{folder.name}/README.md" in again.stdout
    assert "Test accuracy" in again.stdout
    assert json.loads(feddf(*words, "--json", cwd=place).stdout)[0]["run"] == "runs/twice-feddf-seed0"
    assert [path.name for path in (place / "runs").glob("twice-*")] == [folder.name]
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before
    (folder / "README.md").unlink()  # it did not come to its end
    assert feddf(*words, cwd=place).returncode == 0
    assert (place / "runs" / "twice-feddf-seed0-2").is_dir()


def test_a_second_comparison_with_the_same_words_shows_the_first_and_resumes_what_is_unfinished(place: Path) -> None:
    words = ["compare", "small.toml", "name=thrice", "rounds=1", "--methods", "fedavg,fedprox"]
    first = feddf(*words, cwd=place)
    assert first.returncode == 0, first.stderr
    again = feddf(*words, cwd=place)
    assert "equal runs are in runs/thrice-compare: finished" in again.stderr
    assert "round 1/1, 4 clients" not in again.stdout
    table = first.stdout[first.stdout.index("Test accuracy") :]
    assert again.stdout == table
    for left in ("README.md", "models/mlp.safetensors"):
        (place / "runs" / "thrice-compare" / "fedprox-seed0" / left).unlink()
    resumed = feddf(*words, cwd=place)
    assert "1 of 2 unfinished" in resumed.stderr
    assert (place / "runs" / "thrice-compare" / "fedprox-seed0" / "README.md").is_file()
    other = feddf(*words[:-1], "fedavg,fedavgm", cwd=place)  # other methods are another comparison
    assert "equal runs" not in other.stderr
    assert sorted(path.name for path in (place / "runs").glob("thrice-*")) == ["thrice-compare", "thrice-compare-2"]


def test_a_report_without_words_is_about_the_folder_runs(tmp_path: Path, place: Path) -> None:
    missing = feddf("report", cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == "error: there is no folder 'runs' here; name run folders, or a folder of run folders\n"
    shutil.copytree(place / "out", tmp_path / "runs" / "first")
    shutil.copytree(place / "out", tmp_path / "runs" / "scored")
    log = tmp_path / "runs" / "scored" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"round"', '"score": "R²", "round"'))
    done = feddf("report", cwd=tmp_path)
    for score in ("accuracy", "R²"):  # not in one table
        assert f"Test {score} at the last round, in %: small" in done.stdout


def test_the_time_left_is_that_of_the_whole_comparison(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10**6, 100))  # a hundred seconds at every look
    monkeypatch.setattr("feddf.cli.running.time.monotonic", lambda: next(ticks))
    done = feddf("compare", "small.toml", "--seeds", "0,1", "--methods", "fedavg", "--out", "timed", cwd=place)
    (first, *_, last) = re.findall(r"(\S+ \w+) left", done.stdout)
    minutes = float(first.split()[0])
    assert first.endswith("min")
    assert minutes >= 3 * 100 / 60  # of four rounds one is done
    assert last == "0 s"


def test_the_card_tells_what_a_model_card_should(place: Path) -> None:
    text = (place / "out" / "README.md").read_text()
    (found,) = json.loads(feddf("report", "out", "--json", cwd=place).stdout)
    averaged, fused = (100 * found["models"]["mlp"][which] for which in ("averaged", "fused"))
    assert f"| mlp | `mlp` | {averaged:.1f} | {fused:.1f} |" in text
    assert "**FedDF " in text
    assert "![learning curves](curves.png)" in text
    for title in ("Test accuracy by class, in %", "Who holds what", "Versions"):
        assert f"## {title}" in text
    tested = json.loads((place / "out" / "tested.json").read_text())
    (rows,) = tested["confusion"].values()
    right = sum(rows[label][label] for label in range(len(rows))) / sum(map(sum, rows))
    assert right == pytest.approx(found["models"]["mlp"]["fused"])
    assert f"| {tested['classes'][0]} | {100 * rows[0][0] / sum(rows[0]):.1f} |" in text


def test_a_run_leaves_a_complete_folder(place: Path) -> None:
    names = {path.name for path in (place / "out").iterdir()}
    assert {"config.toml", "metrics.jsonl", "checkpoints", "models", "curves.png"} <= names
    assert (place / "out" / "models" / "mlp.safetensors").stat().st_size > 1000
    records = [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == [1, 2]
    for record in records:
        assert record["clients"] == ["client-0", "client-1", "client-2", "client-3"]
        assert record["dropped"] == []
        assert 0 <= record["ensemble"] <= 1
        assert record["models"]["mlp"].keys() == {"averaged", "fused", "validation"}
        assert {"train", "fuse", "ask", "distill", "evaluate"} <= record["seconds"].keys()
        assert record["distillation"]["mlp"]["steps"] == 20


MISTAKES = {  # the exit code, and the key with its value and the remedy
    "run small.toml alpha=-1": (2, "partition.alpha = -1: ... greater than 0"),
    "run small.toml sources=mnist-5k": (2, "pool.sources = 'mnist-5k': ... torch.uint8"),
    "run small.toml local_epochs=3": (2, "unknown key 'local_epochs'; did you mean 'local.epochs'?"),
    "run small.toml data.name=cifar10": (2, "data 'cifar10' is not complete in data: no file"),
    "run nowhere.toml": (2, "cannot read ... nowhere.toml"),
    "run demmo": (2, "'demmo'; did you mean 'demo'?"),
    "run small.toml --out out": (1, "out already holds a run; continue it with: feddf resume out"),
    "run small.toml alpha=3 --out out": (1, "out holds a run ... partition.alpha: 1.0 -> 3.0"),
    "resume out seed=9": (1, "out ... seed: 0 -> 9"),
    "resume nowhere": (1, "nowhere is not a run folder"),
    "report out --out x.xyz": (2, "--out = 'x.xyz': ... .png, .svg, .pdf"),
    "presets demmo": (2, "'demmo'; did you mean 'demo'?"),
    "config alhpa": (2, "no key or section is called 'alhpa'; did you mean 'alpha'?"),
    "fuse --teacher a --student cnn --unlabeled photo": (
        2,
        "--unlabeled = 'photo': ...; nor is there a file or folder of that name",
    ),
    "run small.toml data.name=ast:NodeVisitor": (2, "data.name = 'ast:NodeVisitor': ... returns a feddf.Dataset"),
    "run small.toml sources=3": (2, "pool.sources = 3: must be a list, for instance"),
    "run typo.toml": (2, "unknown section [distlil]; did you mean 'distill'?"),
    "report nowhere": (2, "nowhere is not a run folder"),
    "compare small.toml seeds=0": (2, "unknown key 'seeds'; ... --seeds"),
    "compare small.toml --seeds a": (2, "--seeds = 'a': ... whole numbers"),
    "compare small.toml --target 80": (2, "'--target': 80.0 is not in"),
    "compare small.toml --methods best": (2, "fusion.method = 'best': known are: fedavg, feddf, fedma"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_users_mistake_is_one_line_and_a_code(place: Path, words: str) -> None:
    before = sorted(place.rglob("*"))
    code, said = MISTAKES[words]
    done = feddf(*words.split(), cwd=place)
    assert done.returncode == code
    assert says(done.stderr, f"error: ...{said}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(place.rglob("*")) == before  # a mistake leaves nothing behind


def test_words_that_are_no_command_are_explained(place: Path) -> None:
    done = feddf("rum", cwd=place)
    assert done.returncode == 2
    assert "No such command" in done.stderr
    assert "Traceback" not in done.stderr
    assert feddf("preset", cwd=place).stderr.lower().count("did you mean") <= 1
    alone = feddf(cwd=place)
    assert (alone.returncode, alone.stderr.count("error")) == (2, 0)
    assert "Start with: feddf compare demo" in alone.stdout + alone.stderr


def test_resuming_a_finished_run_changes_nothing(place: Path) -> None:
    before = (place / "out" / "models" / "mlp.safetensors").read_bytes()
    done = feddf("resume", "out", "workers=1", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 rounds are done" in done.stdout
    assert (place / "out" / "models" / "mlp.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("line", "other", "said"),
    [
        (r'^torch = ".*"$', 'torch = "1.0"', "torch 1.0 ->"),
        (r'^device = "cpu"$', 'device = "cuda (a GPU)"', "device cuda (a GPU) -> cpu"),  # not the key, which is 'auto'
    ],
)
def test_other_versions_are_a_warning_and_refused_when_strict(
    place: Path, tmp_path: Path, line: str, other: str, said: str
) -> None:
    config = Path(shutil.copytree(place / "out", tmp_path / "copy")) / "config.toml"
    text, count = re.subn(line, other, config.read_text(), flags=re.M)
    assert count == 1
    config.write_text(text)
    config.with_suffix(".sha256").unlink()
    warned = feddf("resume", "copy", "run.device=cpu", cwd=tmp_path)
    assert warned.returncode == 0, warned.stderr
    assert f"warning: bytes may differ: {said}" in warned.stderr
    assert "device: cpu" in warned.stdout
    refused = feddf("resume", "copy", "--strict", cwd=tmp_path)
    assert (refused.returncode, "refused by --strict" in refused.stderr) == (1, True)


def test_compare_sets_methods_side_by_side_and_goes_on_where_it_stopped(place: Path) -> None:
    words = ("compare", "small.toml", "rounds=1", "--seeds", "0,1", "--out", "both")
    done = feddf(*words, cwd=place)
    assert done.returncode == 0, done.stderr
    assert "Test accuracy after round 1, in % (seeds 0, 1: mean ± sample" in done.stdout
    assert sorted(path.name for path in (place / "both").iterdir()) == [
        "comparison.csv", "comparison.md", "curves.png", "fedavg-seed0", "fedavg-seed1", "feddf-seed0", "feddf-seed1",
    ]  # fmt: skip
    again = feddf(*words, cwd=place)
    assert again.returncode == 0
    assert "round 1/1, 4 clients" not in again.stdout  # no round was run twice
    other = feddf(*words, "alpha=9", cwd=place)
    assert other.returncode == 1
    assert "holds a run with another configuration" in other.stderr


def test_report_draws_a_picture_for_each_experiment(place: Path) -> None:
    words = ("prototypes=[{model='mlp',name='other'}]", "pool.size=9", "--out", "other")
    other = feddf("run", "small.toml", *words, cwd=place)
    assert other.returncode == 0, other.stderr
    done = feddf("report", "out", "other", "--out", "picture.png", cwd=place)
    assert done.returncode == 0, done.stderr
    for name in ("picture.png", "picture-2.png"):
        assert (place / name).read_bytes().startswith(b"\x89PNG")


def test_own_modules_in_the_working_folder(place: Path) -> None:
    (place / "mine.py").write_text("from feddf.data.datasets import toy\ndef points(data): return toy(data)\n")
    words = ("data.name=mine:points", "rounds=1", "engine=processes", "workers=1", "--out", "own")
    done = feddf("run", "small.toml", *words, cwd=place)
    assert done.returncode == 0, done.stderr


def test_when_all_clients_fail_the_code_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG.replace('"in-process"', '"processes"'))
    done = feddf("run", "small.toml", "timeout=0.0001", "workers=2", "attempts=1", "--out", "late", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("error: round 1 had too few usable updates in each of 1 attempts (client-0: late")


def test_partition_draws_and_measures_several_alphas(tmp_path: Path) -> None:
    done = feddf("partition", "toy", "alpha=100,0.01", "clients.total=6", "--out", "dots.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "α = 100" in done.stdout
    assert "α = 0.01" in done.stdout
    assert (tmp_path / "dots.png").read_bytes().startswith(b"\x89PNG")
    for words, said in ((["alpha=-1"], "alpha = -1"), (["scheme=odd"], "dirichlet, dirichlet-equal, shards, iid")):
        mistake = feddf("partition", "toy", *words, cwd=tmp_path)
        assert mistake.returncode == 2
        assert said in mistake.stderr
    assert "cifar11" in feddf("partition", "cifar11", cwd=tmp_path).stderr
    values = feddf("partition", "diabetes", "clients.total=3", cwd=tmp_path).stdout  # whose clients differ by no class
    assert "groups" in values
    assert "class" not in values


@pytest.mark.parametrize(("app", "command"), [(cli.app, "resume"), (reproduction_app, "bound")])
def test_code_that_somebody_elses_run_names_is_not_run_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: Callable[..., Any], command: str
) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    assert feddf("run", "small.toml", "--out", "run", "rounds=1", cwd=tmp_path).returncode == 0
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('"mlp"', '"their-own:Net"'))
    (tmp_path / "run" / "config.sha256").unlink(missing_ok=True)
    monkeypatch.delitem(sys.modules, "their-own", raising=False)
    (tmp_path / "their-own.py").write_text("open('canary', 'w').close()\n")
    done = feddf(command, "run", cwd=tmp_path, app=app)
    assert not (tmp_path / "canary").exists()
    assert (done.returncode, done.stdout) == (1, "")
    assert "their-own:Net; look at that code, then say --trust" in done.stderr.replace("\n", " ")
    feddf(command, "run", "--trust", cwd=tmp_path, app=app)
    assert (tmp_path / "canary").exists()


def test_a_report_shows_names_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    name = "run [/] [red]\x1b[2J"
    assert feddf("run", "small.toml", "--out", name, "rounds=1", cwd=tmp_path).returncode == 0
    done = feddf("report", name, "--out", f"{name}.png", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "run [/] [red]?[2J" in done.stdout
    assert "\x1b" not in done.stdout
