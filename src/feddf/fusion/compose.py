"""From settings to a method: the named one, with the wrappers that the section ``[fusion]`` asks for."""

from __future__ import annotations

from dataclasses import replace

from feddf.config.experiment import Settings
from feddf.config.names import DROP_RULES, METHODS
from feddf.fusion.batchnorm import local_statistics
from feddf.fusion.momentum import momentum
from feddf.fusion.select import drop_worst
from feddf.runtime.execution import of_answers
from feddf.types import Engine, Method, Resources


def method_of(resources: Resources, settings: Settings, engine: Engine) -> Method:
    """Return the method that the settings name: drop_worst(momentum(local_statistics(method)))."""
    fusion = settings.fusion
    made = METHODS[fusion.method](resources, settings, engine)
    method = made if isinstance(made, Method) else Method(made)
    fuse = method.fuse
    if fusion.batchnorm == "local":
        fuse = local_statistics(fuse)
    if fusion.momentum:
        fuse = momentum(fusion.momentum, fuse, resources.prototypes)
    if fusion.drop_worst != "none":
        fuse = drop_worst(DROP_RULES[fusion.drop_worst], fuse, resources, engine, of_answers(settings.run))
    return replace(method, fuse=fuse)
