"""What data sets are made of: the files that must be in the data folder, and the archives on the web that bring them.

A download is there whole and checked, or not at all. Only archives whose checksums stand here are unpacked: what is in
them is known, so they need no bounds.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from feddf.config.errors import FeddfError, one_line
from feddf.runtime.atomic import LEFTOVER, new_file


@dataclass(frozen=True)
class Download:
    """An archive on the web, the folder that it is unpacked into and the files that it brings.

    Both paths are relative to the data folder. ``checksum`` is ``sha256:`` or ``md5:`` and digits: SHA-256 as Keras,
    TensorFlow Datasets and others have it that checked the authors' MD5, else (STL-10, SST-2) the authors' MD5 itself.
    """

    url: str
    into: str
    files: tuple[str, ...]
    checksum: str

    @property
    def name(self) -> str:
        """The archive's file name."""
        return PurePosixPath(urlsplit(self.url).path).name


@dataclass(frozen=True)
class Entry:
    """A data set: the files that make it complete (a name that ends in ``/`` is a folder with something in it).

    ``how`` says how to get it: for one without downloads, where it must be fetched by hand.
    """

    name: str
    files: tuple[str, ...]
    how: str
    downloads: tuple[Download, ...] = ()


def _one(name: str, size: str, url: str, checksum: str, *files: str) -> Entry:
    """Return a data set that is one archive with its own folder inside."""
    return Entry(name, files, f"feddf data fetch {name} ({size})", (Download(url, ".", files, checksum),))


def _digits(name: str, size: str, host: str, *sha256s: str) -> Entry:
    """Return a data set in the four files of MNIST, each compressed on its own."""
    parts = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    files = tuple(f"{name}/{part}" for part in parts)
    every = zip(parts, files, sha256s, strict=True)
    downloads = tuple(Download(f"{host}/{part}.gz", name, (file,), f"sha256:{sha256}") for part, file, sha256 in every)
    return Entry(name, files, f"feddf data fetch {name} ({size})", downloads)


