"""One good model out of many: fusion of neural networks that were trained apart, by ensemble distillation (FedDF).

The pieces compose by plain calls; ``examples/`` shows whole programs. Names are loaded when they are first
used, so that reading configurations and reports does not wait for torch.
"""

from __future__ import annotations

import re
from importlib import import_module
from pkgutil import get_data
from typing import Any

_STUB = (get_data(__name__, "__init__.pyi") or b"").decode()
_HOME = {name: module for module, name in re.findall(r"(?m)^from (\S+) import (\w+) as", _STUB)}
"""The module of each public name, in the order of the stub, which is the only list of them."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # it takes longer to load than all the rest here

        return version("feddf")
    if name not in _HOME:
        raise AttributeError(f"module 'feddf' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__", *(name for name in globals() if name.startswith("__"))])
