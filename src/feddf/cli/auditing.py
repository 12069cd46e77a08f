"""``feddf audit``: what an attacker can find out in spite of a plan's noise."""

from __future__ import annotations

from typing import Annotated

import typer

from feddf.cli.arguments import AsJson, NameOrFile, Overrides, print_json, say


def audit(
    name_or_file: NameOrFile,
    overrides: Overrides = None,
    canaries: Annotated[int, typer.Option(help="Coin flips; 1,000 at least.", min=1000)] = 4000,
    scale: Annotated[float, typer.Option(help="Use so much of the planned noise, to see the audit fail.", min=0)] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Attack the privacy that a configuration claims: a lower bound on ε above the claim is an error."""
    from feddf.config import ConfigError, load
    from feddf.privacy.accountant import PrivacyError
    from feddf.privacy.audit import audit as attacked
    from feddf.privacy.plan import make_plan

    experiment = load(name_or_file, overrides or [])
    if experiment.privacy.level == "none":
        raise ConfigError.at("privacy.level", "none", "there is nothing to audit; set it to 'record' or 'client'")
    plan = make_plan(experiment.privacy, experiment.rounds, experiment.local.epochs)
    found = attacked(plan, experiment.privacy, experiment.local.epochs, canaries, scale)
    print_json(found) if as_json else say(", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    if max(found["lower bound"], found["of this mechanism"]) > found["claimed"]:
        raise PrivacyError("the audit refutes the claimed ε: less is private than the plan says")
