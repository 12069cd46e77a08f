from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from feddf.cli import data_sets
from feddf.data.catalog import CATALOG
from local_server import Server, serving
from test_cli import feddf, says


def cifar100(label: int = 99) -> bytes:
    """An archive in CIFAR-100's layout, with three images a part."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in ("train", "test"):
            images = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
            content = pickle.dumps({b"data": images, b"fine_labels": [0, 1, label]}, 2)
            info = tarfile.TarInfo(f"cifar-100-python/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def offer(server: Server, patch: pytest.MonkeyPatch, archive: bytes) -> None:
    """Put an archive on the server, and its address and checksum into the catalog."""
    server.files["/cifar-100-python.tar.gz"] = archive
    entry, md5 = CATALOG["cifar100"], hashlib.md5(archive).hexdigest()
    download = replace(entry.downloads[0], url=f"{server.url}/cifar-100-python.tar.gz", checksum=f"md5:{md5}")
    patch.setitem(CATALOG, "cifar100", replace(entry, downloads=(download,)))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as server:
        offer(server, monkeypatch, cifar100())
        yield server


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if f" {name} " in line)


def test_a_data_set_is_listed_fetched_listed_again_and_checked(server: Server, tmp_path: Path) -> None:
    before = feddf("data", "list", cwd=tmp_path)
    assert before.returncode == 0
    assert "missing" in row(before.stdout, "cifar100")
    assert "feddf data fetch cifar100" in row(before.stdout, "cifar100")
    assert all(name in before.stdout for name in CATALOG)

    done = feddf("data", "fetch", "cifar100", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{server.url}/cifar-100-python.tar.gz: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("cifar100 is complete: ")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["cifar-100-python"]

    after = row(feddf("data", "list", cwd=tmp_path).stdout, "cifar100")
    assert " here " in after
    assert "kB" in after
    checked = feddf("data", "check", cwd=tmp_path)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout == (
        "cifar100: 3 training and 3 test examples, 100 classes, shape 3×32×32, labels within 0 to 99\n"
    )


def test_what_is_here_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        done = feddf("data", "fetch", "cifar100", "--data-dir", "mine", cwd=tmp_path)
    assert done.stdout == "cifar100 is here already: mine\n"
    assert len(server.seen) == 1
    assert feddf("data", "check", "cifar100", "--data-dir", "mine", cwd=tmp_path).returncode == 0


def test_a_download_that_broke_off_is_one_line_and_starts_again(server: Server, tmp_path: Path) -> None:
    server.mode = "truncated"
    done = feddf("data", "fetch", "cifar100", cwd=tmp_path)
    assert done.returncode == 1
    assert says(done.stderr, f"error: {server.url}/cifar-100-python.tar.gz broke off after ... bytes; try again\n")
    assert done.stderr.count("\n") == 1
    assert "missing" in row(feddf("data", "list", cwd=tmp_path).stdout, "cifar100")

    server.mode = "whole"
    assert feddf("data", "fetch", "cifar100", cwd=tmp_path).returncode == 0
    assert len(server.seen) == 2


def test_a_wrong_checksum_is_one_line_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.mode = "corrupted"
    done = feddf("data", "fetch", "cifar100", cwd=tmp_path)
    assert done.returncode == 1
    assert "removed: md5 must be" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_a_terminal_gets_a_bar_with_bytes_and_rate(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = StringIO()
    monkeypatch.setattr(data_sets, "out_console", Console(file=screen, force_terminal=True, width=120))
    assert feddf("data", "fetch", "cifar100", cwd=tmp_path).returncode == 0
    assert "cifar-100-python.tar.gz" in screen.getvalue()
    assert "━" in screen.getvalue()
    assert "kB" in screen.getvalue()
    assert "/s" in screen.getvalue() or "?" in screen.getvalue()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("fetch", "cifar11"), 2, "data = 'cifar11': ... cifar10, cifar100, stl10"),
        (("check", "cifar11"), 2, "data = 'cifar11': ... cifar10, cifar100, stl10"),
        (("fetch", "imagenet32"), 1, "data 'imagenet32' cannot be fetched ... account"),
        (("check", "cifar10"), 1, "cifar10: 6 of 6 files are missing in data, ... cifar-10-batches-py/data_"),
    ],
)
def test_a_users_mistake_is_one_line_and_a_code(tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = feddf("data", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert says(done.stderr, f"error: {said}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_label_out_of_range_and_a_damaged_file_are_found(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(server, monkeypatch, cifar100(label=100))
    feddf("data", "fetch", "cifar100", cwd=tmp_path)
    done = feddf("data", "check", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: cifar100: it has labels from 0 to 100, and must have 0 to 99\n"

    (tmp_path / "data" / "cifar-100-python" / "train").write_bytes(b"damaged")
    (tmp_path / "data" / "tiny-imagenet-32" / "a").mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (32, 32)).save(tmp_path / "data" / "tiny-imagenet-32" / "a" / f"{number}.png")
    done = feddf("data", "check", cwd=tmp_path)
    assert done.returncode == 1
    assert "cifar-100-python/train is not a CIFAR batch file" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout.startswith("tiny-imagenet: ")  # one that is broken does not hide the others


def test_nothing_to_check_is_no_error(tmp_path: Path) -> None:
    done = feddf("data", "check", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "no data set is in data; feddf data list shows how to get one\n")
