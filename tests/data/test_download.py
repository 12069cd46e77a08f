from __future__ import annotations

import gzip
import hashlib
import io
import stat
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


def test_checksums_are_optional_and_a_length_need_not_be_known(server: Server, target: Path) -> None:
    server.mode = "says no length"
    totals: list[int | None] = []
    fetch(f"{server.url}/file.bin", target, None, progress=lambda done, total: totals.append(total))
    assert target.read_bytes() == BODY
    assert set(totals) == {None}


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("truncated", rf"file\.bin broke off after {HALF} of {len(BODY)} bytes; try again"),
        ("cut", "broke off.+try again"),
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
        ("{server}/nowhere", "the server answered 404 Not Found"),
        ("http://127.0.0.1:1/file", "refused"),
        ("file:///etc/hostname", "must start with http"),
    ],
)
def test_an_address_that_leads_nowhere_is_one_line(server: Server, target: Path, url: str, said: str) -> None:
    with pytest.raises(DownloadError, match=said) as caught:
        fetch(url.format(server=server.url), target, None)
    assert "\n" not in str(caught.value)
    assert not target.exists()


def tar_of(path: Path, *members: tarfile.TarInfo | tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return path


def zip_of(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        for name, content in members:
            pack.writestr(name, content)
    return path


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def zip_link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_archives_of_every_kind_are_unpacked(tmp_path: Path) -> None:
    files = (("set/a", b"one"), ("set/deep/b", b"two"))
    expected = {"set/a": b"one", "set/deep/b": b"two"}
    folder = special("set", tarfile.DIRTYPE)
    for archive in (
        tar_of(tmp_path / "set.tar.gz", folder, *files),
        tar_of(tmp_path / "set.tgz", special("./", tarfile.DIRTYPE), *files),
        zip_of(tmp_path / "set.zip", ("set/", b""), *files),
    ):
        unpack(archive, tmp_path / archive.suffix)
        assert tree(tmp_path / archive.suffix) == expected
        assert [path.name for path in (tmp_path / archive.suffix).iterdir()] == ["set"]
    (tmp_path / "single.gz").write_bytes(gzip.compress(b"alone"))
    unpack(tmp_path / "single.gz", tmp_path / "one")
    assert tree(tmp_path / "one") == {"single": b"alone"}


def test_unpacking_replaces_its_own_files_and_keeps_all_others(tmp_path: Path) -> None:
    (tmp_path / "out" / "set").mkdir(parents=True)
    (tmp_path / "out" / "set" / "a").write_bytes(b"half")
    (tmp_path / "out" / "set" / "mine").write_bytes(b"kept")
    unpack(tar_of(tmp_path / "set.tar.gz", ("set/a", b"one"), ("set/b", b"two")), tmp_path / "out")
    assert tree(tmp_path / "out") == {"set/a": b"one", "set/b": b"two", "set/mine": b"kept"}


def test_no_right_of_others_to_write_and_no_setuid_is_taken_over(tmp_path: Path) -> None:
    info = special("program", tarfile.REGTYPE)
    info.mode = 0o6777
    unpack(tar_of(tmp_path / "set.tar.gz", info), tmp_path / "out")
    assert (tmp_path / "out" / "program").stat().st_mode & 0o6022 == 0


def evading_links() -> list[tarfile.TarInfo | tuple[str, bytes]]:
    """Links whose resolved path is too long for tarfile's filter "data" to see where it leads (CVE-2025-4517)."""
    members: list[tarfile.TarInfo | tuple[str, bytes]] = []
    folder, names = "", "abcdefghijklmnop"
    for name in names:
        members += [
            special(f"{folder}{'d' * 247}", tarfile.DIRTYPE),
            special(f"{folder}{name}", tarfile.SYMTYPE, "d" * 247),
        ]
        folder += "d" * 247 + "/"
    long = f"{'/'.join(names)}/{'l' * 254}"
    return [
        *members,
        special(long, tarfile.SYMTYPE, "../" * len(names)),
        special("way", tarfile.SYMTYPE, f"{long}/../../../outside"),
        special("evil", tarfile.LNKTYPE, "way/secret"),
        ("evil", b"!"),
    ]


HOSTILE_TARS: dict[str, list[tarfile.TarInfo | tuple[str, bytes]]] = {
    "upwards": [("fine", b""), ("set/../../evil", b"!")],
    "link upwards": [special("way", tarfile.SYMTYPE, "../../../outside"), ("way/evil", b"!")],
    "absolute link": [special("way", tarfile.SYMTYPE, "{outside}"), ("way/evil", b"!")],
    "hard link": [special("way", tarfile.LNKTYPE, "../../../outside/secret"), ("way", b"!")],
    "links that evade the filter": evading_links(),
    "device": [special("way", tarfile.CHRTYPE)],
    "pipe": [special("way", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("kind", HOSTILE_TARS)
def test_a_hostile_tar_is_refused_and_writes_nothing(outside: Path, tmp_path: Path, kind: str) -> None:
    members = [
        special(member.name, member.type, member.linkname.format(outside=outside))
        if isinstance(member, tarfile.TarInfo)
        else member
        for member in HOSTILE_TARS[kind]
    ]
    archive = tar_of(tmp_path / "bad.tar.gz", *members)
    before = tree(tmp_path)
    with pytest.raises(DownloadError, match=r"bad\.tar\.gz is refused: ") as caught:
        unpack(archive, tmp_path / "deep" / "out")
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == before
    assert list((tmp_path / "deep" / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["{outside}/evil", "//{outside}/evil", "..\\evil", "C:\\evil"])
def test_an_absolute_path_in_a_tar_stays_below_the_folder(outside: Path, tmp_path: Path, name: str) -> None:
    archive = tar_of(tmp_path / "bad.tar.gz", ("fine", b""), (name.format(outside=outside), b"!"))
    assert_nothing_outside(archive, tmp_path)


@pytest.mark.parametrize(
    "name", ["/{outside}/evil", "../evil", "../../outside/secret", "set/../../evil", "..\\evil", "C:\\evil"]
)
def test_a_path_in_a_zip_stays_below_the_folder(outside: Path, tmp_path: Path, name: str) -> None:
    archive = zip_of(tmp_path / "bad.zip", ("fine", b""), (name.format(outside=outside), b"!"))
    assert_nothing_outside(archive, tmp_path)


def test_a_link_in_a_zip_is_only_a_file(outside: Path, tmp_path: Path) -> None:
    archive = zip_of(tmp_path / "bad.zip", (zip_link("way"), str(outside).encode()), ("fine", b""))
    assert_nothing_outside(archive, tmp_path)
    assert not (tmp_path / "deep" / "out" / "way").is_symlink()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    return folder


def assert_nothing_outside(archive: Path, root: Path) -> None:
    before = tree(root)
    unpack(archive, root / "deep" / "out")
    after = tree(root)
    assert {name: content for name, content in after.items() if not name.startswith("deep/out/")} == before
    assert len(after) == len(before) + 2


def whole_archives(folder: Path) -> list[Path]:
    noise = np.random.default_rng(1).bytes(20_000)  # does not compress: every cut hurts something
    (folder / "c.gz").write_bytes(gzip.compress(noise))
    return [
        tar_of(folder / "a.tar.gz", ("x", noise), ("y", b"")),
        zip_of(folder / "b.zip", ("x", noise)),
        folder / "c.gz",
    ]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("lost", [1, 4, 8, 9, 100, 10_000, 19_990])
def test_a_truncated_archive_is_one_clear_error(tmp_path: Path, which: int, lost: int) -> None:
    archive = whole_archives(tmp_path)[which]
    archive.write_bytes(archive.read_bytes()[:-lost])
    with pytest.raises(DownloadError, match=rf"{archive.name} is damaged or cut short: .+; fetch it again") as caught:
        unpack(archive, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_changed_byte_in_an_archive_is_found(tmp_path: Path, which: int) -> None:
    archive = whole_archives(tmp_path)[which]
    content = bytearray(archive.read_bytes())
    content[10_000] ^= 1
    archive.write_bytes(content)
    with pytest.raises(DownloadError, match="is damaged or cut short"):
        unpack(archive, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["empty.tar.gz", "empty.zip", "empty.rar"])
def test_what_is_no_archive_is_one_clear_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"<html>not found</html>")
    with pytest.raises(DownloadError, match=r"damaged or cut short|must end in \.tar\.gz, \.tgz, \.zip or \.gz"):
        unpack(tmp_path / name, tmp_path / "out")


def test_a_time_that_no_clock_shows_is_one_clear_error(tmp_path: Path) -> None:
    info = special("x", tarfile.REGTYPE)
    info.mtime = 10**30
    with pytest.raises(DownloadError, match="is damaged"):
        unpack(tar_of(tmp_path / "bad.tar.gz", info), tmp_path / "out")


def test_a_name_that_is_a_file_and_a_folder_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="is damaged"):
        unpack(tar_of(tmp_path / "bad.tar.gz", ("x", b"1"), ("x/y", b"2")), tmp_path / "out")


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


def test_an_archive_that_cannot_be_unpacked_is_not_found_again(server: Server, tmp_path: Path) -> None:
    server.files["/set.zip"] = b"no zip"
    entry = Entry("set", ("set",), "", (Download(f"{server.url}/set.zip", ".", ("set",)),))
    with pytest.raises(DownloadError, match=r"set\.zip is damaged"):
        catalog.get(entry, tmp_path)
    server.files["/set.zip"] = zip_of(tmp_path / "made", ("set", b"right")).read_bytes()
    catalog.get(entry, tmp_path)
    assert (tmp_path / "set").read_bytes() == b"right"


def test_an_archive_without_the_promised_files_is_one_clear_error(server: Server, tmp_path: Path) -> None:
    server.files["/set.gz"] = gzip.compress(b"")
    entry = Entry("set", ("other",), "", (Download(f"{server.url}/set.gz", ".", ("other",)),))
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
        kind, _, digits = str(download.checksum).partition(":")
        assert kind == ("md5" if name in ("stl10", "sst2") else "sha256")  # nobody states theirs
        assert len(bytes.fromhex(digits)) == {"md5": 16, "sha256": 32}[kind]
        assert download.name.endswith((".tar.gz", ".zip", ".gz"))


def test_the_data_folder_is_the_given_one_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDDF_DATA", raising=False)
    assert root_of(None) == Path("data")
    monkeypatch.setenv("FEDDF_DATA", "elsewhere")
    assert root_of(None) == Path("elsewhere")
    assert root_of(Path("given")) == Path("given")
