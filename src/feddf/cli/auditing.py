"""``feddf audit``: what an attacker can find out in spite of a plan's noise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddf.cli.arguments import NameOrFile, Overrides, give, say


def audit(
    name_or_file: NameOrFile,
    overrides: Overrides = None,
    canaries: Annotated[int, typer.Option(help="Coin flips; 1,000 at least.", min=1000)] = 20_000,
    scale: Annotated[float, typer.Option(help="Use so much of the planned noise, to see it fail.", min=1e-9)] = 1.0,
    clients: Annotated[int | None, typer.Option(help="Attack answers of so many clients too (64, say).", min=8)] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw ROC curves: FILE.png, FILE.svg or FILE.pdf.")] = None,
) -> None:
    """Attack the privacy that a configuration claims: a lower bound on ε above the claim is an error."""
    import torch

    from feddf.config import ConfigError, load
    from feddf.privacy.accountant import PrivacyError, make_plan
    from feddf.privacy.audit import canary_scores, least_epsilon, lower_bounds, membership, roc
    from feddf.privacy.noise import Noise
    from feddf.report.plots import roc_curves
    from feddf.runs.build import build

    experiment = load(name_or_file, overrides or [])
    privacy = experiment.privacy
    if privacy.level == "none":
        raise ConfigError.at("privacy.level", "none", "there is nothing to audit; set it to 'record' or 'client'")
    if clients and privacy.level == "client":
        raise ConfigError.at("privacy.level", "client", "there the server sees single answers; it must be 'record'")
    plan = make_plan(privacy, experiment.rounds, experiment.local.epochs)
    attacks = {"canaries": canary_scores(plan, canaries, scale)}
    found = lower_bounds(plan, *attacks["canaries"])
    if clients:
        parts = build(experiment, noise=lambda z: Noise(z * scale))
        task, (name, prototype) = parts.task, next(iter(parts.prototypes.items()))
        if task.pool is None:
            raise ConfigError.at("pool.sources", [], "clients answer a pool; set it, for instance to ['train']")
        given = parts.train, prototype, parts.server.models[name], task.train, task.pool
        attacks["membership from answers"] = membership(*given, clients, len(task.train) // len(task.shards))
        found["lower bound by answers"] = least_epsilon(*attacks["membership from answers"], privacy.delta)
    curves = {name: roc(*one) for name, one in attacks.items()}
    found |= {f"AUC of {name}": float(torch.trapezoid(true, false)) for name, (false, true) in curves.items()}
    if picture:
        roc_curves(curves, found["claimed"], picture)
    give(found)
    say(", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    if max(value for name, value in found.items() if "bound" in name) > found["claimed"]:
        raise PrivacyError("the audit refutes the claimed ε: less is private than the plan says")
