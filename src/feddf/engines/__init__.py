"""Where work runs. An engine is a parallel map that turns every job into a result or a :class:`feddf.types.Failure`.

One rule makes all engines agree to the last bit: every job runs on one torch thread, because a sum that is
split over two threads rounds differently.
"""

from __future__ import annotations

from feddf.engines.jobs import in_process
from feddf.engines.processes import Processes
from feddf.engines.ray import RayError, RayWorkers

__all__ = ["Processes", "RayError", "RayWorkers", "in_process"]
