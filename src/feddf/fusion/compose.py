"""From settings to a method: the named one, with the wrappers that the section ``[fusion]`` asks for."""

from __future__ import annotations

from dataclasses import replace

from feddf.config.experiment import Settings, with_values
from feddf.config.names import DROP_RULES, METHODS, TRUSTS
from feddf.fusion.batchnorm import local_statistics
from feddf.fusion.defence import robust_settings
from feddf.fusion.guard import guarded, tried
from feddf.fusion.momentum import momentum
from feddf.fusion.select import drop_worst
from feddf.fusion.trust import trusted
from feddf.runtime.execution import of_answers
from feddf.types import Engine, Fusion, Method, Resources


def method_of(resources: Resources, settings: Settings, engine: Engine) -> Method:
    """Return the method that the settings name, inside the wrappers that they ask for.

    From the inside: local statistics, momentum, drop-worst, trust, a trial of all models, the guard.
    """
    if settings.fusion.defence == "robust":
        labelled = resources.validation is not None and len(resources.validation) > 0
        settings = robust_settings(settings, labelled=labelled, pooled=resources.pool is not None)
    fusion, execution = settings.fusion, of_answers(settings.run)
    made = METHODS[fusion.method](resources, settings, engine)
    method = made if isinstance(made, Method) else Method(made)
    fuse = method.fuse
    if fusion.batchnorm == "local":
        fuse = local_statistics(fuse)
    if fusion.momentum:
        fuse = momentum(fusion.momentum, fuse, resources.prototypes)
    if fusion.drop_worst != "none":
        fuse = drop_worst(DROP_RULES[fusion.drop_worst], fuse, resources, engine, execution)
    if fusion.trust != "none":
        fuse = trusted(TRUSTS[fusion.trust](resources, engine, execution), fuse)
    fuse = tried(fuse, resources, engine, execution, updates_too=not settings.distils)
    if fusion.guard is not None:

        def again() -> Fusion:
            robust = with_values(settings, {"fusion.defence": "robust", "fusion.guard": 1.0})
            return method_of(resources, robust, engine).fuse

        other = again if fusion.defence == "none" else None
        fuse = guarded(fusion.guard, fuse, resources, engine, other, execution)
    return replace(method, fuse=fuse)
