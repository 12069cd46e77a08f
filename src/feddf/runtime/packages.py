"""Libraries of others: loaded when they are first needed, kept quiet, and told to keep memory."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any


class MissingPackageError(ValueError):
    """A package of an extra is not installed; the message says which, and how to get it."""


@cache
def onnxruntime() -> Any:
    """Return the library onnxruntime, which says nothing but errors, or say in one line how to get it."""
    library = _library("onnxruntime", "onnx")
    library.set_default_logger_severity(4)
    return library


def onnx() -> Any:
    """Return the library onnx, or say in one line how to get it."""
    return _library("onnx", "onnx")


def pyarrow() -> Any:
    """Return pyarrow's reader of Parquet files, or say in one line how to get it."""
    return _library("pyarrow.parquet", "tables")


@cache
def transformers() -> Any:
    """Return the library transformers, without its progress bars and reports, or say in one line how to get it."""
    library = _library("transformers", "text")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def scikit_learn() -> Any:
    """Return the metrics of scikit-learn, or say in one line how to get it."""
    return _library("sklearn.metrics", "metrics")


def _library(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"{name.partition('.')[0]} is not installed: pip install 'feddf[{extra}]'") from error


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Print, warn and log nothing inside the block but errors: what the user has to know is in our own line."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def no_output() -> Iterator[None]:
    """Let nothing reach standard output or error inside the block, also from code that is not Python."""
    sys.stdout.flush()
    saved, nowhere = {number: os.dup(number) for number in (1, 2)}, os.open(os.devnull, os.O_WRONLY)
    try:
        for number in saved:
            os.dup2(nowhere, number)
        yield
    finally:
        os.close(nowhere)
        for number, kept in saved.items():
            os.dup2(kept, number)
            os.close(kept)


def keep_freed_memory() -> bool:
    """Tell glibc's malloc, for the rest of this process, to reuse freed blocks; say whether it understood.

    By default every block of some MB is mapped afresh, and the kernel clears each of its pages again: a step of
    ResNet-8 on 64 images met 3,000 to 8,000 page faults, an eighth of its time (a quarter of a compiled one's). Now
    only blocks above 256 MB are (32 MB before glibc 2.35), and the heap shrinks only when 2 GB at its end are free.
    Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    mapped = mallopt(mmap, 256 * 2**20) or mallopt(mmap, 32 * 2**20)
    return bool(mallopt(trim, 2**31 - 1) and mapped)
