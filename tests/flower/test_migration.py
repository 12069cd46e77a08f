"""The example that moves a Flower app over to FedDF: both versions run, and little is changed."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

from feddf.runs import RunFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-migration"


def run(version: str, folder: Path) -> str:
    words = [sys.executable, str(Path(__file__).with_name("migrated.py")), str(EXAMPLE / version), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def test_before_it_averages_one_model(tmp_path: Path) -> None:
    assert "accuracy" in run("before", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_after_it_fuses_two_sizes(tmp_path: Path) -> None:
    run("after", tmp_path / "run")
    records = RunFolder.open(tmp_path / "run").records()
    assert [record["round"] for record in records] == [1, 2, 3]
    assert {len(record["clients"]) for record in records} == {10}
    assert all(records[-1]["models"][size]["fused"] > 0.6 for size in ("small", "large"))


def test_training_is_untouched_and_few_lines_change() -> None:
    def lines(version: str, name: str) -> list[str]:
        return (EXAMPLE / version / "digits" / name).read_text().splitlines()

    assert lines("before", "task.py") == lines("after", "task.py")
    changes = list(difflib.unified_diff(lines("before", "client_app.py"), lines("after", "client_app.py"), n=0))
    added = [line for line in changes if line.startswith("+") and not line.startswith("+++") and line != "+"]
    assert len(added) <= 6
