"""Damaged, stray and foreign files: said, kept, and never believed."""

from __future__ import annotations

import errno
import hmac
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conftest import Tiny, update_of
from feddf.config import parse, with_values
from feddf.report.read import read_run
from feddf.runs.spool import DiskSpool
from feddf.runs.store import RunFolder, StoreError
from feddf.runtime import atomic
from feddf.types import Job, ServerState, Update

EXPERIMENT = parse({"data": {"name": "toy"}, "pool": {"sources": ["plane"]}, "prototypes": ["mlp"]})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", EXPERIMENT)


def log(folder: RunFolder, rounds: int) -> list[bytes]:
    for number in range(1, rounds + 1):
        folder.append({"round": number, "models": {}})  # type: ignore[typeddict-item]
    return folder.metrics.read_bytes().splitlines()


@pytest.mark.parametrize("broken", [b'{"round": 2, "models', b"\xff\xfe not text", b"", b"17", b"[" * 100_000])
def test_one_damaged_line_of_the_log_costs_that_line_only(folder: RunFolder, broken: bytes) -> None:
    lines = log(folder, 4)
    as_it_was = b"\n".join([lines[0], broken, *lines[2:]]) + b"\n"
    folder.metrics.write_bytes(as_it_was)
    assert [record["round"] for record in folder.records()] == [1, 3, 4]
    assert read_run(folder.path).rounds == [1, 3, 4]
    assert "line 2" in folder.damage()[0]
    (complaint,) = folder.forget_after(3)
    assert "line 2" in complaint
    assert "metrics.jsonl.damaged-1" in complaint
    assert (folder.path / "metrics.jsonl.damaged-1").read_bytes() == as_it_was
    assert [record["round"] for record in folder.records()] == [1, 3]
    assert folder.forget_after(3) == []  # it is whole now


def test_a_line_that_a_crash_cut_off_is_no_damage(folder: RunFolder) -> None:
    log(folder, 2)
    with folder.metrics.open("ab") as file:
        file.write(b'{"round": 3, "mod')
    assert folder.damage() == folder.forget_after(2) == []
    assert [record["round"] for record in folder.records()] == [1, 2]


def test_stray_files_among_the_checkpoints_do_not_matter(folder: RunFolder) -> None:
    folder.save(ServerState(3, {"m": {"w": torch.ones(2)}}), keep=2)
    whole = folder.checkpoints / "round-0003.safetensors"
    for stray in ("round-0003 (copy).safetensors", "round-.safetensors", "round-x.safetensors"):
        (folder.checkpoints / stray).write_bytes(whole.read_bytes())
    saved, complaints = folder.latest()
    assert saved is not None
    assert (saved.round, complaints) == (3, [])


def test_a_changed_configuration_is_noticed(folder: RunFolder) -> None:
    path = folder.path / "config.toml"
    path.write_bytes(path.read_bytes().replace(b"seed = 0", b"seed = 1"))
    with pytest.raises(StoreError, match=r"config\.toml: its checksum does not match"):
        folder.experiment()


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, "fsync", full)
    for write in (
        lambda: atomic.write_atomically(tmp_path / "a.bin", b"x"),
        lambda: atomic.append_line(tmp_path / "a.bin", "x"),
    ):
        with pytest.raises(OSError, match=r"No space left on device: .*a\.bin"):
            write()


def test_a_spooled_update_with_another_count_is_not_believed(tiny: Tiny, tmp_path: Path) -> None:
    client = tiny.federation.clients[0]
    job = Job(client, 1, tiny.server.models[client.prototype], 5)
    spool = DiskSpool(tmp_path / "spool")
    kept = spool.keep(job, update_of(tiny.local(job)))
    assert isinstance(kept, Update)
    assert spool.recall(job) is not None
    (path,) = spool.folder.iterdir()
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["feddf"])
    save_file(load_file(path), path, {"feddf": json.dumps({**about, "n_examples": about["n_examples"] + 1})})
    assert spool.recall(job) is None


FOREIGN = {
    "prototypes": ["nowhere:Net"],
    "fusion.method": "nowhere:rule",
    "data.name": "nowhere:data",
    "pool.sources": ["generator:somewhere"],
    "run.loggers": ["nowhere:Tracker"],
    "run": {"engine": "ray", "ray_address": "somewhere:6379"},
}
HIDDEN = {
    "prototypes": [["no-where:Net"], ["folder:Net"], ["\u00e9vil:Net"]],
    "data.name": ["images:data"],
    "pool.sources": [["generator:some\nwhere"]],
}
"""Names of code that do not look like ``module:attribute`` at first sight, but are imported or run all the same."""


@pytest.mark.parametrize(
    ("key", "value"),
    [*FOREIGN.items(), *((key, value) for key, values in HIDDEN.items() for value in values)],
)
def test_code_that_a_foreign_folder_names_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    changes = {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    folder = RunFolder.create(tmp_path / "run", with_values(EXPERIMENT, changes))
    folder.check_trust()  # one's own
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody-else"))
    with pytest.raises(StoreError, match=r"--trust"):
        folder.check_trust()
    folder.check_trust(trust=True)


def test_a_foreign_folder_without_code_needs_no_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "data.name": "folder:/a:b",
        "pool.sources": ["images:c"],
        "run.device": "cpu:0",
        "description": "one: two",
    }
    folder = RunFolder.create(tmp_path / "run", with_values(EXPERIMENT, changes))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody-else"))
    folder.check_trust()


def test_a_key_that_was_emptied_makes_nothing_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = RunFolder.create(tmp_path / "run", with_values(EXPERIMENT, {"prototypes": ["nowhere:Net"]}))
    (tmp_path / "feddf" / "key").write_bytes(b"")
    content = (folder.path / "config.toml").read_bytes()
    (folder.path / "origin").write_text(hmac.new(b"", content, "sha256").hexdigest())  # as anybody could make it
    with pytest.raises(StoreError, match="--trust"):
        folder.check_trust()


def test_a_class_that_nobody_holds_is_said(tmp_path: Path) -> None:
    from feddf.runs.build import _warnings, build

    parts = build(EXPERIMENT)
    assert parts.warnings == ()
    train = parts.task.train
    without = [shard[train.labels[shard] != 1] for shard in parts.task.shards]
    assert "class 1" in _warnings(replace(parts.task, shards=without))[0]
