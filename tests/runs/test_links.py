"""A run folder made elsewhere may hold links; nothing is written where they lead, and nothing waits for a pipe."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from feddf import RunFolder, build, load, load_model, run_experiment
from feddf.cli import app, guarded
from feddf.config.errors import FeddfError
from feddf.runtime.atomic import append_line, held, new_file, read_regular, write_atomically

EXPERIMENT = load("toy", ["rounds=1", "local.epochs=1", "distill.steps=2", "run.engine=in-process"])
PRECIOUS = b"export PATH=somewhere\n"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "run"
    list(run_experiment(build(EXPERIMENT), RunFolder.create(path, EXPERIMENT)))
    return path


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    """Return somebody else's run folder, of one round."""
    return Path(shutil.copytree(done, tmp_path / "run"))


def feddf(*words: str) -> int:
    return guarded(lambda: app([*words, "--quiet"], standalone_mode=False))


FILES = [
    *("lock", ".config.toml.tmp", ".config.sha256.tmp", ".config.json.tmp", ".partition.json.tmp", ".README.md.tmp"),
    *(
        "metrics.jsonl",
        ".metrics.jsonl.tmp",
        "curves.png",
        "README.md",
        "config.json",
        "partition.json",
        "tested.json",
        "origin",
    ),
    *("checkpoints/.round-0002.safetensors.tmp", "checkpoints/round-0002.safetensors", "models/.mlp.safetensors.tmp"),
    *("models/mlp.safetensors", "trace.json"),
]


@pytest.mark.parametrize("name", FILES)
def test_no_file_outside_is_changed(name: str, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(PRECIOUS)
    kept = (run / name).read_bytes() if name == "metrics.jsonl" else PRECIOUS
    target.write_bytes(kept)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
    codes = [feddf("resume", str(run), "rounds=2"), feddf("report", str(run))]
    assert target.read_bytes() == kept
    assert 0 in codes, "a report only reads"


@pytest.mark.parametrize("name", ["models", "checkpoints", "spool", "tensorboard"])
def test_no_folder_outside_is_written_to(name: str, run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    if (run / name).exists():
        shutil.move(run / name, outside)
    outside.mkdir(exist_ok=True)
    before = sorted((path.name, path.read_bytes()) for path in outside.iterdir())
    (run / name).symlink_to(outside)
    assert feddf("resume", str(run), "rounds=2") == 1
    assert sorted((path.name, path.read_bytes()) for path in outside.iterdir()) == before


PIPES = ["lock", "metrics.jsonl", "config.toml", "config.json", "failed.txt", "checkpoints/round-0001.safetensors"]


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_is_not_waited_for(name: str, run: Path) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with suppress(FeddfError):
        load_model(run)
    assert feddf("resume", str(run), "rounds=2") in (0, 1)  # from an earlier round, or with a complaint
    assert feddf("report", str(run)) in (0, 1, 2)


def test_a_report_writes_nothing_unless_told_to(run: Path) -> None:
    (run / "curves.png").unlink(missing_ok=True)
    before = sorted((path, path.lstat().st_mtime_ns) for path in [run, *run.rglob("*")])
    assert feddf("report", str(run)) == 0
    assert sorted((path, path.lstat().st_mtime_ns) for path in [run, *run.rglob("*")]) == before


def test_a_run_may_still_be_named_by_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    assert feddf("resume", str(tmp_path / "latest"), "rounds=2") == 0


WRITERS: dict[str, Callable[[Path], None]] = {
    "append": lambda path: append_line(path, "x"),
    "lock": lambda path: held(path, RuntimeError()).__enter__(),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_a_log_and_a_lock_follow_no_link(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(PRECIOUS)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link"):
        write(tmp_path / "link")
    assert (tmp_path / "target").read_bytes() == PRECIOUS


def test_a_lock_leaves_what_is_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(PRECIOUS)
    with held(tmp_path / "lock", RuntimeError()):
        pass
    assert (tmp_path / "lock").read_bytes() == PRECIOUS


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(PRECIOUS)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_bytes() == PRECIOUS
    assert (tmp_path / "link").read_bytes() == b"new"
    assert not (tmp_path / "link").is_symlink()


def test_names_of_temporary_files_cannot_be_foreseen(tmp_path: Path) -> None:
    with new_file(tmp_path / "a") as one, new_file(tmp_path / "a") as other:
        assert one != other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="regular"):
            read_regular(path)


def test_what_a_killed_process_was_writing_is_removed(run: Path) -> None:
    for left in (run / ".config.toml.00.tmp", run / "checkpoints" / ".round-0002.safetensors.00.tmp"):
        left.write_bytes(b"half")
        assert feddf("resume", str(run), "rounds=2") == 0
        assert not left.exists()
