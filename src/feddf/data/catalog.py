"""What data sets are made of: the files that must be in the data folder, and where they come from."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from feddf.data.download import DownloadError, fetch, mismatch, partial_file, unpack


@dataclass(frozen=True)
class Download:
    """An archive on the web, the folder that it is unpacked into and the files that it brings.

    Both paths are relative to the data folder. ``checksum`` is ``sha256:`` or ``md5:`` and digits: SHA-256 as Keras,
    TensorFlow Datasets and others have it that checked the authors' MD5, else (STL-10, SST-2) the authors' MD5 itself.
    Without one the content cannot be verified.
    """

    url: str
    into: str
    files: tuple[str, ...]
    checksum: str | None = None

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


Progress = Callable[[Download, int, int | None], None]
"""Told which download has how many bytes of how many (``None``: not known)."""


def _one(name: str, url: str, checksum: str, files: tuple[str, ...], size: str) -> Entry:
    """Return a data set that is one archive with its own folder inside."""
    download = Download(url, ".", files, checksum)
    return Entry(name, files, f"feddf data fetch {name} ({size})", (download,))


def _digits(name: str, host: str, sha256s: tuple[str, str, str, str], size: str) -> Entry:
    """Return a data set in the four files of MNIST, each compressed on its own."""
    parts = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    downloads = tuple(
        Download(f"{host}/{part}.gz", name, (f"{name}/{part}",), f"sha256:{sha256}")
        for part, sha256 in zip(parts, sha256s, strict=True)
    )
    files = tuple(f"{name}/{part}" for part in parts)
    return Entry(name, files, f"feddf data fetch {name} ({size})", downloads)


_ENTRIES = (
    _one(
        "cifar10",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        (*(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)), "cifar-10-batches-py/test_batch"),
        "170 MB",
    ),
    _one(
        "cifar100",
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ("cifar-100-python/train", "cifar-100-python/test"),
        "169 MB",
    ),
    _one(
        "stl10",
        "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
        "md5:91f7769df0f17e558f3565bffb0c7dfb",
        tuple(f"stl10_binary/{part}.bin" for part in ("unlabeled_X", "train_X", "train_y", "test_X", "test_y")),
        "2.6 GB",
    ),
    _digits(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        "12 MB",
    ),
    _digits(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
        "31 MB",
    ),
    _one(
        "sst2",
        "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip",
        "md5:9f81648d4199384278b86e315dac217c",
        ("SST-2/train.tsv", "SST-2/dev.tsv"),
        "7 MB",
    ),
    Entry(
        "imagenet32",
        (
            *(f"Imagenet32_train_npz/train_data_batch_{i}.npz" for i in range(1, 11)),
            "Imagenet32_val_npz/val_data.npz",
        ),
        "needs an account at image-net.org: there, the downsampled images of 32x32 as npz; unpack them as "
        "Imagenet32_train_npz/train_data_batch_1.npz to _10.npz and Imagenet32_val_npz/val_data.npz",
    ),
    Entry(
        "ag_news",
        ("ag_news_csv/train.csv", "ag_news_csv/test.csv"),
        "ag_news_csv.tar.gz of Zhang, Zhao and LeCun (Character-level Convolutional Networks for Text "
        "Classification), from the folder that they share; unpack it as ag_news_csv/train.csv and test.csv",
    ),
    Entry(
        "tiny-imagenet",
        ("tiny-imagenet-32/",),
        "any folder of images will do; put it at tiny-imagenet-32/ (Tiny ImageNet itself: cs231n.stanford.edu)",
    ),
)

CATALOG: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def root_of(folder: str | Path | None) -> Path:
    """Return the folder that holds all data sets: the one given, or ``FEDDF_DATA``, or ``data``."""
    return Path(folder or os.environ.get("FEDDF_DATA", "data")).expanduser()


def missing(entry: Entry, folder: Path) -> list[str]:
    """Return the files of a data set that are not there."""
    return [file for file in entry.files if not _is_there(folder, file)]


def state(entry: Entry, folder: Path) -> str:
    """Return ``here``, ``incomplete`` (some of its files, or a part of a download) or ``missing``."""
    absent = missing(entry, folder)
    if not absent:
        return "here"
    return "incomplete" if len(absent) < len(entry.files) or _begun(entry, folder) else "missing"


def size(entry: Entry, folder: Path) -> int:
    """Return how many bytes of a data set are on disk, unfinished downloads included."""
    there = [folder / file for file in entry.files if _is_there(folder, file)]
    return sum(_bytes_in(path) for path in [*there, *_begun(entry, folder)])


def get(entry: Entry, folder: Path, progress: Progress = lambda download, done, total: None) -> None:
    """Fetch and unpack what a data set lacks; what is complete stays as it is, and archives do not stay.

    An archive that was put into the data folder by hand is used, if its checksum is right.
    """
    if not entry.downloads and missing(entry, folder):
        raise DownloadError(f"data '{entry.name}' cannot be fetched automatically: {entry.how}")
    for download in entry.downloads:
        if not all(_is_there(folder, file) for file in download.files):
            _bring(download, folder, progress)
    if absent := missing(entry, folder):
        raise DownloadError(f"data '{entry.name}' was fetched, and has no file {absent[0]}: its archive has changed")


def _bring(download: Download, folder: Path, progress: Progress) -> None:
    archive = _archive(download, folder)
    if not archive.is_file() or mismatch(archive, download.checksum):
        fetch(download.url, archive, download.checksum, lambda done, total: progress(download, done, total))
    try:
        unpack(archive, archive.parent)
    except DownloadError:
        archive.unlink()  # or the next try would find it again
        raise
    archive.unlink()


def _archive(download: Download, folder: Path) -> Path:
    return folder / download.into / download.name


def _begun(entry: Entry, folder: Path) -> list[Path]:
    archives = [_archive(download, folder) for download in entry.downloads]
    return [path for archive in archives for path in (archive, partial_file(archive)) if path.is_file()]


def _is_there(folder: Path, file: str) -> bool:
    path = folder / file
    if file.endswith("/"):
        return path.is_dir() and any(path.iterdir())
    return path.is_file()


def _bytes_in(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
