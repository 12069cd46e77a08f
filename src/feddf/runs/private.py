"""The way from ``[privacy]`` to a method, clients and a run that keep its promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from feddf.config import ConfigError, Experiment, Record, with_values
from feddf.fusion import feddf as algorithm
from feddf.privacy.clients import keep_previous, noisy_answers, noisy_groups, noisy_votes
from feddf.privacy.dpsgd import dp_sgd, refuse_batchnorm
from feddf.privacy.heads import head_update
from feddf.privacy.noise import Source
from feddf.privacy.plan import Plan, make_plan, refuse_absurd
from feddf.privacy.releases import LedgerSpool, Releases, planned_noise
from feddf.rounds import Spool
from feddf.runs import methods
from feddf.types import Engine, Examples, Fusion, Job, LocalTrain, Method, Part, Prototype, Reply, Resources, State


@dataclass(frozen=True)
class Private:
    """The privacy of a run: its plan, the ledger of its releases, and where secret bytes are from."""

    plan: Plan
    releases: Releases
    source: Source

    def protect(self, method: Method, experiment: Experiment, resources: Resources, engine: Engine) -> Method:
        """Return the method with noise in its place. n_k is withheld: all clients count alike."""
        privacy, on, noise = experiment.privacy, self.plan.on, self.plan.noise
        withheld = Part(tells_count=False)
        if on == "dp-sgd":
            batch, rate = experiment.local.batch_size, privacy.sampling
            half = dp_sgd(noise=noise, clip=privacy.clip, sampling=rate, batch_size=batch, source=self.source)
            withheld = replace(withheld, half=half)
        fuse = method.fuse
        if on == "weights":
            adapt = {"clip": privacy.clip, "groups": privacy.groups, "quantile": privacy.quantile}
            fuse = noisy_groups(fuse, self.releases.once, noise=noise, source=self.source, **adapt)  # type: ignore[arg-type]
        elif on in ("answers", "votes"):
            fuse = self._from_answers(experiment, resources, engine)
        return replace(method, fuse=fuse, parts=(*method.parts, withheld))

    def _from_answers(self, experiment: Experiment, resources: Resources, engine: Engine) -> Fusion:
        """Return FedDF whose students know the noisy answers alone."""
        privacy, release, given = (
            experiment.privacy,
            self.releases.once,
            {"noise": self.plan.noise, "source": self.source},
        )
        if self.plan.on == "answers":
            targets = noisy_answers(methods.ensemble(resources, experiment, engine), release, **given)  # type: ignore[arg-type]
        else:
            counted = {
                "ensemble.combine": "feddf.privacy.clients:votes",
                "privacy.level": "none",
            }  # which asks for a sum
            experiment = with_values(experiment, counted)
            few = {"threshold": privacy.threshold, "answered": privacy.answered, **given}
            targets = noisy_votes(methods.ensemble(resources, experiment, engine), release, **few)  # type: ignore[arg-type]
        students = methods.students(resources, experiment, engine)
        return algorithm.feddf(keep_previous, targets, students, algorithm.from_previous)

    def local(
        self, train: LocalTrain, experiment: Experiment, prototypes: Mapping[str, Prototype], examples: Examples
    ) -> LocalTrain:
        """Return what a client does: with private heads it solves for one; in any case it tells nothing but weights."""
        if self.plan.on == "heads":
            solve = {"privacy": experiment.privacy, "noise": self.plan.noise, "source": self.source}
            train = partial(head_update, prototypes=prototypes, train=examples, **solve)  # type: ignore[arg-type]
        return partial(withhold, train=train)

    def open(self, folder: Path, records: list[Record], engine: Engine, spool: Spool) -> tuple[Engine, Spool]:
        """Go on with a run's ledger; return the clients' engine and the spool of a run whose updates are releases."""
        told = max((int(one.get("privacy", {}).get("releases", 0)) for one in records), default=0)
        self.releases.open(folder, told)
        if self.plan.level == "client":
            return engine, spool
        return self.releases.engine(engine), LedgerSpool(spool, self.releases)

    def noted(self, record: Record) -> Record:
        """Return a round's record with the ε that is spent."""
        spent = self.plan.described(self.releases.rounds_spent())
        return {**record, "privacy": {**spent, "releases": len(self.releases)}}


def make_private(
    experiment: Experiment, resources: Resources, models: Mapping[str, State], source: Source
) -> Private | None:
    """Return the privacy that an experiment asks for, or raise :class:`ConfigError` where it cannot be had."""
    privacy = experiment.privacy
    if privacy.level == "none":
        return None
    kind, on = resources.outputs, privacy.chosen
    if not kind.counts_classes and on != "weights":
        raise ConfigError.at(
            "privacy.mechanism", on, f"it is for one class an example, and the outputs are {kind.title}"
        )
    for name, prototype in resources.prototypes.items():
        try:
            if on in ("dp-sgd", "weights"):
                refuse_batchnorm(prototype.load(models[name]))
        except ValueError as error:
            raise ConfigError.at("prototypes", name, str(error)) from None
    plan = make_plan(privacy, experiment.rounds, experiment.local.epochs)
    weights = max(sum(tensor.numel() for tensor in state.values()) for state in models.values())
    refuse_absurd(plan, privacy, experiment.clients, weights, len(resources.pool or ()))
    return Private(plan, Releases(plan), source)


def withhold(job: Job, *, train: LocalTrain) -> Reply:
    """Train, and tell neither the number of examples nor the losses."""
    return replace(train(job), n_examples=1, metrics={})


def as_begun(folder: Path, experiment: Experiment) -> Experiment:
    """Return an experiment with the noise that its run was begun with: noise that was used cannot be planned again."""
    noise = planned_noise(folder) if experiment.privacy.level != "none" else None
    return experiment if noise is None else with_values(experiment, {"privacy.noise": noise})
