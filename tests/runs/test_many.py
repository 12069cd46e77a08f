"""Many experiments: folders are checked before any is made, what has ended is left alone, failures are noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddf.config import Experiment, parse, with_values
from feddf.runs.many import failure_of, run_many, unfinished
from feddf.runs.store import RunFolder, StoreError

BASE = parse(
    {
        "data": {"name": "toy"}, "prototypes": [{"model": "mlp", "width": 4}], "clients": {"total": 4}, "rounds": 1,
        "local": {"epochs": 1}, "fusion": {"method": "fedavg"}, "run": {"engine": "in-process"},
    }
)  # fmt: skip


def seeds(folder: Path, **changes: object) -> dict[Path, Experiment]:
    values = {name.replace("_", "."): value for name, value in changes.items()}
    return {folder / str(seed): with_values(BASE, {"seed": seed, **values}) for seed in (0, 1)}


def test_what_has_ended_is_not_run_again_and_what_is_longer_goes_on(tmp_path: Path) -> None:
    assert [path.name for path, _ in run_many(seeds(tmp_path))] == ["0", "1"]
    assert list(run_many(seeds(tmp_path))) == []
    assert [failure for _, failure in run_many(seeds(tmp_path, rounds=2))] == ["", ""]
    assert [len(RunFolder.open(path).records()) for path in seeds(tmp_path)] == [2, 2]


def test_the_card_of_any_run_has_its_curves(tmp_path: Path) -> None:
    for path, _ in run_many(seeds(tmp_path)):
        assert (path / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert "![learning curves](curves.png)" in (path / "README.md").read_text()


def test_a_run_that_was_killed_before_it_wrote_its_models_has_not_ended(tmp_path: Path) -> None:
    for _ in run_many(seeds(tmp_path)):
        pass
    log = tmp_path / "0" / "metrics.jsonl"
    log.write_bytes(log.read_bytes())  # later than the model card
    assert unfinished(seeds(tmp_path)) == [tmp_path / "0"]
    (tmp_path / "1" / "README.md").unlink()
    assert len(list(run_many(seeds(tmp_path)))) == 2
    assert unfinished(seeds(tmp_path)) == []


def test_no_folder_is_made_where_one_holds_another_run(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "1", with_values(BASE, {"seed": 7}))
    with pytest.raises(StoreError, match="1 holds a run with another configuration: seed"):
        next(run_many(seeds(tmp_path)))
    assert not (tmp_path / "0").exists()


@pytest.mark.parametrize("parallel", [0, 2])
def test_too_few_clients_are_a_failure_for_good_and_the_others_run(tmp_path: Path, parallel: int) -> None:
    diverging = {**seeds(tmp_path), tmp_path / "0": with_values(BASE, {"local.lr": 1e30, "clients.attempts": 1})}
    outcome = {path.name: failure for path, failure in run_many(diverging, parallel)}
    assert outcome["1"] == ""
    assert outcome["0"] == failure_of(tmp_path / "0")
    assert "too few usable updates" in outcome["0"]
    assert list(run_many(diverging, parallel)) == []