_ENTRIES = (
    _one("cifar10", "170 MB", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
         "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
         *(f"cifar-10-batches-py/{part}" for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"))),
    _one("cifar100", "169 MB", "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
         "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
         "cifar-100-python/train", "cifar-100-python/test"),
    _one("stl10", "2.6 GB", "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
         "md5:91f7769df0f17e558f3565bffb0c7dfb",
         *(f"stl10_binary/{part}.bin" for part in ("unlabeled_X", "train_X", "train_y", "test_X", "test_y"))),
    _digits("mnist", "12 MB", "https://ossci-datasets.s3.amazonaws.com/mnist",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    _digits("fashion-mnist", "31 MB", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    _one("sst2", "7 MB", "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip",
         "md5:9f81648d4199384278b86e315dac217c", "SST-2/train.tsv", "SST-2/dev.tsv"),
    Entry("imagenet32",
          (*(f"Imagenet32_train_npz/train_data_batch_{i}.npz" for i in range(1, 11)),
           "Imagenet32_val_npz/val_data.npz"),
          "needs an account at image-net.org: there, the downsampled images of 32x32 as npz; unpack them as "
          "Imagenet32_train_npz/train_data_batch_1.npz to _10.npz and Imagenet32_val_npz/val_data.npz"),
    Entry("ag_news", ("ag_news_csv/train.csv", "ag_news_csv/test.csv"),
          "ag_news_csv.tar.gz of Zhang, Zhao and LeCun (Character-level Convolutional Networks for Text "
          "Classification), from the folder that they share; unpack it as ag_news_csv/train.csv and test.csv"),
    Entry("tiny-imagenet", ("tiny-imagenet-32/",),
          "any folder of images will do; put it at tiny-imagenet-32/ (Tiny ImageNet itself: cs231n.stanford.edu)"),
)  # fmt: skip

CATALOG: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}

BLOCK = 1 << 18
SILENCE = 60.0  # seconds without a byte after which a connection counts as broken

Progress = Callable[[Download, int, int | None], None]
"""Told which download has how many bytes of how many (``None``: the server did not say)."""


class DownloadError(FeddfError):
    """A file could not be fetched; one line says why, and what to do."""


def root_of(folder: str | Path | None) -> Path:
    """Return the folder that holds all data sets: the one given, or ``FEDDF_DATA``, or ``data``."""
    return Path(folder or os.environ.get("FEDDF_DATA", "data")).expanduser()


def missing(entry: Entry | Download, folder: Path) -> list[str]:
    """Return the files of a data set, or of one of its archives, that are not there."""
    return [file for file in entry.files if not (folder / file).is_file() and not any((folder / file).glob("*"))]


def state(entry: Entry, folder: Path) -> str:
    """Return ``here``, ``incomplete`` (some of its files) or ``missing``."""
    absent = len(missing(entry, folder))
    if absent == len(entry.files):
        return "missing"
    return "incomplete" if absent else "here"


def size(entry: Entry, folder: Path) -> int:
    """Return how many bytes of a data set are on disk."""
    paths = [folder / file for file in entry.files]
    found = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in found if file.is_file())


def get(entry: Entry, folder: Path, progress: Progress = lambda download, done, total: None) -> None:
    """Fetch and unpack what a data set lacks; what is complete stays as it is, and archives do not stay.

    An archive that was put into the data folder by hand is used, if its checksum is right.
    """
    if not entry.downloads and missing(entry, folder):
        raise DownloadError(f"data '{entry.name}' cannot be fetched automatically: {entry.how}")
    for download in entry.downloads:
        if missing(download, folder):
            _bring(download, folder, progress)
    if absent := missing(entry, folder):
        raise DownloadError(f"data '{entry.name}' was fetched, and has no file {absent[0]}: its archive has changed")


def _bring(download: Download, folder: Path, progress: Progress) -> None:
    archive = folder / download.into / download.name
    new = [one for one in (archive.parent, *archive.parent.parents) if not one.exists()]
    try:
        if not archive.is_file() or mismatch(archive, download.checksum):
            fetch(download.url, archive, download.checksum, partial(progress, download))
        unpack(archive)
    finally:
        for one in new:  # a download that fails leaves no folder behind
            with suppress(OSError):  # it has something in it
                one.rmdir()
    for path in (archive, *archive.parent.glob(f".{archive.name}.*{LEFTOVER}")):  # what killed downloads left
        path.unlink()


def fetch(
    url: str, target: Path, checksum: str, progress: Callable[[int, int | None], None] = lambda done, total: None
) -> None:
    """Download ``url`` to ``target``, which appears only when it is whole and its checksum is right."""
    from http.client import HTTPException  # takes 50 ms with what it loads, and most commands fetch nothing
    from urllib.request import Request, urlopen

    target.parent.mkdir(parents=True, exist_ok=True)
    request, failed = Request(url, headers={"User-Agent": "feddf"}), f"cannot fetch {url}"
    with new_file(target) as temporary:
        broken = one_line(DownloadError, failed, (OSError, HTTPException))
        with broken, urlopen(request, timeout=SILENCE) as reply, temporary.open("wb") as file:
            done, total = 0, reply.length
            progress(done, total)
            while block := reply.read(BLOCK):
                done += file.write(block)
                progress(done, total)
        if total is not None and done < total:
            raise DownloadError(f"{url} broke off after {done} of {total} bytes; try again")
        if wrong := mismatch(temporary, checksum):
            raise DownloadError(f"{url} is not what was expected and was removed: {wrong}")


def mismatch(path: Path, checksum: str) -> str | None:
    """Return how a file differs from its checksum (``sha256:`` or ``md5:`` and digits), or ``None`` if it does not."""
    kind, _, expected = checksum.partition(":")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()
    return None if digest == expected else f"{kind} must be {expected} and is {digest}"


def unpack(archive: Path) -> None:
    """Unpack a .tar.gz or .zip, or the one file of a .gz, where it is; other files that are there stay.

    Everything is unpacked into a temporary folder first and then renamed, so that no file is ever seen half-written.
    """
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=archive.parent) as temporary:
        if archive.suffix == ".zip":
            shutil.unpack_archive(archive, temporary)
        elif archive.name.endswith(".tar.gz"):
            shutil.unpack_archive(archive, temporary, filter="data")
        else:
            with gzip.open(archive) as content, Path(temporary, archive.stem).open("wb") as file:
                shutil.copyfileobj(content, file)
        _move(Path(temporary), archive.parent)


def _move(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``; into a folder that is there already, file by file."""
    if source.is_dir() and target.is_dir():
        for child in sorted(source.iterdir()):
            _move(child, target / child.name)
    else:
        source.replace(target)
