"""How tests use Ray, and what it must leave alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

CPUS = 4
"""Of the shared cluster: two for the shared engine, and two for engines that a test opens, whatever the machine has."""

SETTINGS = {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
"""By default Ray's workers give way to all other processes, and some are started that no test needs."""


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
