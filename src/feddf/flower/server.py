"""The server of a run over Flower: what it was given, its models, and the rounds that it runs over its sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from torch import Tensor

from feddf.config import ConfigError, differences, with_values
from feddf.flower.conversion import (
    Architectures,
    Labelled,
    as_examples,
    as_inputs,
    as_prototypes,
    check_finite,
    check_labels,
    check_weights,
    classes_of,
    no_examples,
)
from feddf.flower.settings import FlowerSettings
from feddf.flower.sites import Sites
from feddf.flower.wire import to_arrays, unpacked
from feddf.outputs import classes
from feddf.rounds import Federation, Spool, run_round, sample
from feddf.runs.store import RunFolder
from feddf.seeds import derive
from feddf.states import initial
from feddf.types import Client, Examples, Fusion, Inputs, Job, Part, Reply, Resources, Round, ServerState


class FlowerServer:
    """What the server holds. ``state`` is its present one; all else is fixed when the run starts."""

    def __init__(
        self,
        prototypes: Architectures,
        settings: FlowerSettings,
        pool: Inputs | Tensor | None,
        validation: Labelled | None,
        test: Labelled | None,
    ) -> None:
        known = as_prototypes(prototypes)
        unlabeled = as_inputs(pool) if pool is not None else None
        labelled = as_examples(validation) if validation is not None else no_examples()
        self.test = as_examples(test) if test is not None else labelled
        if settings.distils:
            _check_given(settings, unlabeled, labelled)
        settings.refuse(settings.mistakes(labelled=len(labelled) > 0, pooled=unlabeled is not None))
        for inputs in (unlabeled, self.test.inputs if len(self.test) else None):
            if inputs is not None:
                labelled = replace(labelled, outputs=classes(classes_of(known, inputs)))
        for key, examples in (("validation", labelled), ("test", self.test)):
            if len(examples):
                check_labels(key, examples, labelled.n_classes)
        for name, prototype in known.items():
            try:
                to_arrays(prototype.build().state_dict())
            except TypeError as error:
                raise ConfigError.at("prototypes", name, f"Flower cannot carry its weights: {error}") from error
        for key, inputs in (("pool", unlabeled), ("validation", labelled.inputs), ("test", self.test.inputs)):
            if inputs is not None and len(inputs):
                check_finite(key, inputs)
        known_classes = labelled.n_classes if unlabeled is not None or len(self.test) else None
        self.resources = Resources(known, unlabeled, labelled, None, classes(known_classes), self._n_clients)
        self._members: list[Client] = []
        self.validation = labelled
        self.settings = with_values(settings, {
            "flower.prototypes": tuple(known),
            "flower.pool_size": len(unlabeled) if unlabeled is not None else 0,
            "flower.validation_size": len(labelled),
        })  # fmt: skip
        self.state = ServerState(0, {name: initial(prototype, settings.seed) for name, prototype in known.items()})

    def change(self, changes: Mapping[str, Any]) -> None:
        """Take other values of some keys, those that are not ``None``."""
        given = {key: value for key, value in changes.items() if value is not None}
        self.settings = with_values(self.settings, given)

    def adopt(self, arrays: ArrayRecord, round: int = 0) -> None:
        """Take these weights for the present models."""
        models = unpacked(arrays, self.state.models)
        self.state = replace(self.state, round=round, models=models)

    def open(self, path: Path) -> RunFolder:
        """Return the run's folder: a new one, or one that holds this very run."""
        if not (path / "config.toml").exists():
            return RunFolder.create(path, self.settings)
        folder = RunFolder.open(path)
        before = folder.settings(FlowerSettings)
        if changed := differences(before, self.settings, also_free=("rounds", "clients.deadline")):
            raise ConfigError(f"{path} holds a run with other settings: {'; '.join(changed)}; use another folder")
        return folder

    def restore(self, folder: RunFolder) -> list[str]:
        """Go on from the folder's newest whole checkpoint; return what was wrong with newer ones."""
        saved, complaints = folder.latest()
        if saved is not None:
            check_weights(folder.path, saved.models, self.state.models)
            self.state = saved
        return [*complaints, *folder.forget_after(self.state.round)]

    def rounds(self, sites: Sites, fuse: Fusion, parts: Sequence[Part], spool: Spool) -> Iterator[Round]:
        """Run rounds over the sites; newcomers join between them."""
        sites.gather()
        while True:
            sites.begin_round()
            self._members = sites.clients
            federation = self.federation(sites.clients)
            closed = run_round(
                self.state, federation, engine=sites.train, train=elsewhere, fuse=fuse, parts=parts, spool=spool
            )
            self.state = closed.server
            yield closed

    def _n_clients(self, prototype: str) -> int:
        """Return how many of the clients that are known now have an architecture."""
        return sum(client.prototype == prototype for client in self._members)

    def federation(self, clients: list[Client]) -> Federation:
        """Return the federation of the clients that are known now."""
        return Federation(list(clients), self.settings.clients, self.settings.seed)

    def evaluations(self, number: int, clients: list[Client]) -> list[Job]:
        """Return the jobs of the clients that try the fused models after a round."""
        fraction, seed = self.settings.flower.evaluate_fraction, self.settings.seed
        if not fraction:
            return []
        config = self.settings.clients.model_copy(update={"fraction": fraction})
        asked = Federation(list(clients), config, derive(seed, "evaluate"))
        return [
            Job(client, number, self.state.sent_to(client), derive(seed, "evaluate", client.id))
            for client in sample(asked, number)
        ]


def _check_given(settings: FlowerSettings, pool: Inputs | None, validation: Examples) -> None:
    """Raise where a strategy that distils was not given what it needs: here it is no key of a configuration."""
    if pool is None:
        raise ConfigError.at("pool", None, "method 'feddf' needs unlabeled inputs")
    if len(pool) < 2:
        raise ConfigError.at("pool", f"{len(pool)} inputs", "a student learns from batches of at least 2")
    if settings.distill.stop == "validation" and not len(validation):
        allowed = "early stopping needs validation data; or set distill.stop = 'held-out-loss' or 'steps'"
        raise ConfigError.at("validation", None, allowed)


def elsewhere(job: Job) -> Reply:
    """Stand in for a client's training, which happens at its own place."""
    raise AssertionError(f"{job.id} trains at its own place")
