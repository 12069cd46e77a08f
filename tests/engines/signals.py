"""What becomes of the handler of a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def handler_must_stay() -> Iterator[None]:
    """Ray puts its own handler of SIGTERM in place, under which a run would not end in a safe state."""

    def own(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, own)
    try:
        yield
        assert signal.getsignal(signal.SIGTERM) is own, "the handler of SIGTERM was replaced"
    finally:
        signal.signal(signal.SIGTERM, before)
