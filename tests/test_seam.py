"""The seam: algorithms import little, a part of a method is one file, a knob is two edits, what taught is logged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import feddf
from feddf import RunFolder, build, load, run_experiment
from feddf.config import Record
from feddf.runs.store import unpack
from feddf.states import digest

PACKAGE = Path(feddf.__file__).parent
CELLS = PACKAGE.parents[1] / "results" / "cells"


def python(program: str, *words: str, path: Path | None = None, cwd: Path | None = None) -> str:
    env = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


LOADED = "import sys, {}; print(sum(name.split('.')[0] == 'feddf' for name in sys.modules))"


@pytest.mark.parametrize(
    ("module", "most"), [("feddf.fusion.average", 18), ("feddf.fusion.scaffold", 19), ("feddf.fusion.feddf", 30)]
)
def test_an_algorithm_imports_little(module: str, most: int) -> None:
    assert int(python(LOADED.format(module))) <= most


def test_files_of_algorithms_are_short() -> None:
    lines = {name: len((PACKAGE / "fusion" / f"{name}.py").read_text().splitlines()) for name in ("feddf", "scaffold")}
    assert lines["feddf"] <= 100
    assert lines["scaffold"] <= 70


def test_a_part_of_a_method_is_one_file_and_one_name() -> None:
    named = [path for path in PACKAGE.rglob("*.py") if "scaffold" in path.read_text().lower()]
    assert sorted(path.name for path in named) == ["names.py", "scaffold.py"]


# A second method of that kind, outside the package

FEDDYN = '''
"""FedDyn (Acar et al. 2021): h_k and the server's h take the clients' drift into account."""

from dataclasses import replace

import torch
from feddf.types import Part, Sent, Steps

ALPHA, NAME = 0.1, "dynamics"


def feddyn(resources):
    def around(inner):
        def fuse(server, updates, seed):
            fused = inner(server, updates, seed)
            h, models = dict(server.memory.get(NAME, {})), {}
            for name, averaged in fused.server.models.items():
                mine = [one for one in updates if one.prototype == name]
                old, n = server.models[name], resources.n_clients(name)
                floats = [key for key in old if old[key].is_floating_point()]
                before = h.get(name, {key: torch.zeros_like(old[key]) for key in floats})
                moved = {key: sum(one.state[key] - old[key] for one in mine) for key in floats}
                h[name] = {key: before[key] - ALPHA / n * moved[key] for key in floats}
                models[name] = {key: averaged[key] - h[name][key] / ALPHA if key in h[name] else averaged[key]
                                for key in averaged}
            after = replace(fused.server, models=models, memory={**fused.server.memory, NAME: h})
            return replace(fused, server=after)

        return fuse

    return Part(half=follow, fuse=around, keeps=True)


def follow(model, training):
    start = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    own = training.job.kept.get(NAME, {key: torch.zeros_like(weight) for key, weight in start.items()})

    def correct():
        for key, weight in model.named_parameters():
            weight.grad.add_(ALPHA * (weight.detach() - start[key]) - own[key])

    def finish():
        end = dict(model.named_parameters())
        return Sent(kept={NAME: {key: own[key] - ALPHA * (end[key].detach() - start[key]) for key in start}})

    return Steps(correct=correct, finish=finish)
'''

SMALL = [
    *("rounds=3", "clients.total=4", "clients.fraction=0.5", "local.epochs=2", "distill.steps=2"),
    *("run.engine=in-process", "partition.min_size=2"),
]


def run(folder: Path, *changes: str) -> list[Record]:
    experiment = load("toy", [*SMALL, *changes])
    return list(run_experiment(build(experiment), RunFolder.create(folder, experiment)))


def models(folder: Path) -> str:
    return digest(unpack(sorted((folder / "checkpoints").glob("*.safetensors"))[-1].read_bytes()).models)


def test_another_method_of_that_kind_needs_nothing_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_feddyn.py").write_text(FEDDYN)
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "plain", "fusion.method=fedavg")
    added = 'fusion.parts=["my_feddyn:feddyn"]'
    records = run(tmp_path / "dyn", "fusion.method=fedavg", added)
    assert all(record["kept_by_clients"] > 0 for record in records)
    assert models(tmp_path / "dyn") != models(tmp_path / "plain")
    short = load("toy", [*SMALL, "fusion.method=fedavg", added, "rounds=1"])
    list(run_experiment(build(short), RunFolder.create(tmp_path / "resumed", short)))
    longer = load("toy", [*SMALL, "fusion.method=fedavg", added])
    folder = RunFolder.open(tmp_path / "resumed")
    folder.continue_as(longer)
    list(run_experiment(build(longer), folder))
    assert models(tmp_path / "resumed") == models(tmp_path / "dyn")


@pytest.mark.parametrize("method", ["fedavg+scaffold", "feddf+scaffold"])
def test_control_variates_give_the_same_bytes_in_worker_processes(method: str, tmp_path: Path) -> None:
    run(tmp_path / "here", f"fusion.method={method}")
    run(tmp_path / "there", f"fusion.method={method}", "run.engine=processes", "run.workers=2")
    run(tmp_path / "without", f"fusion.method={method.removesuffix('+scaffold')}")
    assert models(tmp_path / "here") == models(tmp_path / "there") != models(tmp_path / "without")


# What taught is what is logged


def ensembles(folder: Path, *changes: str) -> list[tuple[float | None, float | None, str | None]]:
    records = run(folder, "rounds=2", "test_size=200", *changes)
    return [(record["ensemble"], record["avg_logits"], record.get("no_ensemble")) for record in records]


def test_the_logged_ensemble_is_the_one_that_taught(tmp_path: Path) -> None:
    plain = ensembles(tmp_path / "plain", "fusion.method=feddf")
    assert all(taught == averaged is not None and why is None for taught, averaged, why in plain)
    other = ensembles(tmp_path / "counts", "fusion.method=feddf", "ensemble.weights=class-counts", "distill.steps=1")
    assert any(taught != averaged for taught, averaged, _ in other)
    assert all(taught is None and averaged is not None for taught, averaged, _ in ensembles(
        tmp_path / "fedavg", "fusion.method=fedavg"))  # fmt: skip
    first, second = ensembles(tmp_path / "memory", "fusion.method=feddf", "ensemble.ema=0.5")
    assert first[2] is None
    assert second[0] is None
    assert "pool only" in str(second[2])


# A knob


def test_a_knob_is_two_edits(tmp_path: Path) -> None:
    """In a copy: the field with its meaning, and the line that uses it. No kept run gets another name by it."""
    shutil.copytree(PACKAGE, tmp_path / "feddf", ignore=shutil.ignore_patterns("__pycache__"))
    sections, distill = tmp_path / "feddf/config/sections.py", tmp_path / "feddf/fusion/distill.py"
    field = '    steps: int = key(10_000, "N, the most steps"'
    knob = '    weight_decay: float = key(0.0, "of Adam\'s steps", kind="method", ge=0)\n'
    sections.write_text(sections.read_text().replace(field, knob + field))
    use = "torch.optim.Adam(weights, lr=config.lr)"
    assert use in distill.read_text()
    distill.write_text(distill.read_text().replace(use, use[:-1] + ", weight_decay=config.weight_decay)"))
    explained = python("from feddf.cli import main; main()", "config", "distill.weight_decay", path=tmp_path)
    assert "of Adam's steps" in explained
    found = python(
        "import sys; from pathlib import Path; from feddf import load; from reproduction.cells import hash_of\n"
        "runs = sorted(Path(sys.argv[1]).iterdir())[::20]\n"
        "print(all(hash_of(load(str(run / 'config.toml'))) == run.name for run in runs), len(runs))",
        str(CELLS),
        path=tmp_path,
        cwd=CELLS.parents[1],  # where reproduction/ is
    )
    assert found.startswith("True "), found
    assert int(found.split()[1]) >= 15
    command = (
        "import sys; from pathlib import Path\n"
        "from feddf import RunFolder, build, load, run_experiment\n"
        "experiment = load('toy', sys.argv[2:])\n"
        "list(run_experiment(build(experiment), RunFolder.create(Path(sys.argv[1]), experiment)))"
    )
    small = [*SMALL, "rounds=1", "fusion.method=feddf", "distill.steps=20", "distill.keep_init=false"]
    for name, changes in (("default", []), ("set", ["distill.weight_decay=10.0"])):
        python(command, str(tmp_path / name), *small, *changes, path=tmp_path)
    assert models(tmp_path / "default") != models(tmp_path / "set")
