from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from feddf.config import parse
from feddf.runs import store
from feddf.runs.store import RunFolder, StoreError, pack, unpack
from feddf.states import digest
from feddf.types import ServerState

EXPERIMENT = parse(
    {
        "data": {"name": "toy"},
        "pool": {"sources": ["plane"]},
        "prototypes": ["mlp", {"model": "cnn", "width": 4, "name": "c"}],
        "fusion": {"options": {"a": {"b": [1, 2.5]}, "c": "d"}},
    }
)


def state(number: int) -> ServerState:
    def weights() -> dict[str, torch.Tensor]:
        return {"layer.weight": torch.full((3, 2), float(number)), "count": torch.tensor(number)}

    memory = {"velocity": {"a/b": {"v": torch.ones(2)}}, "mine": {"x": {"y": torch.zeros(1)}}}
    models, own = {"a/b": weights(), "c": weights()}, {"client-0": {"mean": torch.ones(3)}}
    return ServerState(number, models, own, memory, {"client-1": number, "client-0": 1})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", EXPERIMENT)


def test_a_configuration_comes_back_whole(folder: RunFolder) -> None:
    assert RunFolder.open(folder.path).experiment() == EXPERIMENT
    assert folder.versions() == store.versions(EXPERIMENT)
    assert {"torch", "python", "cpu"} <= folder.versions().keys()


def test_a_checkpoint_comes_back_whole_and_equal_states_are_equal_bytes(folder: RunFolder) -> None:
    folder.save(state(3), keep=2)
    saved, complaints = folder.latest()
    assert saved is not None
    assert (saved.round, complaints) == (3, [])
    assert digest(saved.models) == digest(state(3).models)
    assert digest(saved.own) == digest(state(3).own)
    assert saved.counted == {"client-0": 1, "client-1": 3}
    assert saved.memory.keys() == {"velocity", "mine"}
    for whose, states in state(3).memory.items():
        assert digest(saved.memory[whose]) == digest(states)
    assert pack(state(3)) == pack(state(3)) == pack(unpack(pack(state(3))))
    turned = replace(state(3), counted=dict(reversed(state(3).counted.items())))
    assert pack(turned) == pack(state(3)) != pack(replace(state(3), counted={"client-0": 1}))


def test_a_checkpoint_of_before_clients_kept_states_can_be_read() -> None:
    """And one of a method whose clients keep nothing has the same bytes as it had then."""
    plain = replace(state(3), counted={})
    header = json.loads(pack(plain)[8 : 8 + int.from_bytes(pack(plain)[:8], "little")])
    assert json.loads(header["__metadata__"]["feddf"]) == {"round": 3}
    assert unpack(pack(plain)).counted == {}


def test_the_checksum_is_one_that_sha256sum_reads(folder: RunFolder) -> None:
    folder.save(state(1), keep=2)
    subprocess.run(["sha256sum", "--check", "--strict", "round-0001.sha256"], cwd=folder.checkpoints, check=True)


def test_only_the_newest_checkpoints_are_kept(folder: RunFolder) -> None:
    for number in range(1, 6):
        folder.save(state(number), keep=2)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "round-0004.safetensors", "round-0004.sha256", "round-0005.safetensors", "round-0005.sha256",
    ]  # fmt: skip


def test_the_newest_is_the_highest_number(folder: RunFolder) -> None:
    for number in (9_999, 10_000):
        folder.save(state(number), keep=1)
    saved, _ = folder.latest()
    assert saved is not None
    assert saved.round == 10_000


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "no checksum", "garbage"])
def test_a_damaged_checkpoint_is_said_aloud_and_the_one_before_is_used(folder: RunFolder, damage: str) -> None:
    folder.save(state(1), keep=3)
    folder.save(state(2), keep=3)
    path = folder.checkpoints / "round-0002.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "no checksum":
        path.with_suffix(".sha256").unlink()
    elif damage == "flip":
        content[-3] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes({"truncate": content[:-5], "empty": b"", "garbage": b"x" * 300}[damage])
    saved, complaints = folder.latest()
    assert saved is not None
    assert saved.round == 1
    assert len(complaints) == 1
    assert "round-0002.safetensors is damaged" in complaints[0]


def test_half_a_checkpoint_is_never_seen(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills while the new one is written: the old one is whole, and no rubbish stays."""
    folder.save(state(1), keep=2)
    before = {path.name for path in folder.checkpoints.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            folder.save(state(2), keep=2)
    assert {path.name for path in folder.checkpoints.iterdir()} == before
    saved, _ = folder.latest()
    assert saved is not None
    assert saved.round == 1


def test_the_log_survives_a_cut_off_line_and_forgets_what_has_no_checkpoint(folder: RunFolder) -> None:
    for number in (1, 2, 3):
        folder.append({"round": number, "models": {}})
    with folder.metrics.open("a") as log:
        log.write('{"round": 4, "clie')
    assert [record["round"] for record in folder.records()] == [1, 2, 3]
    folder.forget_after(2)
    folder.append({"round": 3, "models": {}})
    assert folder.metrics.read_text() == "".join(f'{{"round": {n}, "models": {{}}}}\n' for n in (1, 2, 3))


def test_a_run_is_never_written_over(folder: RunFolder) -> None:
    with pytest.raises(StoreError, match="already holds a run; continue it with: feddf resume"):
        RunFolder.create(folder.path, EXPERIMENT)


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write to the run folder"):
        RunFolder.create(tmp_path / "file" / "run", EXPERIMENT)


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a run folder: it has no config\.toml"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("local_epochs = 3\n", r"config\.toml: unknown key 'local_epochs'; did you mean 'local\.epochs'\?"),
        ("x = = 3\n", r"cannot read .*config\.toml: Invalid value"),
        ("[flower]\n", "is a run over Flower; start its server app again and it goes on"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_one_line_with_its_file(
    folder: RunFolder, added: str, said: str
) -> None:
    path = folder.path / "config.toml"
    text = path.read_text()
    path.write_text(text + added if added.startswith("[") else added + text)
    path.with_suffix(".sha256").unlink()  # as a user would who means it
    with pytest.raises(StoreError, match=said) as error:
        folder.experiment()
    assert "\n" not in str(error.value)


def test_a_second_server_on_the_same_folder_is_refused(folder: RunFolder) -> None:
    code = (
        "import sys, pathlib\nfrom feddf.runs.store import RunFolder, StoreError\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        with RunFolder(pathlib.Path(sys.argv[1])).locked(): print('entered', flush=True)\n"
        "    except StoreError as error: print(error, flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    pipe, command = subprocess.PIPE, [sys.executable, "-c", code, str(folder.path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        with folder.locked():
            assert "another process is running in" in other.stdout.readline()
        assert other.communicate("again\n\n", timeout=60)[0] == "entered\n"
