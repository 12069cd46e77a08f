"""The way from ``[privacy]`` to a method, clients and a run that keep its promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from feddf.config import ConfigError, Experiment, Record, with_values
from feddf.config.errors import one_line
from feddf.fusion import feddf as algorithm
from feddf.privacy.accountant import Plan, make_plan, refuse_absurd
from feddf.privacy.clients import noisy_answers, noisy_groups, noisy_targets, noisy_votes
from feddf.privacy.noise import Noise, Source
from feddf.privacy.records import dp_sgd, head_update, refuse_batchnorm
from feddf.privacy.releases import LEDGER, Releases, read_ledger
from feddf.rounds import Spool
from feddf.runs import methods
from feddf.runs.spool import DiskSpool
from feddf.types import Engine, Examples, Job, LocalTrain, Method, Part, Reply, Resources, State


@dataclass(frozen=True)
class Private:
    """The privacy of a run: its plan, the ledger of its releases, and its noise."""

    plan: Plan
    releases: Releases
    noise: Noise

    def protect(self, method: Method, experiment: Experiment, resources: Resources, engine: Engine) -> Method:
        """Return the method with noise in its place. n_k is withheld: all clients count alike."""
        on, releases, half, fuse = self.plan.privacy.chosen, self.releases, None, method.fuse
        given: Any = {"noise": self.noise, "config": self.plan.privacy}
        if on == "dp-sgd":
            half = partial(dp_sgd, batch_size=experiment.local.batch_size, **given)
        elif on == "weights":
            fuse = noisy_groups(fuse, releases, **given)
        elif on != "heads":  # students know the noisy answers, or votes, alone
            combine = "feddf.privacy.clients:votes" if on == "votes" else experiment.ensemble.combine
            counted = experiment.ensemble.model_copy(update={"combine": combine})
            asked = methods.ensemble(resources, experiment.model_copy(update={"ensemble": counted}), engine)
            targets = noisy_targets(asked, releases, partial(noisy_votes if on == "votes" else noisy_answers, **given))
            students = methods.students(resources, experiment, engine)
            fuse = algorithm.feddf(lambda previous, updates: previous, targets, students, algorithm.from_previous)
        return replace(method, fuse=fuse, parts=(*method.parts, Part(half=half, tells_count=False)))

    def local(self, train: LocalTrain, examples: Examples) -> LocalTrain:
        """Return what a client does: with private heads it solves for one; in any case it tells nothing but weights."""
        privacy, noise = self.plan.privacy, self.noise
        if privacy.chosen == "heads":
            train = partial(head_update, train=examples, noise=noise, config=privacy)
        return partial(withhold, train=train, source=noise.source if privacy.chosen == "dp-sgd" else None)

    def open(self, folder: Path, records: list[Record], engine: Engine, spool: Spool) -> tuple[Engine, Spool]:
        """Go on with a run's ledger; return the clients' engine and the spool of a run whose updates are releases."""
        told = max((int(one.get("privacy", {}).get("releases", 0)) for one in records), default=0)
        server = self.plan.privacy.level == "client"  # makes the releases
        self.releases.open(folder, self.plan, DiskSpool(folder / "releases", durable=True) if server else spool, told)
        return (engine, spool) if server else (self.releases.engine(engine), self.releases)

    def noted(self, record: Record) -> Record:
        """Return a round's record with what is spent. Why a client was left out can tell values of its weights."""
        told = {} if self.plan.privacy.level == "record" else {"reason": "withheld"}
        return {**record, "dropped": [{**one, **told} for one in record["dropped"]], "privacy": self.about()}

    def about(self) -> dict[str, Any]:
        """Return the plan, and the ε that is spent so far."""
        counts = self.releases.counts()
        rounds = {"epsilon": max(counts.values(), default=0), "planned": self.plan.rounds}
        spent = {name: round(self.plan.spent(n), 4) for name, n in rounds.items()}
        return {**self.plan.about, **spent, "releases": counts.total()}

    def said(self) -> str:
        """Return what the card says."""
        spent = f"Spent: ε = {self.about()['epsilon']} (`{LEDGER}` has every release)."
        open_ = "Not protected: which clients took part, when, and the sizes of messages. Withheld: how many examples"
        return f"{self.plan}. {spent} {open_} of which class clients hold, and their losses."


def make_private(
    experiment: Experiment, resources: Resources, models: Mapping[str, State], noise: Callable[[float], Noise]
) -> Private | None:
    """Return the privacy that an experiment asks for, or raise :class:`ConfigError` where it cannot be had."""
    privacy = experiment.privacy
    if privacy.level == "none":
        return None
    kind, on = resources.outputs, privacy.chosen
    if on != "weights" and not kind.counts_classes:
        raise ConfigError.at("privacy.mechanism", on, f"it is for one class each, and the outputs are {kind.title}")
    for name, prototype in resources.prototypes.items():
        with one_line(partial(ConfigError.at, "prototypes", name), of=ValueError):
            if on in ("dp-sgd", "weights"):
                refuse_batchnorm(prototype.load(models[name]))
    plan = make_plan(privacy, experiment.rounds, experiment.local.epochs)
    weights = max(sum(tensor.numel() for tensor in state.values()) for state in models.values())
    refuse_absurd(plan, experiment.clients, weights, len(resources.pool or ()))
    return Private(plan, Releases(), noise(plan.a_round.noise))


def withhold(job: Job, *, train: LocalTrain, source: Source | None) -> Reply:
    """Train, and tell neither the number of examples nor the losses.

    A ``source`` is for mechanisms in which each record must be augmented, and dropped out, by chance of its own: with a
    seed that is known, one record more changes what happens to those after it in a batch, by more than any clip.
    """
    job = job if source is None else replace(job, seed=int.from_bytes(source(8), "little") >> 1)
    return replace(train(job), n_examples=1, metrics={})


def as_begun(folder: Path, experiment: Experiment) -> Experiment:
    """Return an experiment with the noise that its run was begun with: noise that was used cannot be planned again."""
    lines = read_ledger(folder) if experiment.privacy.level != "none" else []
    return with_values(experiment, {"privacy.noise": lines[0]["plan"]["noise"]}) if lines else experiment
