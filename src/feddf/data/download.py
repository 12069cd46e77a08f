"""Files from the web: fetched so that a broken connection costs nothing, unpacked so that no archive writes outside."""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import re
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from feddf.config.errors import FeddfError

BLOCK = 1 << 18
MOST_UNPACKED = 1 << 28, 100
"""An archive may grow to so many bytes, or so many times its own size: the data sets here grow by six at the most."""
SILENCE = 60.0  # seconds without a byte after which a connection counts as broken

Progress = Callable[[int, int | None], None]
"""Told how many bytes are on disk and how many there will be (``None``: the server did not say)."""

_BAD_ARCHIVE = (
    EOFError,
    FileExistsError,  # a name that is a file's and a folder's at once
    IsADirectoryError,
    NotADirectoryError,
    RuntimeError,  # a zip with a password, or a compression that is not known
    ValueError,
    gzip.BadGzipFile,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


class _TooLarge(Exception):
    """An archive unpacks to more than any data set does."""


class DownloadError(FeddfError):
    """A file could not be fetched or unpacked; one line says why, and what to do."""


def partial_file(target: Path) -> Path:
    """Return where a download stays until it is whole."""
    return target.with_name(f".{target.name}.part")


def fetch(url: str, target: Path, checksum: str | None, progress: Progress = lambda done, total: None) -> None:
    """Download ``url`` to ``target``, which appears only when it is whole and its checksum (if any) is right.

    What arrives is kept in a partial file; the next try asks for the rest only. A file that changed on the
    server in between is found by its checksum, and then nothing of it is kept.
    """
    if not url.startswith(("http://", "https://")):
        raise DownloadError(f"cannot fetch {url}: an address must start with http:// or https://")
    partial = partial_file(target)
    partial.parent.mkdir(parents=True, exist_ok=True)
    _receive(url, partial, progress)
    if wrong := mismatch(partial, checksum):
        partial.unlink()
        raise DownloadError(f"{url} is not what was expected and was removed: {wrong}")
    partial.replace(target)


def mismatch(path: Path, checksum: str | None) -> str | None:
    """Return how a file differs from its checksum (``sha256:`` or ``md5:`` and digits), or ``None`` if it does not."""
    if checksum is None:
        return None
    kind, _, expected = checksum.lower().partition(":")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, functools.partial(hashlib.new, kind, usedforsecurity=False))
    return None if digest.hexdigest() == expected else f"{kind} must be {expected} and is {digest.hexdigest()}"


def _receive(url: str, partial: Path, progress: Progress) -> None:
    """Bring the partial file to its full length."""
    have = partial.stat().st_size if partial.exists() else 0
    reply = _ask_for_rest(url, have) if have else None
    if reply is None:
        have, reply = 0, _ask(url, {})
    if isinstance(reply, int):  # nothing is left to send
        progress(have, have)
        return
    with reply:
        start = have if reply.status == 206 else 0
        length = reply.headers.get("Content-Length", "")
        rest = int(length) if length.isdecimal() else None
        _write(url, partial, reply, start, _range(reply)[1] or (None if rest is None else start + rest), progress)


def _write(url: str, partial: Path, reply: HTTPResponse, start: int, total: int | None, progress: Progress) -> None:
    done = start
    progress(done, total)
    with partial.open("ab" if start else "wb") as file:
        for block in _blocks(url, reply):
            file.write(block)
            done += len(block)
            progress(done, total)
        file.flush()
        os.fsync(file.fileno())  # the rename that follows must not reach the disk before the bytes
    if total is not None and done < total:
        raise DownloadError(f"{url} broke off after {done} of {total} bytes; trying again resumes")
    if total is not None and done > total:
        partial.unlink()
        raise DownloadError(f"{url} sent {done} bytes where {total} were announced; they were removed, try again")


def _blocks(url: str, reply: HTTPResponse) -> Iterator[bytes]:
    """Yield what the server sends; its errors become ours here, where no error of the disk can be meant."""
    while True:
        try:
            block = reply.read(BLOCK)
        except (OSError, HTTPException) as error:
            raise DownloadError(f"{url} broke off ({_reason(error)}); trying again resumes") from error
        if not block:
            return
        yield block


def _ask_for_rest(url: str, have: int) -> HTTPResponse | int | None:
    """Ask for what follows the first ``have`` bytes.

    Returns the reply with the rest (206) or with everything (200), ``have`` itself if that is all there is, and
    ``None`` if the server has another idea of the rest: then only a fresh start helps.
    """
    try:
        reply = _ask(url, {"Range": f"bytes={have}-"})
    except _RangeRefused as refused:
        return have if refused.total == have else None
    if reply.status == 206 and _range(reply)[0] != have:
        reply.close()
        return None
    return reply


