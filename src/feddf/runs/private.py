"""The way from ``[privacy]`` to a method, clients and a run that keep its promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from feddf.config import ConfigError, Experiment, Record, with_values
from feddf.fusion import feddf as algorithm
from feddf.privacy.clients import noisy_answers, noisy_groups, noisy_targets, noisy_votes
from feddf.privacy.dpsgd import dp_sgd, refuse_batchnorm
from feddf.privacy.heads import head_update
from feddf.privacy.noise import Noise, Source
from feddf.privacy.plan import RELATION, Plan, make_plan, refuse_absurd
from feddf.privacy.releases import LedgerSpool, Releases, planned_noise
from feddf.rounds import Spool
from feddf.runs import methods
from feddf.types import Engine, Examples, Job, LocalTrain, Method, Part, Reply, Resources, State


@dataclass(frozen=True)
class Private:
    """The privacy of a run: its plan, the ledger of its releases, and where secret bytes are from."""

    plan: Plan
    releases: Releases
    noise: Noise

    def protect(self, method: Method, experiment: Experiment, resources: Resources, engine: Engine) -> Method:
        """Return the method with noise in its place. n_k is withheld: all clients count alike."""
        on, once, half, fuse = self.plan.on, self.releases.once, None, method.fuse
        given: dict[str, Any] = {"noise": self.noise, **self.plan.privacy.given}
        if on == "dp-sgd":
            half = partial(dp_sgd, batch_size=experiment.local.batch_size, **given)
        elif on == "weights":
            fuse = noisy_groups(fuse, once, **given)
        elif self.plan.privacy.level == "client":  # students know the noisy answers alone
            counted = {"ensemble.combine": "feddf.privacy.clients:votes", "privacy.level": "none"}  # it asks for sums
            asked = methods.ensemble(resources, with_values(experiment, counted if on == "votes" else {}), engine)
            targets = noisy_targets(asked, once, partial(noisy_votes if on == "votes" else noisy_answers, **given))
            students = methods.students(resources, experiment, engine)
            fuse = algorithm.feddf(lambda previous, updates: previous, targets, students, algorithm.from_previous)
        return replace(method, fuse=fuse, parts=(*method.parts, Part(half=half, tells_count=False)))

    def local(self, train: LocalTrain, examples: Examples) -> LocalTrain:
        """Return what a client does: with private heads it solves for one; in any case it tells nothing but weights."""
        if self.plan.on == "heads":
            train = partial(head_update, train=examples, noise=self.noise, **self.plan.privacy.given)
        return partial(withhold, train=train, source=self.noise.source if self.plan.on == "dp-sgd" else None)

    def open(self, folder: Path, records: list[Record], engine: Engine, spool: Spool) -> tuple[Engine, Spool]:
        """Go on with a run's ledger; return the clients' engine and the spool of a run whose updates are releases."""
        told = max((int(one.get("privacy", {}).get("releases", 0)) for one in records), default=0)
        self.releases.open(folder, told)
        if self.plan.privacy.level == "client":
            return engine, spool
        return self.releases.engine(engine), LedgerSpool(spool, self.releases)

    def noted(self, record: Record) -> Record:
        """Return a round's record with the ε that is spent."""
        plan, releases, privacy = self.plan, self.releases, self.plan.privacy
        spent, planned = (round(plan.spent(rounds), 4) for rounds in (releases.rounds_spent(), plan.rounds))
        about = {"level": privacy.level, "relation": RELATION, "noise": plan.a_round.noise, "delta": privacy.delta}
        return {**record, "privacy": {**about, "epsilon": spent, "planned": planned, "releases": len(releases)}}

    def said(self) -> str:
        """Return what the card says."""
        spent = round(self.plan.spent(self.releases.rounds_spent()), 4)
        open_ = "Not protected: which clients took part, when, and the sizes of messages. Withheld: how many examples"
        held = "of which class clients hold, and their losses."
        return f"{self.plan}. Spent: ε = {spent} (`releases.jsonl` has every release). {open_} {held}"


def make_private(
    experiment: Experiment, resources: Resources, models: Mapping[str, State], source: Source
) -> Private | None:
    """Return the privacy that an experiment asks for, or raise :class:`ConfigError` where it cannot be had."""
    privacy = experiment.privacy
    if privacy.level == "none":
        return None
    kind, on = resources.outputs, privacy.chosen
    if not kind.counts_classes and on != "weights":
        raise ConfigError.at("privacy.mechanism", on, f"it is for one class each, and the outputs are {kind.title}")
    for name, prototype in resources.prototypes.items():
        try:
            if on in ("dp-sgd", "weights"):
                refuse_batchnorm(prototype.load(models[name]))
        except ValueError as error:
            raise ConfigError.at("prototypes", name, str(error)) from None
    plan = make_plan(privacy, experiment.rounds, experiment.local.epochs)
    weights = max(sum(tensor.numel() for tensor in state.values()) for state in models.values())
    refuse_absurd(plan, experiment.clients, weights, len(resources.pool or ()))
    return Private(plan, Releases(plan), Noise(plan.a_round.noise, source))


def withhold(job: Job, *, train: LocalTrain, source: Source | None) -> Reply:
    """Train, and tell neither the number of examples nor the losses.

    A ``source`` is for mechanisms in which each record must be augmented, and dropped out, by chance of its own: with a
    seed that is known, one record more changes what happens to those after it in a batch, by more than any clip.
    """
    job = job if source is None else replace(job, seed=int.from_bytes(source(8), "little") >> 1)
    return replace(train(job), n_examples=1, metrics={})


def as_begun(folder: Path, experiment: Experiment) -> Experiment:
    """Return an experiment with the noise that its run was begun with: noise that was used cannot be planned again."""
    noise = planned_noise(folder) if experiment.privacy.level != "none" else None
    return experiment if noise is None else with_values(experiment, {"privacy.noise": noise})
