from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from feddf.data import catalog
from feddf.data.catalog import BLOCK, CATALOG, Download, DownloadError, Entry, fetch, root_of, unpack
from local_server import Seen, Server, serving

BODY = np.random.default_rng(0).bytes(3 * BLOCK + 100)
SHA256, MD5 = f"sha256:{hashlib.sha256(BODY).hexdigest()}", f"md5:{hashlib.md5(BODY).hexdigest()}"
HALF = len(BODY) // 2


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")  # a machine's proxy must not come between
    with serving() as server:
        server.files["/file.bin"] = BODY
        yield server


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "new" / "file.bin"


def test_a_file_arrives_whole_and_appears_only_when_it_is(server: Server, target: Path) -> None:
    calls: list[tuple[int, int | None]] = []

    def watch(done: int, total: int | None) -> None:
        assert not target.exists()
        calls.append((done, total))

    fetch(f"{server.url}/file.bin", target, SHA256, watch)
    assert target.read_bytes() == BODY
    assert [path.name for path in target.parent.iterdir()] == ["file.bin"]
    assert calls[0] == (0, len(BODY))
    assert calls[-1] == (len(BODY), len(BODY))
    assert len(calls) > 2
    assert server.seen == [Seen("/file.bin", 200, len(BODY))]


def test_a_length_need_not_be_known(server: Server, target: Path) -> None:
    server.mode = "says no length"
    totals: list[int | None] = []
    fetch(f"{server.url}/file.bin", target, SHA256, progress=lambda done, total: totals.append(total))
    assert target.read_bytes() == BODY
    assert set(totals) == {None}


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("truncated", rf"file\.bin broke off after {HALF} of {len(BODY)} bytes; try again"),
        ("cut", r"cannot fetch http://.+/file\.bin: .+"),
    ],
)
def test_a_download_that_broke_off_is_one_line_leaves_nothing_and_starts_again(
    server: Server, target: Path, mode: str, said: str
) -> None:
    server.mode = mode
    with pytest.raises(DownloadError, match=said) as caught:
        fetch(f"{server.url}/file.bin", target, SHA256)
    assert "\n" not in str(caught.value)
    assert list(target.parent.iterdir()) == []

    server.mode = "whole"
    fetch(f"{server.url}/file.bin", target, SHA256)
    assert target.read_bytes() == BODY


@pytest.mark.parametrize(("kind", "right"), [("sha256", SHA256), ("md5", MD5)])
def test_a_corrupted_file_is_told_by_its_checksum_and_leaves_nothing(
    server: Server, target: Path, kind: str, right: str
) -> None:
    server.mode = "corrupted"
    changed = hashlib.new(kind, BODY[:-1] + bytes([BODY[-1] ^ 1])).hexdigest()
    with pytest.raises(DownloadError, match=f"{kind} must be {right.removeprefix(f'{kind}:')} and is {changed}$"):
        fetch(f"{server.url}/file.bin", target, right)
    assert list(target.parent.iterdir()) == []


def test_an_older_file_stays_until_the_new_one_is_whole(server: Server, target: Path) -> None:
    target.parent.mkdir()
    target.write_bytes(b"old")
    server.mode = "truncated"
    with pytest.raises(DownloadError):
        fetch(f"{server.url}/file.bin", target, SHA256)
    assert tree(target.parent) == {"file.bin": b"old"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("{server}/nowhere", "cannot fetch .+/nowhere: HTTP Error 404: Not Found"),
        ("http://127.0.0.1:1/file", "cannot fetch .+ refused"),
    ],
)
def test_an_address_that_leads_nowhere_is_one_line(server: Server, target: Path, url: str, said: str) -> None:
    with pytest.raises(DownloadError, match=said) as caught:
        fetch(url.format(server=server.url), target, SHA256)
    assert "\n" not in str(caught.value)
    assert not target.exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_failed_fetch_leaves_no_folder_of_its_own(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "data"
    if there:
        folder.mkdir()
    entry = Entry("set", ("set/a",), "", (Download("http://127.0.0.1:1/set.zip", "set", ("set/a",), SHA256),))
    with pytest.raises(DownloadError):
        catalog.get(entry, folder)
    assert folder.exists() == there
    assert not (folder / "set").exists()


def tar_of(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o6777
            tar.addfile(info, io.BytesIO(content))
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_archives_of_every_kind_are_unpacked_beside_what_is_there(tmp_path: Path) -> None:
    files = {"set/a": b"one", "set/deep/b": b"two"}
    for name in ("set.tar.gz", "set.zip", "single.gz"):
        folder = tmp_path / name.replace(".", "-")
        (folder / "set").mkdir(parents=True)
        (folder / "set" / "a").write_bytes(b"half")
        (folder / "set" / "mine").write_bytes(b"kept")
        archive = folder / name
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as pack:
                for inside, content in files.items():
                    pack.writestr(inside, content)
        elif name == "set.tar.gz":
            tar_of(archive, *files.items())
        else:
            archive.write_bytes(gzip.compress(b"alone"))
        unpack(archive)
        archive.unlink()
        found = {"set/a": b"half", "single": b"alone"} if name == "single.gz" else files
        assert tree(folder) == {**found, "set/mine": b"kept"}
        assert all(path.stat().st_mode & 0o6022 == 0 for path in folder.rglob("*"))  # others may not write


def pair(server: Server) -> Entry:
    """A data set of two compressed files, both on the server."""
    downloads = []
    for name in ("one", "two"):
        content = gzip.compress(name.encode())
        server.files[f"/{name}.gz"] = content
        md5 = f"md5:{hashlib.md5(content).hexdigest()}"
        downloads.append(Download(f"{server.url}/{name}.gz", "pair", (f"pair/{name}",), md5))
    return Entry("pair", ("pair/one", "pair/two"), "feddf data fetch pair", tuple(downloads))


def test_only_what_a_data_set_lacks_is_fetched(server: Server, tmp_path: Path) -> None:
    entry = pair(server)
    assert catalog.state(entry, tmp_path) == "missing"
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "one").write_bytes(b"mine")
    assert (catalog.state(entry, tmp_path), catalog.missing(entry, tmp_path)) == ("incomplete", ["pair/two"])
    catalog.get(entry, tmp_path)
    assert tree(tmp_path) == {"pair/one": b"mine", "pair/two": b"two"}
    assert [seen.path for seen in server.seen] == ["/two.gz"]
    assert (catalog.state(entry, tmp_path), catalog.size(entry, tmp_path)) == ("here", 7)
    catalog.get(entry, tmp_path)
    assert len(server.seen) == 1


def test_an_archive_that_was_put_there_by_hand_is_used_if_its_checksum_is_right(server: Server, tmp_path: Path) -> None:
    entry = pair(server)
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "one.gz").write_bytes(server.files["/one.gz"])
    (tmp_path / "pair" / "two.gz").write_bytes(b"something else")
    catalog.get(entry, tmp_path)
    assert tree(tmp_path) == {"pair/one": b"one", "pair/two": b"two"}
    assert [seen.path for seen in server.seen] == ["/two.gz"]