class _RangeRefused(DownloadError):
    """The server has nothing behind the bytes that are here; ``total`` is its file's length, if it says so."""

    def __init__(self, url: str, total: int | None) -> None:
        super().__init__(f"cannot fetch {url}: the server answered 416 to a request for the whole file")
        self.total = total


def _ask(url: str, headers: dict[str, str]) -> HTTPResponse:
    try:
        reply: HTTPResponse = urlopen(Request(url, headers={"User-Agent": "feddf", **headers}), timeout=SILENCE)
    except HTTPError as error:
        with error:
            if error.code == 416:
                found = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
                raise _RangeRefused(url, int(found[1]) if found else None) from error
            raise DownloadError(f"cannot fetch {url}: the server answered {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise DownloadError(f"cannot fetch {url}: {_reason(error)}") from error
    if reply.status not in (200, 206) or (reply.status == 206 and "Range" not in headers):
        reply.close()
        raise DownloadError(f"cannot fetch {url}: the server answered {reply.status}, expected was 200")
    return reply


def _range(reply: HTTPResponse) -> tuple[int | None, int | None]:
    """Return which byte comes first in a part of a file, and how many the whole has."""
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", reply.headers.get("Content-Range", ""))
    return (int(found[1]), int(found[2])) if found and reply.status == 206 else (None, None)


def _reason(error: BaseException) -> str:
    said = str(error.reason if isinstance(error, URLError) else error).splitlines()
    return said[0] if said else type(error).__name__


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.gz, .tgz or .zip, or the one file of a .gz, into ``folder``.

    A tar with a link, a device or a path that leads out of the folder is refused; paths in a zip are made harmless.
    Everything is unpacked into a temporary folder first and then renamed, so that no file is ever seen
    half-written. Other files that are in ``folder`` stay.
    """
    extract = next((function for ending, function in _EXTRACT.items() if archive.name.endswith(ending)), None)
    if extract is None:
        raise DownloadError(f"cannot unpack {archive}: its name must end in .tar.gz, .tgz, .zip or .gz")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as temporary:
        try:
            extract(archive, Path(temporary))
        except _TooLarge:
            raise DownloadError(f"{archive} is refused: it unpacks to over {most_unpacked(archive)} bytes") from None
        except tarfile.FilterError as error:
            raise DownloadError(f"{archive} is refused: {_reason(error)}") from error
        except _BAD_ARCHIVE as error:
            raise DownloadError(f"{archive} is damaged or cut short: {_reason(error)}; fetch it again") from error
        for child in sorted(Path(temporary).iterdir()):
            _move(child, folder / child.name)


def most_unpacked(archive: Path) -> int:
    """Return how many bytes an archive may unpack to."""
    least, factor = MOST_UNPACKED
    return max(least, factor * archive.stat().st_size)


class _Bounded:
    """A stream that ends in an error once more has been read than an archive may unpack to."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, most: int) -> None:
        self._stream, self._left = stream, most

    def read(self, size: int = BLOCK) -> bytes:
        """Read on."""
        content = self._stream.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(content)
        if self._left < 0:
            raise _TooLarge
        return content


def _extract_tar(archive: Path, folder: Path) -> None:
    with gzip.open(archive) as packed:
        stream = _Bounded(packed, most_unpacked(archive))
        with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r|") as tar:
            tar.extractall(folder, filter=_without_links)
            while stream.read(BLOCK):  # a tar ends before its stream does, and the checksum is at the stream's end
                pass


def _without_links(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Apply the filter "data", and refuse links: through these it can be evaded before 3.11.13 (CVE-2025-4517)."""
    if member.issym() or member.islnk():
        raise tarfile.FilterError(f"{member.name!r} is a link")
    return tarfile.data_filter(member, folder)


def _extract_zip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as pack:
        if sum(entry.file_size for entry in pack.infolist()) > most_unpacked(archive):  # more is never written
            raise _TooLarge
        pack.extractall(folder)


def _extract_gzip(archive: Path, folder: Path) -> None:
    with gzip.open(archive) as content, (folder / archive.stem).open("wb") as file:
        shutil.copyfileobj(_Bounded(content, most_unpacked(archive)), file, BLOCK)


_EXTRACT = {".tar.gz": _extract_tar, ".tgz": _extract_tar, ".zip": _extract_zip, ".gz": _extract_gzip}


def _move(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``; into a folder that is there already, file by file."""
    if source.is_dir() and target.is_dir():
        for child in sorted(source.iterdir()):
            _move(child, target / child.name)
    else:
        source.replace(target)
