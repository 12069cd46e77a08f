"""Optional packages, loaded when they are first needed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


@cache
def onnxruntime() -> Any:
    """Return the library onnxruntime, which says nothing but errors, or say in one line how to get it."""
    try:
        library: Any = import_module("onnxruntime")
    except ImportError as error:
        raise ValueError("onnxruntime is not installed: pip install 'feddf[onnx]'") from error
    library.set_default_logger_severity(4)
    return library


@cache
def transformers() -> Any:
    """Return the library transformers, without its progress bars and reports, or say in one line how to get it."""
    try:
        library: Any = import_module("transformers")
    except ImportError as error:
        raise ValueError("transformers are not installed: pip install 'feddf[text]'") from error
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library