def test_an_archive_with_another_checksum_is_never_unpacked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, opened = pair(server), list[Path]()
    monkeypatch.setattr(catalog, "unpack", opened.append)
    (tmp_path / "pair").mkdir()
    for name in ("one", "two"):
        server.files[f"/{name}.gz"] = b"hostile"
        (tmp_path / "pair" / f"{name}.gz").write_bytes(b"hostile")
    with pytest.raises(DownloadError, match="was removed: md5 must be"):
        catalog.get(entry, tmp_path)
    assert opened == []


def test_an_archive_without_the_promised_files_is_one_clear_error(server: Server, tmp_path: Path) -> None:
    server.files["/set.gz"] = content = gzip.compress(b"")
    md5 = f"md5:{hashlib.md5(content).hexdigest()}"
    entry = Entry("set", ("other",), "", (Download(f"{server.url}/set.gz", ".", ("other",), md5),))
    with pytest.raises(DownloadError, match="data 'set' was fetched, and has no file other"):
        catalog.get(entry, tmp_path)


def test_what_a_killed_download_left_goes_with_the_next_one(server: Server, tmp_path: Path) -> None:
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / ".one.gz.0123456789abcdef.tmp").write_bytes(b"half")
    catalog.get(pair(server), tmp_path)
    assert tree(tmp_path) == {"pair/one": b"one", "pair/two": b"two"}


def test_what_needs_an_account_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"'imagenet32' cannot be fetched automatically: .*image-net\.org"):
        catalog.get(CATALOG["imagenet32"], tmp_path)


def test_an_image_folder_is_here_when_something_is_in_it(tmp_path: Path) -> None:
    entry = CATALOG["tiny-imagenet"]
    (tmp_path / "tiny-imagenet-32").mkdir()
    assert catalog.state(entry, tmp_path) == "missing"
    (tmp_path / "tiny-imagenet-32" / "a.png").write_bytes(b"12345")
    assert (catalog.state(entry, tmp_path), catalog.size(entry, tmp_path)) == ("here", 5)


@pytest.mark.parametrize("name", CATALOG)
def test_an_entry_is_consistent(name: str) -> None:
    entry = CATALOG[name]
    assert entry.name == name
    assert entry.files
    assert entry.how
    promised = [file for download in entry.downloads for file in download.files]
    assert not entry.downloads or sorted(promised) == sorted(entry.files)
    for download in entry.downloads:
        kind, _, digits = download.checksum.partition(":")
        assert kind == ("md5" if name in ("stl10", "sst2") else "sha256")  # nobody states theirs
        assert len(bytes.fromhex(digits)) == {"md5": 16, "sha256": 32}[kind]
        assert download.name.endswith((".tar.gz", ".zip", ".gz"))


def test_the_data_folder_is_the_given_one_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDDF_DATA", raising=False)
    assert root_of(None) == Path("data")
    monkeypatch.setenv("FEDDF_DATA", "elsewhere")
    assert root_of(None) == Path("elsewhere")
    assert root_of(Path("given")) == Path("given")
