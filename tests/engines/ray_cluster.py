"""One Ray cluster for all tests that need one, because starting it takes longer than most of them.

A pytest plugin: test modules that name it in ``pytest_plugins`` and are in the group ``engines`` share the cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from engines.ray_settings import CPUS, SETTINGS, handler_must_stay
from feddf.engines import RayWorkers


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayWorkers]:
    """A cluster on this machine, started as a run starts it."""
    os.environ.update(SETTINGS)
    cluster = RayWorkers(CPUS)
    with handler_must_stay():
        cluster.__enter__()
    try:
        yield cluster
    finally:
        with handler_must_stay():
            cluster.__exit__()


@pytest.fixture(scope="session")
def ray_engine(ray_cluster: RayWorkers) -> Iterator[RayWorkers]:
    """Two workers on the shared cluster."""
    with RayWorkers(2, tries=2) as opened:
        yield opened
